"""Arithmetic of the codecs that are not lossless, as kernels do it, and how a launch cuts planes into scale groups.

`kvpool.core.codecs` specifies every step; bytes here are equal to its bytes, on a GPU and in the interpreter. Casts to
bf16 and e4m3 are spelled out in integers, because the interpreter's own truncate. A clamp stands between each product
and the next sum, so the compiler has nothing to contract.
"""

import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl

from kvpool.kernels.tables import CopyShape, PlaneColumn

TILE_ELEMENTS = 8192  # of 8 warps: 16 KiB of bf16, of which several are in flight on each multiprocessor

_ADDRESS = tl.constexpr(PlaneColumn.ADDRESS.value)
_BLOCK_STRIDE = tl.constexpr(PlaneColumn.BLOCK_STRIDE.value)
_TOKEN_STRIDE = tl.constexpr(PlaneColumn.TOKEN_STRIDE.value)
_HEAD_STRIDE = tl.constexpr(PlaneColumn.HEAD_STRIDE.value)

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_ZERO_BELOW = tl.constexpr((127 - 100) << 23)  # 2**-100
_ZERO_SCALE_BELOW = tl.constexpr((127 - 110) << 23)  # 2**-110
_INTEGER_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23
_SUBNORMAL_MAGIC = tl.constexpr(16384.0)
_SUBNORMAL_MAGIC_BITS = tl.constexpr((127 + 14) << 23)
_SMALLEST_NORMAL = tl.constexpr((127 - 6) << 23)  # 2**-6


class RowCodec(IntEnum):
    """The codecs; numbers are those of `kvpool.core.elements.Codec`."""

    INT8_GROUP8 = 2
    FP8_E4M3 = 3
    INT4_GROUP8 = 4


_FP8 = tl.constexpr(RowCodec.FP8_E4M3.value)
_INT8 = tl.constexpr(RowCodec.INT8_GROUP8.value)
_INT4 = tl.constexpr(RowCodec.INT4_GROUP8.value)
LIMITS = {RowCodec.INT8_GROUP8: 127.0, RowCodec.FP8_E4M3: 448.0, RowCodec.INT4_GROUP8: 7.0}
GROUP_ELEMENTS = 8
RAW_TYPES = {torch.bfloat16: tl.int16, torch.float16: tl.int16, torch.float32: tl.int32}
FLOAT_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
LARGEST_BITS = {torch.bfloat16: 0x7F7F0000, torch.float16: 0x477FE000, torch.float32: 0x7F7FFFFF}  # of float32


@dataclass(frozen=True, slots=True)
class CodecShape:
    """What a codec makes of the rows of a launch.

    rows:  of the engine's cache; every address and stride is a multiple of an element.
    dtype: of the engine's elements: bfloat16, float16 or float32.
    """

    rows: CopyShape
    codec: RowCodec
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in RAW_TYPES:
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {self.dtype}")
        if self.rows.unit_bytes % self.dtype.itemsize:
            raise ValueError(f"rows.unit_bytes {self.rows.unit_bytes} is less than an element of {self.dtype}")
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
    def scale_dtype(self) -> torch.dtype:
        return torch.float32 if self.codec is RowCodec.FP8_E4M3 else self.dtype

    @property
    def data_row_bytes(self) -> int:
        return self.row_elements // 2 if self.codec is RowCodec.INT4_GROUP8 else self.row_elements

    @property
    def scale_row_bytes(self) -> int:
        return self.row_elements // self.group_elements * self.scale_dtype.itemsize

    @property
    def payload_unit_bytes(self) -> int:
        """Divides where each group's data lies in a payload."""
        group_bytes = self.data_row_bytes * self.group_elements // self.row_elements
        return min(16, group_bytes & -group_bytes)


@dataclass(frozen=True, slots=True)
class GroupTiling:
    """How a plane of a page is cut: `tiles` runs of `groups` scale groups, each in at most `most_blocks` blocks."""

    groups: int  # a power of two
    tiles: int
    most_blocks: int  # rounded up to a power of two
    warps: int

    def constants(self, shape: CodecShape) -> dict[str, Any]:
        """The constexpr arguments that quantize and dequantize share."""
        return {
            "BLOCKS": shape.rows.blocks,
            "MOST_PLANES": shape.rows.most_planes,
            "TILES": self.tiles,
            "POSITIONS": shape.rows.positions,
            "BLOCK_ROWS": shape.rows.block_rows,
            "HEADS": shape.rows.heads,
            "ROW_GROUPS": shape.row_elements // shape.group_elements,
            "GROUP": shape.group_elements,
            "LANES": triton.next_power_of_2(shape.group_elements),
            "UNIT_BYTES": shape.rows.unit_bytes,
            "PAYLOAD_UNIT_BYTES": shape.payload_unit_bytes,
            "CODEC": shape.codec.value,
            "LIMIT": LIMITS[shape.codec],
            "FLOAT": FLOAT_TYPES[shape.dtype],
            "RAW": RAW_TYPES[shape.dtype],
            "SCALE_FLOAT": FLOAT_TYPES[shape.scale_dtype],
            "SCALE_RAW": RAW_TYPES[shape.scale_dtype],
            "LARGEST_BITS": LARGEST_BITS[shape.dtype],
            "TILE": self.groups,
            "TILE_BLOCKS": self.most_blocks,
        }


@functools.lru_cache(maxsize=256)
def group_tiling(shape: CodecShape) -> GroupTiling:
    """How to cut the planes of such pages."""
    lanes = triton.next_power_of_2(shape.group_elements)
    token = shape.rows.heads * shape.row_elements // shape.group_elements
    plane = shape.rows.positions * token
    groups = min(max(1, TILE_ELEMENTS // lanes), triton.next_power_of_2(plane))
    tiles = triton.cdiv(plane, groups)
    most_blocks = 1
    for tile in range(tiles):
        first, last = tile * groups // token, (min(plane, (tile + 1) * groups) - 1) // token
        most_blocks = max(most_blocks, last // shape.rows.block_rows - first // shape.rows.block_rows + 1)
    warps = max(1, min(8, groups * lanes // 1024))
    return GroupTiling(groups, tiles, triton.next_power_of_2(most_blocks), warps)


@triton.jit
def group_offsets(
    plane: tl.tensor,
    ids: tl.tensor,
    tile: tl.tensor,
    POSITIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    ROW_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    RAW: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
) -> tl.tuple:
    """For the groups of a tile: offset in elements from the plane's address, number in the plane, position, existence.

    plane: pointer to the plane's row of its table; ids: of the blocks that the tile touches. All results are [TILE].
    """
    BYTES: tl.constexpr = RAW.primitive_bitwidth // 8
    TOKEN: tl.constexpr = HEADS * ROW_GROUPS
    start = tile * TILE
    first_position = start // TOKEN
    nth_group = start + tl.arange(0, TILE)
    local = nth_group - first_position * TOKEN
    position = first_position + local // TOKEN
    block = ids
    if TILE_BLOCKS > 1:
        nth = tl.minimum(position // BLOCK_ROWS - first_position // BLOCK_ROWS, TILE_BLOCKS - 1)
        block = tl.gather(ids, nth, 0)
    offset = block * (tl.load(plane + _BLOCK_STRIDE) // BYTES)
    offset += (position % BLOCK_ROWS).to(tl.int64) * (tl.load(plane + _TOKEN_STRIDE) // BYTES)
    if HEADS > 1:
        offset += (local % TOKEN // ROW_GROUPS).to(tl.int64) * (tl.load(plane + _HEAD_STRIDE) // BYTES)
    offset += local % ROW_GROUPS * GROUP
    return offset, nth_group, position, nth_group < POSITIONS * TOKEN


@triton.jit
def lane_pointers(
    address: tl.tensor,
    offset: tl.tensor,
    LANES: tl.constexpr,
    RAW: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
) -> tl.tensor:
    """[TILE, LANES] pointers to elements that begin `offset` elements from an address; both are multiples of a unit."""
    UNIT: tl.constexpr = UNIT_BYTES * 8 // RAW.primitive_bitwidth
    first = tl.multiple_of(address.to(tl.pointer_type(RAW)), UNIT_BYTES)
    offsets = offset[:, None] + tl.arange(0, LANES)[None, :]
    return first + tl.multiple_of(tl.max_contiguous(offsets, [1, LANES]), [1, UNIT if UNIT < LANES else LANES])


@triton.jit
def widen(raw: tl.tensor, FLOAT: tl.constexpr) -> tl.tensor:
    """Bit patterns of elements as float32, exactly."""
    if tl.bfloat16 == FLOAT:
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif tl.float16 == FLOAT:
        x = raw.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = raw.to(tl.float32, bitcast=True)
    return x


@triton.jit
def narrow(y: tl.tensor, FLOAT: tl.constexpr) -> tl.tensor:
    """Finite float32 rounded to nearest even, as int16 or int32 bit patterns."""
    if tl.bfloat16 == FLOAT:
        bits = y.to(tl.uint32, bitcast=True)
        raw = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif tl.float16 == FLOAT:
        raw = y.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        raw = y.to(tl.int32, bitcast=True)
    return raw


@triton.jit
def nan_of(FLOAT: tl.constexpr, RAW: tl.constexpr) -> tl.tensor:
    """The bit pattern of a quiet NaN."""
    if tl.bfloat16 == FLOAT:
        nan = tl.full((), 0x7FC0, RAW)
    elif tl.float16 == FLOAT:
        nan = tl.full((), 0x7E00, RAW)
    else:
        nan = tl.full((), 0x7FC00000, RAW)
    return nan


@triton.jit
def scales_of(
    largest: tl.tensor,
    LIMIT: tl.constexpr,
    LARGEST_BITS: tl.constexpr,
    SCALE_FLOAT: tl.constexpr,
    SCALE_RAW: tl.constexpr,
) -> tl.tuple:
    """Scales as bit patterns, 1 / scale, and whether a group is neither zeros nor broken. largest: int32 magnitudes."""
    finite = tl.minimum(largest, LARGEST_BITS).to(tl.float32, bitcast=True)
    stored = narrow(tl.math.div_rn(finite, LIMIT + tl.zeros_like(finite)), SCALE_FLOAT)
    is_broken = largest > _INFINITY
    is_live = (largest >= _ZERO_BELOW) & (stored != 0) & (largest <= _INFINITY)
    stored = tl.where(is_live, stored, tl.where(is_broken, nan_of(SCALE_FLOAT, SCALE_RAW), tl.zeros_like(stored)))
    scale = tl.where(is_live, widen(stored, SCALE_FLOAT), 1.0)
    return stored, tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), is_live


@triton.jit
def integers_of(y: tl.tensor) -> tl.tensor:
    """The nearest even integers, in the low bits of int32."""
    return (y + _INTEGER_MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def e4m3_of(y: tl.tensor) -> tl.tensor:
    """float32 in [-448, 448] as e4m3 codes, in the low bits of int32."""
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    rounded = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    sums = magnitude.to(tl.float32, bitcast=True) + _SUBNORMAL_MAGIC
    subnormal = sums.to(tl.int32, bitcast=True) - _SUBNORMAL_MAGIC_BITS
    return tl.where(magnitude >= _SMALLEST_NORMAL, rounded, subnormal) | ((bits >> 24) & 128)


@triton.jit
def e4m3_values(code: tl.tensor) -> tl.tensor:
    """int32 codes of e4m3 as float32; what 0x7f and 0xff give is not to be used."""
    magnitude = code & 127
    subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # 2**-9
    bits = tl.where(magnitude >= 8, (magnitude << 20) + ((127 - 7) << 23), subnormal)
    # The sign as a bit: a minus would be 0 - x here, and lose that of -0.
    return (bits | ((code & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def finite_scales(stored: tl.tensor, SCALE_FLOAT: tl.constexpr) -> tl.tuple:
    """Scales as float32, too small and broken ones as 0, and which are broken, from their bit patterns."""
    scale = widen(stored, SCALE_FLOAT)
    magnitude = scale.to(tl.int32, bitcast=True) & _MAGNITUDE
    is_broken = magnitude >= _INFINITY
    return tl.where(is_broken | (magnitude < _ZERO_SCALE_BELOW), 0.0, scale), is_broken
