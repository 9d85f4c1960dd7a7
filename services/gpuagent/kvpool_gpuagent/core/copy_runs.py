"""Contiguous runs of page copies, for a copy engine that needs no kernel.

What is contiguous on both sides is the same for every block of a chunk, so it is found once for each shard; the runs of
pages follow from their block ids. A page of an 8B model has 16 runs in a block-major cache, and takes the link 80 us.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.core.errors import InvalidRequest, NotServed
from kvpool.core.plane_table import (
    ADDRESS,
    BLOCK_STRIDE,
    HEAD_STRIDE,
    PAYLOAD_OFFSET,
    PAYLOAD_UNIT_STRIDE,
    TOKEN_STRIDE,
    Int64s,
    PlaneTable,
    ShardPlanes,
)

Shards = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Contiguous byte ranges, each field [R] int64.

    addresses: in the engine. payload_offsets: in the page's payload. pages: which of the pages asked for, ascending.
    """

    addresses: Int64s
    payload_offsets: Int64s
    sizes_bytes: Int64s
    pages: Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Template:
    """The runs of each block of a shard's page, or of its tokens from some one on.

    addresses, block_strides: [R] of block 0, and from a block of the engine to the next.
    payload_offsets:          [J, R], by the block's place in the chunk. sizes_bytes: [R].
    """

    addresses: Int64s
    block_strides: Int64s
    payload_offsets: Int64s
    sizes_bytes: Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stack:
    """Templates of all shards that have as many runs a block, so that one step finds the runs of pages of any of them.

    rows: by shard number, which of the K templates is its; other shards have any. The rest as in _Template, [K, ...].
    """

    rows: Int64s
    addresses: Int64s
    block_strides: Int64s
    payload_offsets: Int64s
    sizes_bytes: Int64s

    @classmethod
    def of(cls, templates: Mapping[int, _Template]) -> _Stack:
        rows = np.zeros(max(templates) + 1, dtype=np.int64)
        rows[list(templates)] = np.arange(len(templates))
        chosen = list(templates.values())
        return cls(
            rows=rows,
            addresses=np.stack([one.addresses for one in chosen])[:, np.newaxis],
            block_strides=np.stack([one.block_strides for one in chosen])[:, np.newaxis],
            payload_offsets=np.stack([one.payload_offsets for one in chosen]),
            sizes_bytes=np.stack([np.broadcast_to(one.sizes_bytes, one.payload_offsets.shape) for one in chosen]),
        )

    def runs(self, shards: Shards, block_ids: Int64s) -> Runs:
        """Of whole pages."""
        rows = self.rows[shards]
        addresses = block_ids[..., np.newaxis] * self.block_strides[rows]
        addresses += self.addresses[rows]
        return Runs(
            addresses=addresses.reshape(-1),
            payload_offsets=self.payload_offsets[rows].reshape(-1),
            sizes_bytes=self.sizes_bytes[rows].reshape(-1),
            pages=np.repeat(np.arange(len(rows)), addresses.shape[1] * addresses.shape[2]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class RunTable:
    """The runs of any pages of a rank. Thread-safe. _templates: by shard; none if a codec leaves no runs. _run_counts:
    [highest shard + 1], runs a block; 0 for shards of which the rank has nothing. _stacks: by such a count."""

    _table: PlaneTable
    _templates: Mapping[int, _Template]
    _run_counts: Int64s
    _stacks: Mapping[int, _Stack]

    @classmethod
    def of(cls, table: PlaneTable) -> RunTable:
        """Finds the runs of all shards, which takes milliseconds; later calls only use them."""
        if not table.layout.holds_codec_rows(table.spec):
            return cls(table, {}, _NONE, {})
        templates = {shard: _template(table, planes, 0) for shard, planes in table.shards.items()}
        run_counts = np.zeros(max(templates) + 1, dtype=np.int64)
        for shard, template in templates.items():
            run_counts[shard] = template.sizes_bytes.size
        stacks = {
            count: _Stack.of({shard: one for shard, one in templates.items() if run_counts[shard] == count})
            for count in set(run_counts[list(templates)].tolist())
        }
        return cls(table, templates, run_counts, stacks)

    def run_bytes(self, shard: int) -> int:
        """Bytes that every run of a whole page has at least, whatever the blocks: what decides how to move it.

        Only a copy with skip_tokens may have a shorter one. 0 if a codec turns cache rows into other bytes, so that
        there are no runs. raises: InvalidRequest for a shard of which the rank has nothing.
        """
        self._table.of_shard(shard)
        return int(self._templates[shard].sizes_bytes.min()) if self._templates else 0

    def runs(self, shards: Shards, block_ids: Int64s, skip_tokens: Shards) -> Runs:
        """The longest runs within blocks that make up the copies of N pages, page by page and block by block.

        shards:      [N]: of each page.
        block_ids:   [N, chunk_tokens / block_tokens] int64: where each page's chunk lies.
        skip_tokens: [N]: leading tokens of the chunk that are left out; opaque: a multiple of the block.
        raises: InvalidRequest naming the argument; NotServed if a codec turns cache rows into other bytes.
        """
        self._check(shards, block_ids, skip_tokens)
        if len(shards) and not np.any(skip_tokens):
            counts = self._run_counts[shards]
            if (counts == counts[0]).all():  # nearly always: all pages of a rank are alike
                return self._stacks[int(counts[0])].runs(shards, block_ids)
        parts = list(self._parts(shards, block_ids, skip_tokens))
        if len(parts) == 1:
            return parts[0]
        pages = np.concatenate([_NONE, *(part.pages for part in parts)])
        order = np.argsort(pages, kind="stable")  # parts are sorted: little more than a merge
        return Runs(
            addresses=np.concatenate([_NONE, *(part.addresses for part in parts)])[order],
            payload_offsets=np.concatenate([_NONE, *(part.payload_offsets for part in parts)])[order],
            sizes_bytes=np.concatenate([_NONE, *(part.sizes_bytes for part in parts)])[order],
            pages=pages[order],
        )

    def _parts(self, shards: Shards, block_ids: Int64s, skip_tokens: Shards) -> Iterator[Runs]:
        """Runs of pages that are alike; of a page in block order."""
        spec, block_rows = self._table.spec, self._table.block_rows
        skips = np.asarray(skip_tokens, dtype=np.int64) * spec.positions // spec.chunk_tokens
        kinds = np.asarray(shards, dtype=np.int64) * (spec.positions + 1) + skips
        for kind in np.unique(kinds).tolist():
            shard, skip = divmod(kind, spec.positions + 1)
            pages = np.flatnonzero(kinds == kind)
            first, rest = divmod(skip, block_rows)
            if rest:
                cut = _template(self._table, self._table.shards[shard], rest)
                yield _runs_of(cut, pages, block_ids, slice(first, first + 1))
                first += 1
            if first < block_ids.shape[1]:
                yield _runs_of(self._templates[shard], pages, block_ids, slice(first, None))

    def _check(self, shards: Shards, block_ids: Int64s, skip_tokens: Shards) -> None:
        spec, layout = self._table.spec, self._table.layout
        if not layout.holds_codec_rows(spec):
            raise NotServed(f"codec {spec.codec.name} makes other bytes of a {spec.dtype.name} cache: no runs to copy")
        shape = len(shards), spec.chunk_tokens // layout.block_tokens
        if block_ids.shape != shape or block_ids.dtype != np.int64:
            raise InvalidRequest(f"block_ids must be {shape} int64, got {block_ids.shape} {block_ids.dtype}")
        if block_ids.size and (int(block_ids.min()) < 0 or int(block_ids.max()) >= layout.block_count):
            raise InvalidRequest(f"block_ids must lie in [0, {layout.block_count})")
        if len(skip_tokens) != len(shards):
            raise InvalidRequest(f"skip_tokens must be {len(shards)}, one for each of shards, got {len(skip_tokens)}")
        if len(shards) and (int(np.max(shards)) >= self._run_counts.size or not self._run_counts[shards].all()):
            for shard in np.unique(shards).tolist():
                self._table.of_shard(shard)
        for skip in np.unique(skip_tokens).tolist() if np.any(skip_tokens) else ():
            if not 0 <= skip <= spec.chunk_tokens or (spec.opaque and skip % spec.opaque.block_tokens):
                raise InvalidRequest(f"skip_tokens {skip} does not fit chunks of {spec.chunk_tokens} tokens")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Rows of block 0 in payload order, each [R], and what later blocks of a chunk lie further on in the payload."""

    addresses: Int64s
    block_strides: Int64s
    handles: Int64s
    payload_offsets: Int64s
    sizes_bytes: Int64s
    unit_stride: int
    position_stride: int


_NONE = np.zeros(0, dtype=np.int64)


def _template(table: PlaneTable, planes: ShardPlanes, first_token: int) -> _Template:
    """first_token: of the block; those before are left out."""
    kinds = [_rows(table, planes.data_rows, len(planes.heads), table.row_bytes, first_token)]
    if planes.scale_plane_count:
        kinds.append(_rows(table, planes.scale_rows, len(planes.heads), table.scale_row_bytes, first_token))
    places = np.arange(table.spec.positions // table.block_rows, dtype=np.int64) * table.block_rows
    units, positions = np.divmod(places, table.unit_rows)
    joined = [_joined(rows) for rows in kinds]
    offsets = [
        rows.payload_offsets + (units * rows.unit_stride + positions * rows.position_stride)[:, np.newaxis]
        for rows in joined
    ]
    return _Template(
        addresses=np.concatenate([rows.addresses for rows in joined]),
        block_strides=np.concatenate([rows.block_strides for rows in joined]),
        payload_offsets=np.concatenate(offsets, axis=1),
        sizes_bytes=np.concatenate([rows.sizes_bytes for rows in joined]),
    )


def _rows(table: PlaneTable, chosen: slice, heads: int, row_bytes: int, first_token: int) -> _Rows:
    """Every row of block 0 of some planes, in payload order."""
    planes = table.planes[chosen].reshape(-1, table.spec.planes, 1, table.planes.shape[1])  # by layer
    tokens = np.arange(first_token, table.block_rows, dtype=np.int64)
    units, positions = np.divmod(tokens, table.unit_rows)
    position_stride = table.spec.planes * row_bytes
    nth_head = np.arange(heads, dtype=np.int64)
    of_heads = planes[..., HEAD_STRIDE] * nth_head  # [layer, plane, head]
    addresses = (planes[..., ADDRESS] + of_heads)[..., np.newaxis] + planes[..., TOKEN_STRIDE, np.newaxis] * tokens
    offsets = (planes[..., PAYLOAD_OFFSET] + nth_head * (table.unit_rows * position_stride))[..., np.newaxis]
    offsets = offsets + planes[..., PAYLOAD_UNIT_STRIDE, np.newaxis] * units + positions * position_stride
    shape = addresses.shape  # [layer, plane, head, token]
    order = np.argsort(offsets, axis=None, kind="stable")
    strides = np.broadcast_to(planes[..., BLOCK_STRIDE, np.newaxis], shape)
    handles = np.broadcast_to(table.handles[chosen].reshape(-1, table.spec.planes, 1, 1), shape)
    return _Rows(
        addresses=addresses.reshape(-1)[order],
        block_strides=strides.reshape(-1)[order],
        handles=handles.reshape(-1)[order],
        payload_offsets=offsets.reshape(-1)[order],
        sizes_bytes=np.full(order.size, row_bytes, dtype=np.int64),
        unit_stride=int(planes[0, 0, 0, PAYLOAD_UNIT_STRIDE]),
        position_stride=position_stride,
    )


def _joined(rows: _Rows) -> _Rows:
    """Neighbours that follow each other on both sides, in one handle and in every block, become one."""
    breaks = np.ones(rows.sizes_bytes.size, dtype=np.bool_)
    breaks[1:] = np.diff(rows.addresses) != rows.sizes_bytes[:-1]
    breaks[1:] |= np.diff(rows.payload_offsets) != rows.sizes_bytes[:-1]
    breaks[1:] |= np.diff(rows.handles) != 0
    breaks[1:] |= np.diff(rows.block_strides) != 0
    first = np.flatnonzero(breaks)
    return _Rows(
        addresses=rows.addresses[first],
        block_strides=rows.block_strides[first],
        handles=rows.handles[first],
        payload_offsets=rows.payload_offsets[first],
        sizes_bytes=np.add.reduceat(rows.sizes_bytes, first),
        unit_stride=rows.unit_stride,
        position_stride=rows.position_stride,
    )


def _runs_of(template: _Template, pages: Int64s, block_ids: Int64s, blocks: slice) -> Runs:
    """Runs of some blocks of pages of one shard."""
    ids = block_ids[pages, blocks] if len(pages) < len(block_ids) else block_ids[:, blocks]
    addresses = ids[..., np.newaxis] * template.block_strides
    addresses += template.addresses
    shape = addresses.shape  # [pages, blocks, runs]
    return Runs(
        addresses=addresses.reshape(-1),
        payload_offsets=np.broadcast_to(template.payload_offsets[blocks], shape).reshape(-1),
        sizes_bytes=np.broadcast_to(template.sizes_bytes, shape).reshape(-1),
        pages=np.repeat(pages, shape[1] * shape[2]),
    )
