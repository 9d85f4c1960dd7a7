"""The gpuagent's engine: sessions of engine ranks, each with its mapped cache, page pool and running requests."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvpool.core.chunks import GROUP_CHUNKS
from kvpool.core.clock import Clock
from kvpool.core.cluster import ChainQuery, RemoteSource
from kvpool.core.errors import InvalidRequest, KvPoolError, NotServed, Overloaded, PageCorrupt
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.payload import chunk_bytes
from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_gpuagent.core.bandwidth import Bandwidths, LoadSource
from kvpool_gpuagent.core.requests import ChunkSpan, LoadOutcome, Rank, StoreOutcome, check_span
from kvpool_gpuagent.core.sources import SourceRun, source_runs
from kvpool_gpuagent.loading import LoadRun, ReportProgress
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import Device, EngineCache, IndexPort, MappedHandle, PagePool, PoolFactory
from kvpool_gpuagent.storing import AskKept, StoreRun
from kvpool_gpuagent.workers import Workers

HASH_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMatch:
    """Answer of a match: held chunks count as matched; runs speak of those after them."""

    matched_chunks: int
    runs: tuple[tuple[int, LoadSource, float], ...]  # chunk count, source, estimated milliseconds


@dataclass(slots=True)
class _Running:
    """A load or store that can be told to stop."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class GpuAgentEngine:
    """What all sessions share."""

    def __init__(
        self,
        config: GpuAgentConfig,
        clock: Clock,
        device: Device,
        index: IndexPort,
        pools: PoolFactory,
        workers: Workers,
        metrics: AgentMetrics,
    ) -> None:
        self.config, self.clock, self.device, self.index = config, clock, device, index
        self.pools, self.workers, self.metrics = pools, workers, metrics
        self.bandwidths = Bandwidths()
        self.sessions: set[EngineSession] = set()

    async def open_session(
        self,
        engine_name: str,
        keyspace_name: str,
        spec: KeyspaceSpec,
        layout: EngineLayout,
        *,
        load_only: bool = False,
        previous_session_id: bytes = b"",
    ) -> EngineSession:
        """Open the keyspace at the index and check the rank against its grid.

        A broken earlier session of the same rank is ended first: when this returns nothing touches its blocks any more.
        Raises KeyspaceMismatch, PartitionRefused, InvalidRequest naming the argument, Overloaded (too many sessions).
        """
        for broken in [session for session in self.sessions if session.session_id == previous_session_id]:
            await broken.close()
        if len(self.sessions) >= self.config.max_sessions:
            raise Overloaded(f"this agent serves {self.config.max_sessions} engine sessions at once")
        opened = await self.index.open_keyspace(keyspace_name, spec)
        rank = Rank.of(opened.keyspace, spec, layout, load_only=load_only)
        session = EngineSession(self, engine_name, keyspace_name, rank, opened.hash_key)
        self.sessions.add(session)
        self.metrics.sessions.set(len(self.sessions))
        return session

    async def close(self) -> None:
        """End every session; running copies are waited for."""
        await asyncio.gather(*(session.close() for session in list(self.sessions)))


class EngineSession:
    """One engine rank: match, store, load on its mapped cache."""

    def __init__(
        self, agent: GpuAgentEngine, engine_name: str, keyspace_name: str, rank: Rank, hash_key: bytes
    ) -> None:
        self.agent, self.engine_name, self.keyspace_name = agent, engine_name, keyspace_name
        self.rank, self.hash_key = rank, hash_key
        self.session_id = secrets.token_bytes(16)
        self._pool: PagePool = agent.pools(rank.keyspace, rank.spec, engine_name)
        self._cache: EngineCache | None = None
        self._running: dict[int, _Running] = {}
        self._sources: OrderedDict[bytes, tuple[RemoteSource, ...]] = OrderedDict()  # of recent matches
        self._closing = False
        self._closed = asyncio.Event()

    async def map_cache(self, handles: Sequence[MappedHandle]) -> None:
        """Map the engine's memory and reach the pagestore. Raises InvalidRequest naming the handle."""
        agent, rank = self.agent, self.rank
        self._cache = await agent.workers.run(
            lambda: agent.device.map_cache(rank.spec, rank.grid, rank.layout, handles)
        )
        await self._pool.connect()

    @property
    def active_requests(self) -> int:
        """Loads and stores now running."""
        return len(self._running)

    @property
    def pool_kind(self) -> str:
        """ "arena" or "remote"."""
        return self._pool.kind

    async def match(self, hashes: Sequence[bytes], held_chunks: int) -> EngineMatch:
        """The longest prefix of a chain (from chunk 0), the engine's own `held_chunks` included."""
        if not 0 <= held_chunks <= len(hashes) <= self.agent.config.max_request_chunks:
            raise InvalidRequest(
                f"held_chunks must lie in [0, {len(hashes)}] "
                f"and a chain has at most {self.agent.config.max_request_chunks} chunks"
            )
        if held_chunks == len(hashes):
            return EngineMatch(matched_chunks=held_chunks, runs=())
        with self.agent.metrics.match_duration.time():
            found = await self._lookup(
                hashes[held_chunks:], held_chunks, hashes[held_chunks - held_chunks % GROUP_CHUNKS]
            )
        self._count_match(found, len(hashes) - held_chunks)
        matched = held_chunks + sum(run.chunk_count for run in found)
        return EngineMatch(matched_chunks=matched, runs=tuple(self._estimated(run) for run in found))

    async def store(self, request_id: int, span: ChunkSpan, ask_kept: AskKept) -> StoreOutcome:
        """Store chunks; see StoreRun. Raises InvalidRequest before anything is touched."""
        cache = self._ready_cache()
        if self.rank.load_only:
            raise NotServed("this rank registered as load_only: another rank writes its shards")
        check_span(span, self.rank, max_chunks=self.agent.config.max_request_chunks, unique_blocks=False)
        with self._request(request_id, "store") as running, self.agent.metrics.store_duration.time():
            run = StoreRun(self.rank, span, self._pool, cache, self.agent.workers, self.agent.metrics)
            outcome = await run.run(ask_kept, running.stop.is_set)
        count = self.agent.metrics.stored_chunks
        count.labels("stored").inc(outcome.stored_chunks)
        count.labels("deduplicated").inc(outcome.deduplicated_chunks)
        count.labels("failed").inc(len(outcome.failed))
        return outcome

    async def load(self, request_id: int, span: ChunkSpan, wait_s: float, report: ReportProgress) -> LoadOutcome:
        """Load chunks; see LoadRun. Raises InvalidRequest before anything is touched."""
        cache, agent = self._ready_cache(), self.agent
        check_span(span, self.rank, max_chunks=agent.config.max_request_chunks, unique_blocks=True)
        with self._request(request_id, "load") as running, agent.metrics.load_duration.time():
            sources = await self._sources_of(span)
            run = LoadRun(
                self.rank, span, sources, self._pool, cache, agent.workers, agent.metrics, agent.bandwidths, agent.clock
            )
            outcome = await run.run(report, running.stop, wait_s)
        self._count_load(outcome)
        return outcome

    def cancel(self, request_id: int) -> None:
        """Make a running load or store end early; unknown ones are ignored (they may have ended)."""
        running = self._running.get(request_id)
        if running is not None:
            running.stop.set()

    async def close(self) -> None:
        """Stop and wait for everything that touches the engine's memory, then unmap it.

        Idempotent: a second caller waits for the first.
        """
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        for running in list(self._running.values()):
            running.stop.set()
        for running in list(self._running.values()):
            await running.ended.wait()
        try:
            await self._pool.close()
        finally:
            cache, self._cache = self._cache, None
            if cache is not None:
                await self.agent.workers.run(cache.close)
            self.agent.sessions.discard(self)
            self.agent.metrics.sessions.set(len(self.agent.sessions))
            self._closed.set()

    def _ready_cache(self) -> EngineCache:
        if self._cache is None or self._closing:
            raise InvalidRequest("the session has no mapped cache; offer the descriptors first")
        return self._cache

    @contextmanager
    def _request(self, request_id: int, operation: str) -> Iterator[_Running]:
        if request_id in self._running:
            raise InvalidRequest(f"request id {request_id} is running already; ids are unique in a session")
        if len(self._running) >= self.agent.config.max_running_requests:
            raise Overloaded(f"{len(self._running)} loads and stores run in this session; wait for one to end")
        running = self._running[request_id] = _Running()
        gauge = self.agent.metrics.active_requests.labels(operation)
        gauge.inc()
        try:
            yield running
        finally:
            gauge.dec()
            del self._running[request_id]
            running.ended.set()

    async def _lookup(self, hashes: Sequence[bytes], first_index: int, group_head: bytes) -> list[SourceRun]:
        query = ChainQuery(
            keyspace=self.rank.keyspace,
            chunk_hashes=b"".join(hashes),
            first_chunk_index=first_index,
            group_head_hash=group_head,
            shards=self.rank.shards,
            host_id=self.agent.config.host_id,
        )
        match = await self.agent.index.match(query)
        runs = list(source_runs(match, self.rank.shards, self._pool.local_node_id))
        remaining = iter(hashes)
        for run in runs:
            for chunk_hash in itertools.islice(remaining, run.chunk_count):
                self._sources[chunk_hash] = run.remote
                self._sources.move_to_end(chunk_hash)
        while len(self._sources) > self.agent.config.max_remembered_chunks:
            self._sources.popitem(last=False)
        return runs

    async def _sources_of(self, span: ChunkSpan) -> list[tuple[RemoteSource, ...]]:
        """Where each chunk was seen; asks the index only for chunks that no recent match named."""
        hashes = span.hashes
        if any(chunk_hash not in self._sources for chunk_hash in hashes):
            try:
                await self._lookup(hashes, span.first_index, span.group_head(0))
            except KvPoolError:
                # Without the index what this host holds can still be loaded.
                self.agent.metrics.index_failures.inc()
        return [self._sources.get(chunk_hash, ()) for chunk_hash in hashes]

    def _estimated(self, run: SourceRun) -> tuple[int, LoadSource, float]:
        rank = self.rank
        run_bytes = chunk_bytes(rank.spec, rank.grid, rank.shards) * run.chunk_count
        return run.chunk_count, run.source, self.agent.bandwidths.estimate_ms(run.source, run_bytes)

    def _count_match(self, runs: Sequence[SourceRun], asked_chunks: int) -> None:
        for run in runs:
            self.agent.metrics.matched_chunks.labels(run.source.name.lower()).inc(run.chunk_count)
        self.agent.metrics.unmatched_chunks.inc(asked_chunks - sum(run.chunk_count for run in runs))

    def _count_load(self, outcome: LoadOutcome) -> None:
        metrics = self.agent.metrics
        for source, tokens in (
            (LoadSource.STAGING, outcome.staging_tokens),
            (LoadSource.DISK, outcome.disk_tokens),
            (LoadSource.REMOTE, outcome.remote_tokens),
        ):
            metrics.loaded_tokens.labels(source.name.lower()).inc(tokens)
            metrics.bandwidth.labels(source.name.lower()).set(self.agent.bandwidths.bytes_per_s(source))
        if outcome.error is not None:
            metrics.failed_chunks.labels(outcome.error.reason).inc(len(outcome.failed_chunks))
            if isinstance(outcome.error, PageCorrupt):
                metrics.verification_failures.inc()
        # Where a chunk failed, the remembered sources misled: the next load asks the index again.
        if outcome.error is not None:
            self._sources.clear()
