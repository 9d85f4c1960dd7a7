"""Gather: rows of an engine's paged cache become the payloads of pages, bit for bit."""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool_gpuagent.kernels.copying import item_of, table_row, tile_blocks, tile_pointers, tiling
from kvpool_gpuagent.kernels.launching import Launch
from kvpool_gpuagent.kernels.tables import PAGE_COLUMNS, PLANE_COLUMNS, CopyShape, PageColumn

_PAYLOAD_ADDRESS = tl.constexpr(PageColumn.PAYLOAD_ADDRESS.value)
_HEADS = tl.constexpr(PageColumn.HEADS.value)
_PAGE_COLUMNS = tl.constexpr(PAGE_COLUMNS)
_PLANE_COLUMNS = tl.constexpr(PLANE_COLUMNS)


def gather_pages_reference(caches: Sequence[Tensor], blocks: Tensor, positions: int) -> Tensor:
    """The same rows by torch.

    caches:  one view a plane, [block, token of a block, head, byte] uint8, any strides.
    blocks:  [N, B] int64.
    returns: [N, plane, position, head, byte].
    """
    return torch.stack([cache[blocks].flatten(1, 2)[:, :positions] for cache in caches], dim=1)


@triton.jit(do_not_specialize=["pages", "blocks", "planes", "items"])
def gather_kernel(
    pages: tl.int64,
    blocks: tl.int64,
    planes: tl.int64,
    items: tl.int32,
    FIRST_PLANE: tl.constexpr,
    BLOCKS: tl.constexpr,
    MOST_PLANES: tl.constexpr,
    MOST_HEADS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    UNIT_ROWS: tl.constexpr,
    ROW_PLANES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
) -> None:
    ROW: tl.constexpr = ROW_BYTES * 8 // ELEMENT.primitive_bitwidth  # elements
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile, nth_head, nth_plane, nth_page = item_of(item, TILES, MOST_HEADS, MOST_PLANES)
        ids = tile_blocks(table_row(blocks, nth_page, BLOCKS), tile, BLOCK_ROWS, ROW, TILE, TILE_BLOCKS, BLOCKS)
        page = table_row(pages, nth_page, _PAGE_COLUMNS)
        # All of the row is read before anything is decided: one trip over the host link.
        payload, first_plane = tl.load(page + _PAYLOAD_ADDRESS), tl.load(page + FIRST_PLANE)
        if (nth_head < tl.load(page + _HEADS)) & (nth_plane < tl.load(page + FIRST_PLANE + 1)):
            plane = table_row(planes, first_plane + nth_plane, _PLANE_COLUMNS)
            source, destination, _position, mask = tile_pointers(
                payload, plane, ids, tile, nth_head,
                BLOCK_ROWS, UNIT_ROWS, ROW_PLANES, ROW_BYTES, UNIT_BYTES, HEAD_BYTES, ELEMENT, TILE, TILE_BLOCKS,
            )  # fmt: skip
            tl.store(destination, tl.load(source, mask=mask, eviction_policy="evict_first"), mask=mask)


@functools.lru_cache(maxsize=256)
def gather_launch(shape: CopyShape, scales: bool = False) -> Launch:
    """Make the launch that copies the rows of all planes of all pages of a burst into the pages' payloads.

    Start it with the addresses of pages [N, 8], blocks [N, shape.blocks] and planes [P, 8], contiguous int64: see
    `tables`. They lie on the device or in pinned memory, unchanged until the launch has run. Repeated blocks are fine.
    Neither the tables nor what they name is checked.

    shape:  of the planes that are copied.
    scales: copy the scale planes (FIRST_SCALE_PLANE, SCALE_PLANE_COUNT), with a shape of their own, not the data.

    Pages without HEADS, and bytes of payloads that belong to no plane and head of the rank, stay as they are. Moves
    2 * pages * planes * heads * shape.head_bytes bytes; equal, bit for bit, to the reference.
    """
    cut = tiling(shape)
    first_plane = PageColumn.FIRST_SCALE_PLANE if scales else PageColumn.FIRST_PLANE
    constants = {"FIRST_PLANE": first_plane.value} | cut.constants(shape)
    return Launch(gather_kernel, constants, cut.warps, cut.items(shape))
