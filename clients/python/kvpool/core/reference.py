"""Slow, obvious gather and scatter between an engine's cache and a page's payload: what every device must equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, RowPlane
from kvpool.core.payload import ShardPayload
from kvpool.core.payload_codec import decode_payload, encode_payload, engine_rows_bytes

Bytes = npt.NDArray[np.uint8]
BlockIds = npt.NDArray[np.int64]


def gather_payload_reference(
    spec: KeyspaceSpec,
    grid: ShardGrid,
    shard: int,
    layout: EngineLayout,
    handles: Sequence[Bytes],
    block_ids: BlockIds,
) -> Bytes:
    """The payload of one chunk's page for a shard.

    handles:   [handle_sizes[i]] uint8 each: the memory that the layout describes.
    block_ids: [chunk_tokens / block_tokens] int64: where the chunk lies.
    returns:   [payload_bytes] uint8, a new array.
    """
    shape = ShardPayload.of(spec, grid, shard)
    copied = np.empty(_copied_bytes(spec, shape, layout), dtype=np.uint8)
    for row in _rows(spec, grid, shard, layout, block_ids):
        if row.head not in layout.head_range:
            raise PartitionRefused(f"a page needs head {row.head}, which the rank does not have; {grid.describe()}")
        copied[row.begin : row.begin + row.size_bytes] = handles[row.handle][row.at : row.at + row.size_bytes]
    if layout.holds_codec_rows(spec):
        return copied
    payload = np.empty(shape.payload_bytes, dtype=np.uint8)
    encode_payload(spec, shape, copied, payload)
    return payload


def scatter_payload_reference(
    spec: KeyspaceSpec,
    grid: ShardGrid,
    shard: int,
    layout: EngineLayout,
    handles: Sequence[Bytes],
    block_ids: BlockIds,
    payload: Bytes,
    skip_tokens: int = 0,
) -> None:
    """Write what the rank has of one chunk's page for a shard into the cache: all of its layers, and its heads as far
    as they are the rank's.

    skip_tokens: leading tokens of the chunk that stay untouched; opaque: a multiple of the block.
    The rest is as for the gather.
    """
    if not 0 <= skip_tokens <= spec.chunk_tokens or (spec.opaque and skip_tokens % spec.opaque.block_tokens):
        raise InvalidRequest(f"skip_tokens {skip_tokens} does not fit chunks of {spec.chunk_tokens} tokens")
    skip_positions = skip_tokens * spec.positions // spec.chunk_tokens
    if not layout.holds_codec_rows(spec):
        payload = decode_payload(spec, ShardPayload.of(spec, grid, shard), payload)
    for row in _rows(spec, grid, shard, layout, block_ids):
        if row.position >= skip_positions and row.head in layout.head_range:
            handles[row.handle][row.at : row.at + row.size_bytes] = payload[row.begin : row.begin + row.size_bytes]


class _Row(NamedTuple):
    """at: offset in the handle, meaningless for a head that is not the rank's. begin: offset in what is copied."""

    handle: int
    at: int
    begin: int
    size_bytes: int
    position: int
    head: int


def _rows(spec: KeyspaceSpec, grid: ShardGrid, shard: int, layout: EngineLayout, block_ids: BlockIds) -> Iterator[_Row]:
    """Every row of the page, in payload order."""
    shape = ShardPayload.of(spec, grid, shard)
    _check(spec, shape, layout, block_ids, grid)
    begin = 0
    for part in ("planes", "scales"):
        for unit in range(0, shape.positions, shape.unit_positions):
            for layer in shape.layers:
                planes = getattr(layout.layers[layer - layout.first_layer], part)
                for head in shape.heads:
                    for position in range(unit, unit + shape.unit_positions):
                        for plane in planes:
                            at = _row_offset(spec, layout, plane, block_ids, position, head)
                            yield _Row(plane.handle, at, begin, plane.row_bytes, position, head)
                            begin += plane.row_bytes
    if begin != _copied_bytes(spec, shape, layout):
        raise AssertionError(f"{begin} bytes of rows for a payload of {shape.payload_bytes}")


def _copied_bytes(spec: KeyspaceSpec, shape: ShardPayload, layout: EngineLayout) -> int:
    """Bytes that are copied as they are: the payload, or what a codec makes the payload of."""
    return shape.payload_bytes if layout.holds_codec_rows(spec) else engine_rows_bytes(spec, shape)


def _row_offset(
    spec: KeyspaceSpec, layout: EngineLayout, plane: RowPlane, block_ids: BlockIds, position: int, head: int
) -> int:
    block, token = divmod(position, layout.rows_of_block(spec))
    return (
        plane.offset_bytes
        + int(block_ids[block]) * plane.block_stride_bytes
        + token * plane.token_stride_bytes
        + (head - layout.first_head) * plane.head_stride_bytes
    )


def _check(spec: KeyspaceSpec, shape: ShardPayload, layout: EngineLayout, block_ids: BlockIds, grid: ShardGrid) -> None:
    layers, heads = layout.layer_range, layout.head_range
    if shape.layers.start < layers.start or shape.layers.stop > layers.stop:
        raise PartitionRefused(f"the shard's layers {shape.layers} are not in the rank's {layers}; {grid.describe()}")
    if shape.heads.start >= heads.stop or shape.heads.stop <= heads.start:
        raise PartitionRefused(f"the shard's heads {shape.heads} are not of the rank's {heads}; {grid.describe()}")
    if block_ids.shape != (spec.chunk_tokens // layout.block_tokens,):
        raise InvalidRequest(
            f"block_ids must name {spec.chunk_tokens // layout.block_tokens} blocks, got {block_ids.shape}"
        )
    if block_ids.size and (int(block_ids.min()) < 0 or int(block_ids.max()) >= layout.block_count):
        raise InvalidRequest(f"block_ids must lie in [0, {layout.block_count})")
