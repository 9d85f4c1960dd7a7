"""Where the chunks of chains were last seen: asked of the index, remembered for the load that follows."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Sequence

from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import GROUP_CHUNKS, ChunkRange
from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import KvPoolError
from kvpool_gpuagent.core.requests import ChunkSource, Rank
from kvpool_gpuagent.core.sources import SourceRun, source_runs
from kvpool_gpuagent.engine.waiting import until_cancelled
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import IndexPort, PagePool


class SeenChunks:
    """Sources of chunks that matches named, the latest ones. An engine's scheduler matches in one session and its
    worker loads in another: sessions of equal keyspace and shards share it."""

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._sources: OrderedDict[bytes, ChunkSource] = OrderedDict()

    def get(self, chunk_hash: bytes) -> ChunkSource | None:
        """None if no recent match named the chunk."""
        return self._sources.get(chunk_hash)

    def remember(self, chunk_hash: bytes, source: ChunkSource) -> None:
        """A match named the chunk."""
        self._sources[chunk_hash] = source
        self._sources.move_to_end(chunk_hash)
        if len(self._sources) > self._max_chunks:
            self._sources.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._sources.clear()


class ChainLocations:
    """Matches of one session."""

    def __init__(
        self, rank: Rank, index: IndexPort, pool: PagePool, metrics: AgentMetrics, seen: SeenChunks, *, host_id: str
    ) -> None:
        self._rank, self._index, self._pool, self._metrics = rank, index, pool, metrics
        self._seen, self._host_id = seen, host_id

    async def match(self, hashes: Sequence[bytes], held_chunks: int) -> list[SourceRun]:
        """Runs of the covered prefix of a chain (from chunk 0) after its first `held_chunks`. Raises as IndexPort."""
        group_head = hashes[held_chunks - held_chunks % GROUP_CHUNKS]
        return await self._lookup(hashes[held_chunks:], held_chunks, group_head)

    async def sources_of(self, span: ChunkRange, stop: CancelToken, ends_at_s: float) -> list[ChunkSource]:
        """Where each chunk was seen, and which of its shards to read; asks the index only for chunks that no recent
        match named. Never raises."""
        hashes = span.hashes
        seen = [self._seen.get(chunk_hash) for chunk_hash in hashes]
        if None in seen:
            remaining_s = max(0.0, ends_at_s - asyncio.get_running_loop().time())
            try:
                await until_cancelled(
                    self._lookup(hashes, span.first_chunk_index, span.group_head(0)), stop, remaining_s
                )
            except KvPoolError:
                # Without the index what this host holds can still be loaded.
                if not stop.cancelled:
                    self._metrics.index_failures.inc()
            seen = [self._seen.get(chunk_hash) for chunk_hash in hashes]
        unseen: ChunkSource = ((), self._rank.shards)
        return [source or unseen for source in seen]

    def forget(self, span: ChunkRange) -> None:
        """A remembered location misled the load of this span: the next one asks the index again."""
        self._seen.clear()
        self._index.forget(self._query(span.chunk_hashes, span.first_chunk_index, span.group_head(0)))

    def note_stored(self, span: ChunkRange) -> None:
        """Some of these chunks have just been stored from here."""
        self._index.note_stored(self._query(span.chunk_hashes, span.first_chunk_index, span.group_head(0)))

    def _query(self, chunk_hashes: bytes, first_chunk_index: int, group_head: bytes) -> ChainQuery:
        return ChainQuery(
            keyspace=self._rank.keyspace,
            chunk_hashes=chunk_hashes,
            first_chunk_index=first_chunk_index,
            group_head_hash=group_head,
            shards=self._rank.shards,
            host_id=self._host_id,
        )

    async def _lookup(self, hashes: Sequence[bytes], first_chunk_index: int, group_head: bytes) -> list[SourceRun]:
        query = self._query(b"".join(hashes), first_chunk_index, group_head)
        match = await self._index.match(query)
        runs = list(source_runs(match, self._rank.grid, self._rank.shards, self._pool.local_node_id))
        remaining = iter(hashes)
        for run in runs:
            for chunk_hash in itertools.islice(remaining, run.chunk_count):
                self._seen.remember(chunk_hash, (run.remote, run.readable))
        return runs
