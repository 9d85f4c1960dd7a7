"""Gather and quantize: rows of an engine's paged cache become data and scales of pages."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool_gpuagent.kernels.codec_shapes import LIMITS, CodecShape, RowCodec, group_tiling
from kvpool_gpuagent.kernels.copying import item_of, table_row, tile_blocks
from kvpool_gpuagent.kernels.launching import Launch
from kvpool_gpuagent.kernels.row_codecs import encode_groups, group_offsets, lane_pointers, widen
from kvpool_gpuagent.kernels.tables import PAGE_COLUMNS, PLANE_COLUMNS, PageColumn, PlaneColumn

_PAYLOAD_ADDRESS = tl.constexpr(PageColumn.PAYLOAD_ADDRESS.value)
_FIRST_PLANE = tl.constexpr(PageColumn.FIRST_PLANE.value)
_PLANE_COUNT = tl.constexpr(PageColumn.PLANE_COUNT.value)
_HEADS = tl.constexpr(PageColumn.HEADS.value)
_ADDRESS = tl.constexpr(PlaneColumn.ADDRESS.value)
_PAYLOAD_OFFSET = tl.constexpr(PlaneColumn.PAYLOAD_OFFSET.value)
_SCALE_PAYLOAD_OFFSET = tl.constexpr(PlaneColumn.SCALE_PAYLOAD_OFFSET.value)
_PAGE_COLUMNS = tl.constexpr(PAGE_COLUMNS)
_PLANE_COLUMNS = tl.constexpr(PLANE_COLUMNS)
_INT4 = tl.constexpr(RowCodec.INT4_GROUP8.value)


def quantize_rows_reference(rows: Tensor, codec: RowCodec, group_elements: int) -> tuple[Tensor, Tensor]:
    """The same arithmetic by torch, with its own casts.

    rows:    [..., row elements] bfloat16, float16 or float32.
    returns: ([..., data bytes] uint8, [..., groups] of the scales' type).
    """
    x = rows.float().view(*rows.shape[:-1], -1, group_elements)
    limit = torch.tensor(LIMITS[codec])
    largest = x.abs().amax(-1)
    scale_dtype = torch.float32 if codec is RowCodec.FP8_E4M3 else rows.dtype
    scales = (largest.clamp(max=torch.finfo(rows.dtype).max) / limit).to(scale_dtype)
    is_live = (largest >= 2.0**-100) & (scales != 0)
    y = torch.where(is_live[..., None], x * (1 / scales.float())[..., None], 0.0).clamp(-limit, limit).flatten(-2)
    scales = torch.where(
        is_live, scales, torch.where(largest.isnan(), torch.full_like(scales, torch.nan), torch.zeros_like(scales))
    )
    if codec is RowCodec.FP8_E4M3:
        return y.to(torch.float8_e4m3fn).view(torch.uint8), scales
    integers = y.round().to(torch.int8).view(torch.uint8)
    if codec is RowCodec.INT4_GROUP8:
        integers = (integers[..., 0::2] & 15) | (integers[..., 1::2] << 4)
    return integers, scales


@triton.jit(do_not_specialize=["pages", "blocks", "planes", "items"])
def quantize_kernel(
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
        if (nth_head < tl.load(page + _HEADS)) & (nth_plane < tl.load(page + _PLANE_COUNT)):
            plane = table_row(planes, tl.load(page + _FIRST_PLANE) + nth_plane, _PLANE_COLUMNS)
            offset, nth_group, _position, exists = group_offsets(
                plane, ids, tile, nth_head,
                POSITIONS, BLOCK_ROWS, UNIT_ROWS, ROW_PLANES, ROW_GROUPS, GROUP, CODEC, FLOAT, TILE, TILE_BLOCKS,
            )  # fmt: skip
            lane = tl.arange(0, LANES)[None, :]
            mask = exists[:, None] & (lane < GROUP)
            source = lane_pointers(tl.load(plane + _ADDRESS), offset, LANES, RAW, UNIT_BYTES)
            x = widen(tl.load(source, mask=mask, other=0, eviction_policy="evict_first"), FLOAT)
            codes, scales = encode_groups(x, CODEC, FLOAT)

            payload = tl.load(page + _PAYLOAD_ADDRESS)
            data = payload + tl.load(plane + _PAYLOAD_OFFSET)
            if CODEC == _INT4:
                words = tl.sum((codes & 15) << (4 * lane), axis=1)  # 8 nibbles, which do not meet
                tl.store(data.to(tl.pointer_type(tl.int32)) + nth_group, words, mask=exists)
            else:
                target = lane_pointers(data, nth_group * GROUP, LANES, tl.int8, PAYLOAD_UNIT_BYTES)
                tl.store(target, codes.to(tl.int8), mask=mask)
            scale_base = payload + tl.load(plane + _SCALE_PAYLOAD_OFFSET)
            tl.store(scale_base.to(tl.pointer_type(scales.dtype)) + nth_group, scales, mask=exists)


@functools.lru_cache(maxsize=256)
def quantize_launch(shape: CodecShape) -> Launch:
    """Make the launch that quantizes the rows of all planes of all pages of a burst into the pages' payloads.

    Start it with the addresses of pages [N, 8], blocks [N, shape.rows.blocks] and planes [P, 8], contiguous int64: see
    `tables`. They lie on the device or in pinned memory, unchanged until the launch has run. Repeated blocks are fine.
    Neither the tables nor what they name is checked.

    shape: of the planes and of what is made of them. Data of a row lies from PAYLOAD_OFFSET on, its scales, in the same
           order, from SCALE_PAYLOAD_OFFSET on.

    Pages without HEADS stay as they are. Reads pages * planes * heads * shape.rows.head_bytes bytes and writes what the
    codec makes of them; equal, bit for bit, to kvpool.core.codecs.
    """
    cut = group_tiling(shape)
    return Launch(quantize_kernel, cut.constants(shape), cut.warps, cut.items(shape))
