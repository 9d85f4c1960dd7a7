"""What a codec that is not lossless makes of the rows of a launch, and how that cuts planes into scale groups."""

import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl

from kvpool_gpuagent.kernels.tables import CopyShape

TILE_ELEMENTS = 8192  # of 8 warps: 16 KiB of bf16, of which several are in flight on each multiprocessor


class RowCodec(IntEnum):
    """The codecs; numbers are those of `kvpool.core.elements.Codec`."""

    INT8_GROUP8 = 2
    FP8_E4M3 = 3
    INT4_GROUP8 = 4


LIMITS = {RowCodec.INT8_GROUP8: 127.0, RowCodec.FP8_E4M3: 448.0, RowCodec.INT4_GROUP8: 7.0}
GROUP_ELEMENTS = 8
FLOAT_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class CodecShape:
    """What a codec makes of the rows of a launch.

    rows:  of the engine's cache. Every address and stride is a multiple of an element, also if unit_bytes is less.
    dtype: of the engine's elements: bfloat16, float16 or float32.
    """

    rows: CopyShape
    codec: RowCodec
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in FLOAT_TYPES:
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {self.dtype}")
        if self.row_elements % self.group_elements:
            raise ValueError(f"rows of {self.row_elements} elements are no multiple of a group of {GROUP_ELEMENTS}")

    @property
    def row_elements(self) -> int:
        return self.rows.row_bytes // self.dtype.itemsize

    @property
    def group_elements(self) -> int:
        """Elements that share a scale."""
        return self.row_elements if self.codec is RowCodec.FP8_E4M3 else GROUP_ELEMENTS

    @property
    def data_row_bytes(self) -> int:
        return self.row_elements // 2 if self.codec is RowCodec.INT4_GROUP8 else self.row_elements

    @property
    def payload_unit_bytes(self) -> int:
        """Divides where each group's data lies in a payload."""
        group_bytes = self.data_row_bytes * self.group_elements // self.row_elements
        return min(16, group_bytes & -group_bytes)


@dataclass(frozen=True, slots=True)
class GroupTiling:
    """How a head of a page's plane is cut: `tiles` runs of `groups` scale groups, each in at most `most_blocks`."""

    groups: int  # a power of two
    tiles: int
    most_blocks: int  # rounded up to a power of two
    warps: int

    def items(self, shape: CodecShape) -> int:
        """Items of a page."""
        return shape.rows.most_planes * shape.rows.most_heads * self.tiles

    def constants(self, shape: CodecShape) -> dict[str, Any]:
        """The constexpr arguments that quantize and dequantize share."""
        return {
            "BLOCKS": shape.rows.blocks,
            "MOST_PLANES": shape.rows.most_planes,
            "MOST_HEADS": shape.rows.most_heads,
            "TILES": self.tiles,
            "POSITIONS": shape.rows.positions,
            "BLOCK_ROWS": shape.rows.block_rows,
            "UNIT_ROWS": shape.rows.unit_rows,
            "ROW_PLANES": shape.rows.row_planes,
            "ROW_GROUPS": shape.row_elements // shape.group_elements,
            "GROUP": shape.group_elements,
            "LANES": triton.next_power_of_2(shape.group_elements),
            "UNIT_BYTES": max(shape.rows.unit_bytes, shape.dtype.itemsize),
            "PAYLOAD_UNIT_BYTES": shape.payload_unit_bytes,
            "CODEC": shape.codec.value,
            "FLOAT": FLOAT_TYPES[shape.dtype],
            "TILE": self.groups,
            "TILE_BLOCKS": self.most_blocks,
        }


@functools.lru_cache(maxsize=256)
def group_tiling(shape: CodecShape) -> GroupTiling:
    """How to cut the planes of such pages."""
    lanes = triton.next_power_of_2(shape.group_elements)
    row = shape.row_elements // shape.group_elements
    head = shape.rows.positions * row
    groups = min(max(1, TILE_ELEMENTS // lanes), triton.next_power_of_2(head))
    tiles = triton.cdiv(head, groups)
    most_blocks = 1
    for tile in range(tiles):
        first, last = tile * groups // row, (min(head, (tile + 1) * groups) - 1) // row
        most_blocks = max(most_blocks, last // shape.rows.block_rows - first // shape.rows.block_rows + 1)
    warps = max(1, min(8, groups * lanes // 1024))
    return GroupTiling(groups, tiles, triton.next_power_of_2(most_blocks), warps)
