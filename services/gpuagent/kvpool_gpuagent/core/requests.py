"""What an engine asks of its agent, and what it is told at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.core.chunks import GROUP_CHUNKS, HASH_BYTES
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import KvPoolError
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.page import page_bytes
from kvpool.core.payload import payload_bytes
from kvpool.core.retention import NO_RETENTION
from kvpool.core.spans import Bytes, ChunkRange, Int32s, PageSpan
from kvpool_gpuagent.core.bandwidth import LoadSource

BlockIds = npt.NDArray[np.int64]
ValueT = TypeVar("ValueT")
ChunkSource = tuple[tuple[RemoteSource, ...], int]
"""Where else than on this host the pages of a chunk may be, best first, and the bitmap of its shards to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The part of the keyspace that one engine rank owns."""

    spec: KeyspaceSpec
    grid: ShardGrid
    layout: EngineLayout
    shards: int  # bitmap
    load_only: bool = False
    keyspace: bytes = b""  # 16-byte id; empty until the index has opened it

    @classmethod
    def of(cls, spec: KeyspaceSpec, layout: EngineLayout, *, load_only: bool = False) -> Rank:
        """Raises InvalidRequest naming the argument; PartitionRefused naming the grid when the rank's layers and heads
        are no union of shards."""
        grid = ShardGrid.of(spec)
        layout.validate(spec)
        shards = grid.bitmap_for(layout.layer_range, layout.head_range)
        return cls(spec=spec, grid=grid, layout=layout, shards=shards, load_only=load_only)

    def opened(self, keyspace: bytes) -> Rank:
        """The same rank once the index has named its keyspace."""
        return replace(self, keyspace=keyspace)

    @property
    def blocks_per_chunk(self) -> int:
        """Block ids that name one chunk."""
        return self.spec.chunk_tokens // self.layout.block_tokens

    @property
    def shard_list(self) -> list[int]:
        """Shards that this rank writes, ascending."""
        return list(_shards_in(self.shards))

    @property
    def page_sizes(self) -> npt.NDArray[np.int64]:
        """[shard_count]: bytes of header, payload and sum table of a page of each shard."""
        return _page_sizes(self.spec, self.grid)


@lru_cache(maxsize=1024)
def _shards_in(bitmap: int) -> tuple[int, ...]:
    return tuple(shards_in(bitmap))


@lru_cache(maxsize=64)
def _page_sizes(spec: KeyspaceSpec, grid: ShardGrid) -> npt.NDArray[np.int64]:
    sizes = [page_bytes(payload_bytes(spec, grid, shard)) for shard in range(grid.shard_count)]
    return np.array(sizes, dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class StoreOutcome:
    """End of a store; `failed` maps positions in the request to why."""

    stored_chunks: int = 0
    deduplicated_chunks: int = 0
    failed: dict[int, KvPoolError] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LoadOutcome:
    """End of a load: leading chunks that are in; everything after them is failed, `error` says why the first one is.

    tokens: of loaded chunks, by the slowest source that a chunk needed. copying_s: what copying
    it takes alone: of the time from the first copy's begin to the last one's end, the share of its bytes.
    """

    chunk_count: int
    loaded_chunks: int = 0
    error: KvPoolError | None = None
    copying_s: float = 0.0
    tokens: dict[LoadSource, int] = field(default_factory=lambda: dict.fromkeys(LoadSource, 0))

    @property
    def failed_chunks(self) -> range:
        """Positions in the request that are not usable."""
        return range(self.loaded_chunks, self.chunk_count)


def page_span(
    rank: Rank,
    span: ChunkRange,
    chunks: range,
    positions: Int32s,
    shards: Bytes,
    sources: Sequence[tuple[RemoteSource, ...]] = (),
) -> PageSpan:
    """Pages of the chunks at these positions of a request, as a pool is asked for them.

    positions: [N] int32, counted from chunks.start. shards: [N]. sources: of every chunk of the request; loads only.
    """
    first = span.first_chunk_index + chunks.start
    groups = range(first // GROUP_CHUNKS, (first + len(chunks) - 1) // GROUP_CHUNKS + 1)
    first_group = span.first_chunk_index // GROUP_CHUNKS
    elsewhere = sources[chunks.start : chunks.stop]
    return PageSpan(
        keyspace=rank.keyspace,
        chunk_hashes=span.chunk_hashes[chunks.start * HASH_BYTES : chunks.stop * HASH_BYTES],
        first_chunk_index=first,
        parent_hash=span.chunk_hash(chunks.start - 1) if chunks.start else span.parent_hash,
        group_heads=b"".join(span.group_head_hashes[group - first_group] for group in groups),
        positions=positions,
        shards=shards,
        retention=((len(chunks), span.retention),) if span.retention != NO_RETENTION else (),
        prompt_tokens=span.prompt_tokens,
        sources=_runs(elsewhere) if any(elsewhere) else (),
    )


def _runs(values: Sequence[ValueT]) -> tuple[tuple[int, ValueT], ...]:
    return tuple((len(list(same)), value) for value, same in groupby(values))


def window_of(rank: Rank, most_pages: int, window_bytes: int) -> int:
    """Pages of about window_bytes of this rank's, at least one and at most most_pages."""
    largest_bytes = int(rank.page_sizes[rank.shard_list].max())
    return max(1, min(most_pages, window_bytes // largest_bytes))
