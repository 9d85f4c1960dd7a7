"""What an engine asks of its agent, and what it is told at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvpool.core.chunks import GROUP_CHUNKS
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.page import PageKey, page_bytes
from kvpool.core.payload import payload_bytes
from kvpool.core.retention import NO_RETENTION, RetentionRange, retention_of_tokens
from kvpool.core.retention import Retention as Retention
from kvpool_gpuagent.core.bandwidth import LoadSource

BlockIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBlocks:
    """One chunk and where its tokens lie in the engine's cache.

    block_ids: [chunk_tokens / block_tokens] int64.
    skip_tokens: loads only: the first this many tokens are the engine's own and stay untouched.
    """

    chunk_hash: bytes
    block_ids: BlockIds
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpan:
    """Consecutive chunks of one chain.

    group_heads: heads of the 16-chunk groups that the chunks fall into, in order.
    parent_hash: of the chunk before the first.
    chain_head:  hash of chunk 0; may be empty for a load.
    retention:   of chunks that none of retention_ranges, which count the prompt's tokens, touches.
    prompt_tokens: of the whole prompt; 0 if unknown.
    """

    chunks: tuple[ChunkBlocks, ...]
    first_index: int
    parent_hash: bytes
    group_heads: tuple[bytes, ...]
    chain_head: bytes = b""
    retention: Retention = NO_RETENTION
    retention_ranges: tuple[RetentionRange, ...] = ()
    prompt_tokens: int = 0

    def group_head(self, position: int) -> bytes:
        """Head of the group that the chunk at `position` (in the request) falls into."""
        return self.group_heads[(self.first_index + position) // GROUP_CHUNKS - self.first_index // GROUP_CHUNKS]

    def metadata(self, position: int, chunk_tokens: int) -> PageMetadata:
        """What is kept beside the pages of the chunk at `position`."""
        first_token = (self.first_index + position) * chunk_tokens
        kept = retention_of_tokens(first_token, chunk_tokens, self.retention_ranges, self.retention)
        return PageMetadata(
            parent_hash=self.chunks[position - 1].chunk_hash if position else self.parent_hash,
            chunk_index=self.first_index + position,
            group_head_hash=self.group_head(position),
            ttl_ms=kept.ttl_ms,
            priority=kept.priority,
            pinned_until_us=kept.pinned_until_us,
            prompt_tokens=self.prompt_tokens,
        )

    @property
    def hashes(self) -> list[bytes]:
        """Chunk hashes, in order."""
        return [chunk.chunk_hash for chunk in self.chunks]


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
        """Shards of this rank, ascending."""
        return list(shards_in(self.shards))

    def page_bytes(self, shard: int) -> int:
        """Header, payload and sum table of one page."""
        return page_bytes(payload_bytes(self.spec, self.grid, shard))

    def key(self, span: ChunkSpan, position: int, shard: int) -> PageKey:
        """Of one page of the chunk at `position`."""
        return PageKey(self.keyspace, span.chunks[position].chunk_hash, shard)


@dataclass(slots=True, kw_only=True)
class StoreOutcome:
    """End of a store; `failed` maps positions in the request to why."""

    stored_chunks: int = 0
    deduplicated_chunks: int = 0
    failed: dict[int, KvPoolError] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LoadOutcome:
    """End of a load: leading chunks that are in; everything after them is failed, `error` says why the first one is.

    tokens: of loaded chunks, by the slowest source that a chunk needed.
    """

    chunk_count: int
    loaded_chunks: int = 0
    error: KvPoolError | None = None
    tokens: dict[LoadSource, int] = field(default_factory=lambda: dict.fromkeys(LoadSource, 0))

    @property
    def failed_chunks(self) -> range:
        """Positions in the request that are not usable."""
        return range(self.loaded_chunks, self.chunk_count)


def window_of(rank: Rank, window_pages: int, window_bytes: int) -> int:
    """Pages to ask for at once: about window_bytes of this rank's, and never more than half of window_pages, so that
    one window can be on its way while another is copied."""
    largest_bytes = max(rank.page_bytes(shard) for shard in rank.shard_list)
    return max(1, min(window_pages // 2, window_bytes // largest_bytes))


def windows(page_counts: Sequence[int], window_pages: int) -> list[range]:
    """Cut items (of page_counts pages each) into consecutive runs of at most window_pages pages (but one item)."""
    cuts: list[range] = []
    start, pages = 0, 0
    for position, count in enumerate(page_counts):
        if pages and pages + count > window_pages:
            cuts.append(range(start, position))
            start, pages = position, 0
        pages += count
    if start < len(page_counts):
        cuts.append(range(start, len(page_counts)))
    return cuts
