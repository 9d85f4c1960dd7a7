"""Pages of one chain as packed arrays: what pagestores are asked for and grant."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvpool.core.chunks import GROUP_CHUNKS, HASH_BYTES, Int64s
from kvpool.core.cluster import PageMetadata, RemoteSource
from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.page import PageKey
from kvpool.core.retention import NO_RETENTION, Retention

Int32s = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class PageSpan:
    """Pages of consecutive chunks of one chain. Page i is shard `shards[i]` of chunk `positions[i]`.

    keyspace:          16-byte id.
    chunk_hashes:      [C * 16] bytes, in chain order.
    first_chunk_index: of the first of them in its chain.
    parent_hash:       16 bytes, of the chunk before the first; zeroes for chunk 0.
    group_heads:       [G * 16] bytes: heads of the 16-chunk groups that the chunks fall into, in order.
    positions:         [N] int32, each in [0, C): which chunk a page is of.
    shards:            [N] uint8: which shard of it.
    retention:         (chunk count, retention) runs that cover the C chunks; empty: none is retained. Stores only.
    prompt_tokens:     of the whole prompt; 0 if unknown.
    sources:           (chunk count, where else the pages may be, best first) runs that cover the C chunks; empty: only
                       this node is asked. Loads only.
    """

    keyspace: bytes
    chunk_hashes: bytes
    first_chunk_index: int
    parent_hash: bytes
    group_heads: bytes
    positions: Int32s
    shards: Bytes
    retention: tuple[tuple[int, Retention], ...] = ()
    prompt_tokens: int = 0
    sources: tuple[tuple[int, tuple[RemoteSource, ...]], ...] = ()

    def __post_init__(self) -> None:
        """raises: InvalidRequest naming the field."""
        count, rest = divmod(len(self.chunk_hashes), HASH_BYTES)
        if rest or not count:
            raise InvalidRequest(f"chunk_hashes must be a positive multiple of {HASH_BYTES} bytes")
        if len(self.keyspace) != HASH_BYTES or len(self.parent_hash) != HASH_BYTES:
            raise InvalidRequest(f"keyspace and parent_hash must have {HASH_BYTES} bytes")
        if self.first_chunk_index < 0:
            raise InvalidRequest(f"first_chunk_index must be >= 0, got {self.first_chunk_index}")
        groups = (self.first_chunk_index + count - 1) // GROUP_CHUNKS - self.first_chunk_index // GROUP_CHUNKS + 1
        if len(self.group_heads) != groups * HASH_BYTES:
            raise InvalidRequest(f"group_heads must name the {groups} groups of the chunks, 16 bytes each")
        if self.positions.shape != self.shards.shape or self.positions.ndim != 1:
            raise InvalidRequest("positions and shards must be one-dimensional and of one length")
        if self.positions.size and int(self.positions.view(np.uint32).max()) >= count:  # those < 0 are large ones
            raise InvalidRequest(f"positions must lie in [0, {count})")
        for name, runs in (("retention", self.retention), ("sources", self.sources)):
            if runs and (sum(run[0] for run in runs) != count or min(run[0] for run in runs) <= 0):
                raise InvalidRequest(f"the runs of {name} must cover {count} chunks")

    @property
    def chunk_count(self) -> int:
        return len(self.chunk_hashes) // HASH_BYTES

    @property
    def page_count(self) -> int:
        return int(self.positions.size)

    def chunk_hash(self, position: int) -> bytes:
        """16 bytes."""
        return self.chunk_hashes[position * HASH_BYTES : (position + 1) * HASH_BYTES]

    def page_key(self, page: int) -> PageKey:
        """Of page number `page`."""
        return PageKey(self.keyspace, self.chunk_hash(int(self.positions[page])), int(self.shards[page]))

    @cached_property
    def page_keys(self) -> list[PageKey]:
        """[N], in one pass."""
        chunks = map(self._hashes.__getitem__, self.positions.tolist())
        return list(map(PageKey._make, zip(repeat(self.keyspace), chunks, self.shards.tolist(), strict=False)))

    @cached_property
    def _hashes(self) -> list[bytes]:
        """Of the chunks. Shared by keys and metadata, which a pagestore keeps for each page in memory."""
        return [self.chunk_hashes[at : at + HASH_BYTES] for at in range(0, len(self.chunk_hashes), HASH_BYTES)]

    @cached_property
    def metadata(self) -> tuple[PageMetadata, ...]:
        """[C]: what is kept beside the pages of each chunk."""
        found: list[PageMetadata] = []
        retained = [one for count, one in self.retention for _ in range(count)]
        first_group, hashes = self.first_chunk_index // GROUP_CHUNKS, self._hashes
        heads = [self.group_heads[at : at + HASH_BYTES] for at in range(0, len(self.group_heads), HASH_BYTES)]
        for position in range(self.chunk_count):
            group = (self.first_chunk_index + position) // GROUP_CHUNKS - first_group
            kept = retained[position] if retained else NO_RETENTION
            found.append(
                PageMetadata(
                    parent_hash=hashes[position - 1] if position else self.parent_hash,
                    chunk_index=self.first_chunk_index + position,
                    group_head_hash=heads[group],
                    ttl_ms=kept.ttl_ms,
                    priority=kept.priority,
                    pinned_until_us=kept.pinned_until_us,
                    prompt_tokens=self.prompt_tokens,
                )
            )
        return tuple(found)

    @cached_property
    def chunk_sources(self) -> tuple[tuple[RemoteSource, ...], ...]:
        """[C]: where else the pages of each chunk may be; all empty without sources."""
        if not self.sources:
            return ((),) * self.chunk_count
        return tuple(one for count, one in self.sources for _ in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGrants:
    """Leases on arena slots for M pages of a span, all arrays [M].

    pages:       which page of the span, int32.
    lease_ids:   int64, > 0.
    segment_ids: int64. offsets: int64, bytes from the segment's start to the page's header.
    sources:     uint8, where the bytes of a page to be read were found: a kvpool.v1 Source number; 0 for writes.
    """

    pages: Int32s
    lease_ids: Int64s
    segment_ids: Int64s
    offsets: Int64s
    sources: Bytes

    @property
    def count(self) -> int:
        return int(self.pages.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanAnswer:
    """What became of pages of a span; each page is in exactly one part of one answer.

    granted: leases. exists, pending: reserves only, [.] int32 page numbers: there already, or being written by another.
    failed:  page number and why; None as the cause is a plain miss.
    """

    granted: PageGrants
    exists: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    pending: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    failed: tuple[tuple[int, KvPoolError | None], ...] = ()


NO_PAGES: Int32s = np.zeros(0, np.int32)
NO_GRANTS = PageGrants(
    pages=NO_PAGES,
    lease_ids=np.zeros(0, np.int64),
    segment_ids=np.zeros(0, np.int64),
    offsets=np.zeros(0, np.int64),
    sources=np.zeros(0, np.uint8),
)
