"""Contiguous runs of page copies, for a copy engine that needs no kernel.

A payload has its rows without gaps, [position][head] of each plane; how long a run is depends on how the engine has
them. Everything is numpy over many pages at once: a page has thousands of rows, and takes the link some 20 us.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.core.errors import InvalidRequest, NotServed
from kvpool.core.plane_table import (
    ADDRESS,
    BLOCK_STRIDE,
    HEAD_STRIDE,
    PAYLOAD_OFFSET,
    TOKEN_STRIDE,
    Int64s,
    PlaneTable,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Contiguous byte ranges, each field [R] int64.

    addresses: in the engine. payload_offsets: in the page's payload. pages: which of the pages asked for, ascending.
    """

    addresses: Int64s
    payload_offsets: Int64s
    sizes_bytes: Int64s
    pages: Int64s


def runs_of(
    table: PlaneTable, shard: int, block_ids: Int64s, skip_tokens: int = 0, layers: range | None = None
) -> Runs:
    """The runs of one page; see `runs_of_pages`. block_ids: [chunk_tokens / block_tokens] int64."""
    return runs_of_pages(table, [shard], block_ids[np.newaxis], [skip_tokens], layers)


def runs_of_pages(
    table: PlaneTable,
    shards: Sequence[int],
    block_ids: Int64s,
    skip_tokens: Sequence[int],
    layers: range | None = None,
) -> Runs:
    """The longest runs that make up the copies of N pages, page by page in payload order.

    shards:      [N]: of each page.
    block_ids:   [N, chunk_tokens / block_tokens] int64: where each page's chunk lies.
    skip_tokens: [N]: leading tokens of the chunk that are left out; opaque: a multiple of the block.
    layers:      consecutive model layers, of which each page has those of its shard; None = all.
    raises: InvalidRequest naming the argument; NotServed if a codec turns cache rows into other bytes.
    """
    _check_copies(table, shards, block_ids, skip_tokens)
    items = [np.zeros((5, 0), dtype=np.int64)]
    items += [_items(table, batch, block_ids) for batch in _batches(table, shards, skip_tokens, layers)]
    whole = np.concatenate(items, axis=1)
    if len(items) > 2:  # batches mix pages; a page's data came before its scales
        whole = whole[:, np.argsort(whole[0], kind="stable")]
    return _joined(whole)


def run_bytes_of(table: PlaneTable, shard: int) -> int:
    """Bytes that every run of a whole page has at least, whatever the blocks: what decides how to move it.

    Runs may be longer, where blocks follow each other; only a copy with skip_tokens may have a shorter one. 0 if a
    codec turns cache rows into other bytes, so that there are no runs.
    """
    if not table.layout.holds_codec_rows(table.spec):
        return 0
    planes = table.of_shard(shard)
    heads, sizes = len(planes.heads), list[int]()
    row_sizes = (table.row_bytes, table.scale_row_bytes)
    for rows, row_bytes in zip(planes.of_layers(planes.layers), row_sizes, strict=True):
        by_head, by_token = _joins(table.planes[rows.start : rows.stop], row_bytes, heads, table.block_rows)
        if len(rows):
            sizes.append(row_bytes * (heads if by_head else 1) * (table.block_rows if by_token else 1))
    return min(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Pages of equal shape: planes of one kind. first_planes: table row of each page's first one."""

    pages: list[int]
    first_planes: list[int]
    plane_count: int
    row_bytes: int
    heads: int
    skip_positions: int


def _batches(
    table: PlaneTable, shards: Sequence[int], skip_tokens: Sequence[int], layers: range | None
) -> Iterator[_Batch]:
    for kind, row_bytes in enumerate((table.row_bytes, table.scale_row_bytes)):
        alike: dict[tuple[int, int], _Batch] = {}
        for page, (shard, skip) in enumerate(zip(shards, skip_tokens, strict=True)):
            planes = table.of_shard(shard)
            wanted = planes.layers if layers is None else _common(planes.layers, layers)
            rows = planes.of_layers(wanted)[kind]
            if len(rows):
                new = _Batch(
                    pages=[],
                    first_planes=[],
                    plane_count=len(rows),
                    row_bytes=row_bytes,
                    heads=len(planes.heads),
                    skip_positions=skip * table.spec.positions // table.spec.chunk_tokens,
                )
                batch = alike.setdefault((len(rows), skip), new)
                batch.pages.append(page)
                batch.first_planes.append(rows.start)
        yield from alike.values()


def _common(left: range, right: range) -> range:
    start = max(left.start, right.start)
    return range(start, max(start, min(left.stop, right.stop)))


def _joins(planes: Int64s, row_bytes: int, heads: int, block_rows: int) -> tuple[bool, bool]:
    """Whether in all planes [..., 8] a token's heads follow each other without a gap, and so a block's tokens too."""
    by_head = heads == 1 or bool((planes[..., HEAD_STRIDE] == row_bytes).all())
    return by_head, by_head and (block_rows == 1 or bool((planes[..., TOKEN_STRIDE] == row_bytes * heads).all()))


def _items(table: PlaneTable, batch: _Batch, block_ids: Int64s) -> Int64s:
    """[5, items]: page, handle, address, payload offset and size of what is contiguous in any case."""
    block_rows, row_bytes, heads = table.block_rows, batch.row_bytes, batch.heads
    numbers = np.array(batch.first_planes)[:, np.newaxis] + np.arange(batch.plane_count)
    planes = table.planes[numbers]
    by_head, by_token = _joins(planes, row_bytes, heads, block_rows)
    positions, skip = table.spec.positions, batch.skip_positions
    if by_token:
        starts = np.arange(skip // block_rows * block_rows, positions, block_rows)
        starts[:1] = skip  # the first block may be cut
    else:
        starts = np.arange(skip, positions)
    steps = np.arange(1 if by_head else heads)
    blocks, tokens = np.divmod(starts, block_rows)
    columns = planes[..., np.newaxis, :]  # [pages, planes, 1, 8]
    places = block_ids[batch.pages][:, np.newaxis, blocks] * columns[..., BLOCK_STRIDE]
    places += columns[..., ADDRESS]
    places += columns[..., TOKEN_STRIDE] * tokens
    offsets = columns[..., PAYLOAD_OFFSET] + starts * (heads * row_bytes)
    items = np.empty((5, *places.shape, steps.size), dtype=np.int64)
    items[0] = np.array(batch.pages)[:, np.newaxis, np.newaxis, np.newaxis]
    items[1] = table.handles[numbers][..., np.newaxis, np.newaxis]
    items[2] = places[..., np.newaxis] + columns[..., HEAD_STRIDE, np.newaxis] * steps
    items[3] = offsets[..., np.newaxis] + steps * row_bytes
    items[4] = np.diff(starts, append=positions)[:, np.newaxis] * (row_bytes * (heads if by_head else 1))
    return items.reshape(5, -1)


def _joined(items: Int64s) -> Runs:
    """Neighbours that follow each other on both sides, in one page and one handle, become one."""
    pages, handles, addresses, offsets, sizes = items
    if not sizes.size:
        return Runs(addresses=addresses, payload_offsets=offsets, sizes_bytes=sizes, pages=pages)
    breaks = addresses[1:] != addresses[:-1] + sizes[:-1]
    breaks |= offsets[1:] != offsets[:-1] + sizes[:-1]
    breaks |= handles[1:] != handles[:-1]
    breaks |= pages[1:] != pages[:-1]
    first = np.flatnonzero(np.concatenate(([True], breaks)))
    return Runs(
        addresses=addresses[first],
        payload_offsets=offsets[first],
        sizes_bytes=np.add.reduceat(sizes, first),
        pages=pages[first],
    )


def _check_copies(table: PlaneTable, shards: Sequence[int], block_ids: Int64s, skip_tokens: Sequence[int]) -> None:
    spec, layout = table.spec, table.layout
    if not layout.holds_codec_rows(spec):
        raise NotServed(f"codec {spec.codec.name} makes other bytes of a {spec.dtype.name} cache: no runs to copy")
    shape = len(shards), spec.chunk_tokens // layout.block_tokens
    if block_ids.shape != shape or block_ids.dtype != np.int64:
        raise InvalidRequest(f"block_ids must be {shape} int64, got {block_ids.shape} {block_ids.dtype}")
    if block_ids.size and (int(block_ids.min()) < 0 or int(block_ids.max()) >= layout.block_count):
        raise InvalidRequest(f"block_ids must lie in [0, {layout.block_count})")
    if len(skip_tokens) != len(shards):
        raise InvalidRequest(f"skip_tokens must be {len(shards)}, one for each of shards, got {len(skip_tokens)}")
    for skip in set(skip_tokens):
        if not 0 <= skip <= spec.chunk_tokens or (spec.opaque and skip % spec.opaque.block_tokens):
            raise InvalidRequest(f"skip_tokens {skip} does not fit chunks of {spec.chunk_tokens} tokens")
