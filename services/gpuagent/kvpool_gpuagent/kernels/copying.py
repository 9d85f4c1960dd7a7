"""What gather and scatter share: which bytes of a page and of an engine's cache one tile of a launch moves.

A launch has one item for each (page, plane, head, tile). A tile is a run of TILE elements of one head in one plane of
one page, so a lane is only idle in a head's last tile, whatever the sizes. An element has up to 8 bytes; with 16-byte
units the compiler joins two of them, because offsets of both sides are known to be even.
"""

import functools
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from kvpool_gpuagent.kernels.tables import CopyShape, PlaneColumn

# 8 warps with 16 elements a thread: 32 KiB a tile, of which two or three are in flight on each multiprocessor.
TILE_ELEMENTS = 4096
ELEMENTS_BY_BYTES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}

_ADDRESS = tl.constexpr(PlaneColumn.ADDRESS.value)
_BLOCK_STRIDE = tl.constexpr(PlaneColumn.BLOCK_STRIDE.value)
_TOKEN_STRIDE = tl.constexpr(PlaneColumn.TOKEN_STRIDE.value)
_HEAD_STRIDE = tl.constexpr(PlaneColumn.HEAD_STRIDE.value)
_PAYLOAD_OFFSET = tl.constexpr(PlaneColumn.PAYLOAD_OFFSET.value)
_PAYLOAD_UNIT_STRIDE = tl.constexpr(PlaneColumn.PAYLOAD_UNIT_STRIDE.value)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a head of a page's plane is cut: `tiles` runs of `elements`, each touching at most `most_blocks` blocks."""

    element: Any  # a Triton integer type
    elements: int  # a power of two
    tiles: int
    most_blocks: int  # rounded up to a power of two
    warps: int

    def items(self, shape: CopyShape) -> int:
        """Items of a page."""
        return shape.most_planes * shape.most_heads * self.tiles

    def constants(self, shape: CopyShape) -> dict[str, Any]:
        """The constexpr arguments that gather and scatter share."""
        return {
            "BLOCKS": shape.blocks,
            "MOST_PLANES": shape.most_planes,
            "MOST_HEADS": shape.most_heads,
            "TILES": self.tiles,
            "BLOCK_ROWS": shape.block_rows,
            "UNIT_ROWS": shape.unit_rows,
            "ROW_PLANES": shape.row_planes,
            "ROW_BYTES": shape.row_bytes,
            "UNIT_BYTES": shape.unit_bytes,
            "HEAD_BYTES": shape.head_bytes,
            "ELEMENT": self.element,
            "TILE": self.elements,
            "TILE_BLOCKS": self.most_blocks,
        }


@functools.lru_cache(maxsize=256)
def tiling(shape: CopyShape) -> Tiling:
    """How to cut the planes of such pages."""
    element_bytes = min(shape.unit_bytes, 8)
    head, row = shape.head_bytes // element_bytes, shape.row_bytes // element_bytes
    elements = min(TILE_ELEMENTS, triton.next_power_of_2(head))
    tiles = triton.cdiv(head, elements)
    most_blocks = 1
    for tile in range(tiles):
        first, last = tile * elements // row, (min(head, (tile + 1) * elements) - 1) // row
        most_blocks = max(most_blocks, last // shape.block_rows - first // shape.block_rows + 1)
    warps = max(1, min(8, elements // 512))
    return Tiling(ELEMENTS_BY_BYTES[element_bytes], elements, tiles, triton.next_power_of_2(most_blocks), warps)


@triton.jit
def item_of(item: tl.tensor, TILES: tl.constexpr, MOST_HEADS: tl.constexpr, MOST_PLANES: tl.constexpr) -> tl.tuple:
    """Numbers of an item's tile, head, plane and page."""
    nth_row = item // TILES
    nth_plane = nth_row // MOST_HEADS
    return item % TILES, nth_row % MOST_HEADS, nth_plane % MOST_PLANES, nth_plane // MOST_PLANES


@triton.jit
def tile_blocks(
    blocks: tl.tensor,
    tile: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """The ids of the blocks that a tile touches, [TILE_BLOCKS] or one number; blocks points to the page's row.

    ROW: elements. One coalesced read, before anything that depends on the page's row: both may lie across the host
    link.
    """
    first_block = tile * TILE // ROW // BLOCK_ROWS
    if TILE_BLOCKS == 1:
        ids = tl.load(blocks + first_block)
    else:
        nth = first_block + tl.arange(0, TILE_BLOCKS)
        ids = tl.load(blocks + nth, mask=nth < BLOCKS, other=0)
    return ids


@triton.jit
def tile_pointers(
    payload: tl.tensor,
    plane: tl.tensor,
    ids: tl.tensor,
    tile: tl.tensor,
    head: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    UNIT_ROWS: tl.constexpr,
    ROW_PLANES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
) -> tl.tuple:
    """Where the elements of a tile lie in the engine and in the page, their positions, and which exist (all [TILE]).

    payload: int64 address of the page's payload; plane: pointer to the plane's row of its table; ids: of tile_blocks.
    """
    BYTES: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    PAIR: tl.constexpr = UNIT_BYTES // BYTES  # elements that lie side by side on both sides, whatever the strides
    ROW: tl.constexpr = ROW_BYTES // BYTES
    start = tile * TILE
    first_position = start // ROW
    lane = tl.arange(0, TILE)
    element = tl.multiple_of(start - first_position * ROW, PAIR) + lane
    position = first_position + element // ROW
    mask = start + lane < HEAD_BYTES // BYTES

    block = ids
    if TILE_BLOCKS > 1:
        nth = tl.minimum(position // BLOCK_ROWS - first_position // BLOCK_ROWS, TILE_BLOCKS - 1)
        block = tl.max_constancy(tl.gather(ids, nth, 0), [PAIR])
    token = tl.max_constancy(position % BLOCK_ROWS, [PAIR])
    offset = block * tl.multiple_of(tl.load(plane + _BLOCK_STRIDE) // BYTES, PAIR)
    offset += token.to(tl.int64) * tl.multiple_of(tl.load(plane + _TOKEN_STRIDE) // BYTES, PAIR)
    engine_address = tl.load(plane + _ADDRESS) + head * tl.load(plane + _HEAD_STRIDE)
    engine = tl.multiple_of(engine_address.to(tl.pointer_type(ELEMENT)), UNIT_BYTES)

    unit = tl.max_constancy(position // UNIT_ROWS, [PAIR])
    row = tl.max_constancy(position % UNIT_ROWS, [PAIR])
    page_offset = unit.to(tl.int64) * tl.multiple_of(tl.load(plane + _PAYLOAD_UNIT_STRIDE) // BYTES, PAIR)
    page_offset += row * (ROW_PLANES * ROW)
    page_address = payload + tl.load(plane + _PAYLOAD_OFFSET) + head.to(tl.int64) * (UNIT_ROWS * ROW_PLANES * ROW_BYTES)
    page = tl.multiple_of(page_address.to(tl.pointer_type(ELEMENT)), UNIT_BYTES)
    return engine + (offset + element % ROW), page + (page_offset + element % ROW), position, mask


@triton.jit
def table_row(table: tl.tensor, row: tl.tensor, COLUMNS: tl.constexpr) -> tl.tensor:
    """The pointer to a row of an int64 table, of which the address is given: an int32 to Triton where it is so low."""
    return table.to(tl.int64).to(tl.pointer_type(tl.int64)) + tl.cast(row, tl.int64) * COLUMNS
