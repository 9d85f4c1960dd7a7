"""Dequantize and scatter: data and scales of pages become rows of an engine's paged cache."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool_gpuagent.kernels.codec_shapes import CodecShape, RowCodec, group_tiling
from kvpool_gpuagent.kernels.copying import item_of, table_row, tile_blocks
from kvpool_gpuagent.kernels.launching import Launch
from kvpool_gpuagent.kernels.row_codecs import decode_groups, group_offsets, lane_pointers
from kvpool_gpuagent.kernels.scatter import is_wanted
from kvpool_gpuagent.kernels.tables import PAGE_COLUMNS, PLANE_COLUMNS, PageColumn, PlaneColumn

_PAYLOAD_ADDRESS = tl.constexpr(PageColumn.PAYLOAD_ADDRESS.value)
_FIRST_PLANE = tl.constexpr(PageColumn.FIRST_PLANE.value)
_SKIP_TOKENS = tl.constexpr(PageColumn.SKIP_TOKENS.value)
_ADDRESS = tl.constexpr(PlaneColumn.ADDRESS.value)
_PAYLOAD_OFFSET = tl.constexpr(PlaneColumn.PAYLOAD_OFFSET.value)
_SCALE_PAYLOAD_OFFSET = tl.constexpr(PlaneColumn.SCALE_PAYLOAD_OFFSET.value)
_PAGE_COLUMNS = tl.constexpr(PAGE_COLUMNS)
_PLANE_COLUMNS = tl.constexpr(PLANE_COLUMNS)
_INT4 = tl.constexpr(RowCodec.INT4_GROUP8.value)
_FP8 = tl.constexpr(RowCodec.FP8_E4M3.value)


def dequantize_rows_reference(
    data: Tensor, scales: Tensor, codec: RowCodec, dtype: torch.dtype, group_elements: int
) -> Tensor:
    """The same arithmetic by torch, with its own casts.

    data:    [..., data bytes] uint8. scales: [..., groups] of the scales' type.
    returns: [..., row elements] of dtype.
    """
    if codec is RowCodec.FP8_E4M3:
        values = data.view(torch.float8_e4m3fn).float()
    elif codec is RowCodec.INT8_GROUP8:
        values = data.view(torch.int8).float()
    else:
        nibbles = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
        values = ((nibbles ^ 8).to(torch.int8) - 8).float()
    scale = scales.float()
    is_broken = ~scale.isfinite()
    scale = torch.where(is_broken | (scale.abs() < 2.0**-110), 0.0, scale)[..., None]
    largest = torch.finfo(dtype).max
    y = (values.view(*scales.shape, group_elements) * scale).clamp(-largest, largest)
    return torch.where(is_broken[..., None], torch.nan, y).flatten(-2).to(dtype)


@triton.jit
def load_groups(
    payload: tl.tensor,
    plane: tl.tensor,
    nth_group: tl.tensor,
    exists: tl.tensor,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    PAYLOAD_UNIT_BYTES: tl.constexpr,
    CODEC: tl.constexpr,
    RAW: tl.constexpr,
) -> tl.tuple:
    """int32 codes [TILE, LANES] and bit patterns of scales [TILE] of some groups of a plane, from a page's payload."""
    lane = tl.arange(0, LANES)[None, :]
    data = payload + tl.load(plane + _PAYLOAD_OFFSET)
    if CODEC == _INT4:
        words = tl.load(data.to(tl.pointer_type(tl.int32)) + nth_group, mask=exists, other=0)
        codes = (((words[:, None] >> (4 * lane)) & 15) ^ 8) - 8
    else:
        source = lane_pointers(data, nth_group * GROUP, LANES, tl.int8, PAYLOAD_UNIT_BYTES)
        mask = exists[:, None] & (lane < GROUP)
        codes = tl.load(source, mask=mask, other=0, eviction_policy="evict_first").to(tl.int32)
    scales = (payload + tl.load(plane + _SCALE_PAYLOAD_OFFSET)).to(tl.pointer_type(tl.int32 if CODEC == _FP8 else RAW))
    return codes, tl.load(scales + nth_group, mask=exists, other=0)


@triton.jit(do_not_specialize=["pages", "blocks", "planes", "items"])
def dequantize_kernel(
    pages: tl.int64,
    blocks: tl.int64,
    planes: tl.int64,
    items: tl.int32,
    BLOCKS: tl.constexpr,
    MOST_PLANES: tl.constexpr,
    MOST_HEADS: tl.constexpr,
    TILES: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    UNIT_ROWS: tl.constexpr,
    ROW_PLANES: tl.constexpr,
    ROW_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    PAYLOAD_UNIT_BYTES: tl.constexpr,
    CODEC: tl.constexpr,
    FLOAT: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
) -> None:
    RAW: tl.constexpr = tl.int32 if tl.float32 == FLOAT else tl.int16
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile, nth_head, nth_plane, nth_page = item_of(item, TILES, MOST_HEADS, MOST_PLANES)
        row = table_row(blocks, nth_page, BLOCKS)
        ids = tile_blocks(row, tile, BLOCK_ROWS, ROW_GROUPS, TILE, TILE_BLOCKS, BLOCKS)
        page = table_row(pages, nth_page, _PAGE_COLUMNS)
        tile_end = (tile * TILE + TILE + ROW_GROUPS - 1) // ROW_GROUPS
        if is_wanted(page, nth_plane, nth_head, tile_end, _FIRST_PLANE):
            plane = table_row(planes, tl.load(page + _FIRST_PLANE) + nth_plane, _PLANE_COLUMNS)
            offset, nth_group, position, exists = group_offsets(
                plane, ids, tile, nth_head,
                POSITIONS, BLOCK_ROWS, UNIT_ROWS, ROW_PLANES, ROW_GROUPS, GROUP, CODEC, FLOAT, TILE, TILE_BLOCKS,
            )  # fmt: skip
            exists &= position >= tl.load(page + _SKIP_TOKENS)
            codes, scales = load_groups(
                tl.load(page + _PAYLOAD_ADDRESS), plane, nth_group, exists, GROUP, LANES, PAYLOAD_UNIT_BYTES, CODEC, RAW
            )
            target = lane_pointers(tl.load(plane + _ADDRESS), offset, LANES, RAW, UNIT_BYTES)
            mask = exists[:, None] & (tl.arange(0, LANES)[None, :] < GROUP)
            tl.store(target, decode_groups(codes, scales, CODEC, FLOAT), mask=mask)


@functools.lru_cache(maxsize=256)
def dequantize_launch(shape: CodecShape) -> Launch:
    """Make the launch that decodes the payloads of all pages of a burst into the rows of all their planes.

    Start it with the addresses of pages [N, 8], blocks [N, shape.rows.blocks] and planes [P, 8], contiguous int64: see
    `tables`. They lie on the device or in pinned memory, unchanged until the launch has run. No destination row may be
    named twice: which page wins would be open. Neither the tables nor what they name is checked.

    shape: of the planes and of what pages hold for them; as for quantize_launch.

    The first SKIP_TOKENS positions of a page, pages without HEADS, and what a page has of heads that are not the
    rank's, are left out. Writes at most pages * planes * heads * shape.rows.head_bytes bytes and reads what the codec
    makes of them; equal, bit for bit, to kvpool.core.codecs.
    """
    cut = group_tiling(shape)
    return Launch(dequantize_kernel, cut.constants(shape), cut.warps, cut.items(shape))
