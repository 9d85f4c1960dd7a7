"""One engine rank: match, store, load on its mapped cache."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import HASH_BYTES, ChunkRange
from kvpool.core.errors import InvalidRequest, KvPoolError, NotServed, Overloaded, Stopped
from kvpool.core.ipc import IpcEvent
from kvpool.core.payload import chunk_bytes
from kvpool.core.tracing import NO_TRACER, PAGES, SERVED_PAGES, Span, Tracer
from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_gpuagent.core.cached_chunks import CachedChunks, PulledChunks, with_pulled
from kvpool_gpuagent.core.leases import LeaseBudget
from kvpool_gpuagent.core.pages import CopyBatch
from kvpool_gpuagent.core.requests import LoadOutcome, Rank, StoreOutcome, check_chunks, check_load, check_store
from kvpool_gpuagent.core.sources import Bandwidths, CopiedBytes, LoadSource, SourceRun, with_cached
from kvpool_gpuagent.engine.descriptors import HoldFile, map_generations
from kvpool_gpuagent.engine.events import EnginePassed, SessionEvents, UsedEvent
from kvpool_gpuagent.engine.leasing import LeaseOutcome, SessionLeases
from kvpool_gpuagent.engine.loading import LoadRun, ReportProgress
from kvpool_gpuagent.engine.locations import ChainLocations, SeenChunks
from kvpool_gpuagent.engine.storing import AskStillValid, StoreRun
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import BlockIds, Device, EngineCache, IndexPort, MappedHandle, PagePool

if TYPE_CHECKING:
    from kvpool_gpuagent.engine.host_caches import HostCaches


def traced(cache: EngineCache, tracer: Tracer) -> EngineCache:
    """The cache, with spans around its copies; the very same where nothing is traced."""
    return TracedCache(cache, tracer) if tracer.recording else cache


class TracedCache:
    """See ports.EngineCache."""

    def __init__(self, cache: EngineCache, tracer: Tracer) -> None:
        self._cache, self._tracer = cache, tracer

    async def event_passed(self, slot: int) -> bool:
        """See ports.EngineCache. Asked again and again: no span."""
        return await self._cache.event_passed(slot)

    async def gather(self, batch: CopyBatch, stop: CancelToken) -> bool:
        """See ports.EngineCache."""
        with self._tracer.part("gpuagent.gather") as span:
            _describe(span, batch)
            complete = await self._cache.gather(batch, stop)
            if not complete:
                span.fail("STOPPED")
        return complete

    async def scatter(self, batch: CopyBatch) -> None:
        """See ports.EngineCache."""
        with self._tracer.part("gpuagent.scatter") as span:
            _describe(span, batch)
            await self._cache.scatter(batch)
            if span.recording:
                span.set({SERVED_PAGES: batch.count})

    async def close(self) -> None:
        """See ports.EngineCache."""
        await self._cache.close()


def _describe(span: Span, batch: CopyBatch) -> None:
    if span.recording:
        span.set({PAGES: batch.count})


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMatch:
    """Answer of a match: held chunks count as matched; runs speak of those after them."""

    matched_chunks: int
    runs: tuple[tuple[int, LoadSource, float], ...]  # chunk count, source, estimated milliseconds


@dataclass(slots=True)
class _Running:
    """Work on the engine's memory, which can be cancelled."""

    stop: CancelToken = field(default_factory=CancelToken)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, eq=False)
class CacheUse:
    """Use of a session's cache by others than its own loads and stores; see EngineSession.share."""

    cache: EngineCache
    stop: CancelToken  # cancelled when the session wants its end
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """An engine rank's identity, once its keyspace is open."""

    rank: Rank
    engine_name: str
    keyspace_name: str
    hash_key: bytes
    engine_id: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParts:
    """What all sessions of an agent share."""

    config: GpuAgentConfig
    device: Device
    index: IndexPort
    metrics: AgentMetrics
    lease_budget: LeaseBudget
    bandwidths: Bandwidths = field(default_factory=Bandwidths)
    copied: CopiedBytes = field(default_factory=CopiedBytes)
    tracer: Tracer = NO_TRACER
    caches: HostCaches | None = None  # None where no GPU caches are looked up


class EngineSession:
    """Belongs to one event loop. `unmapped` is set when nothing touches the engine's memory any more; `ended` says why
    the agent ends the session, if it does."""

    def __init__(
        self,
        identity: EngineIdentity,
        parts: AgentParts,
        pool: PagePool,
        events: SessionEvents,
        seen: SeenChunks,
        on_closed: Callable[[EngineSession], None],
    ) -> None:
        """Made by GpuAgentEngine.open_session."""
        rank = self.rank = identity.rank
        self.engine_name, self.keyspace_name = identity.engine_name, identity.keyspace_name
        self.hash_key, self.engine_id = identity.hash_key, identity.engine_id
        self.cached: CachedChunks | None = None  # what the engine has announced, if it has generations
        self.session_id = secrets.token_bytes(16)
        self.owner = ""  # whose share of the agent's sessions it takes; see GpuAgentEngine.claim
        self.unmapped = asyncio.Event()
        self.ended: asyncio.Future[KvPoolError] = asyncio.get_running_loop().create_future()
        self.events = events
        config = self._config = parts.config
        self._device, self._pool, self._on_closed = parts.device, pool, on_closed
        self._metrics, self._bandwidths, self._copied = parts.metrics, parts.bandwidths, parts.copied
        self._tracer = parts.tracer
        self._locations = ChainLocations(rank, parts.index, pool, parts.metrics, seen, host_id=config.host_id)
        self._leases = SessionLeases(rank, self._locations, pool, parts.lease_budget, config, parts.metrics)
        self._caches = parts.caches
        self._cache: EngineCache | None = None
        self._hold_file: HoldFile | None = None
        self._mapping = _Running()
        self._mapping.ended.set()
        self._running: dict[int, _Running] = {}
        self._uses: set[CacheUse] = set()
        self.handles: tuple[MappedHandle, ...] = ()  # as registered; descriptors in them are not ours
        self._closing: asyncio.Future[None] | None = None

    async def map_cache(
        self,
        handles: Sequence[MappedHandle],
        events: Sequence[IpcEvent],
        hold_file: HoldFile | None,
        generations: int | None = None,
    ) -> None:
        """Map the engine's memory and reach the pagestore. Owns the descriptors and the hold file. Raises
        InvalidRequest naming the handle, Stopped if the session was closed meanwhile.

        generations: descriptor of the table of block generations, if the engine has one.
        """
        rank = self.rank
        if self._closing is not None:
            await _give_up(handles, hold_file, generations)
            raise Stopped("the session was closed while it was registered")
        self._hold_file, self.handles = hold_file, tuple(handles)
        self._mapping.ended.clear()
        try:
            # Not while it is closing: the closer waits for `ended`, then unmaps what came of this.
            self._cache = await self._device.map_cache(rank.spec, rank.grid, rank.layout, handles, events)
        finally:
            self._mapping.ended.set()
            if generations is not None:
                table = np.frombuffer(map_generations(generations, rank.layout.block_count), dtype=np.int64)
                self.cached = CachedChunks(table, rank.blocks_per_chunk)
        if self._closing is None:
            await self._pool.connect()
        if self._closing is not None:
            raise Stopped("the session was closed while it was registered")

    def generations(self, block_ids: BlockIds) -> BlockIds:
        """Return the generations of blocks as they are now. Raises InvalidRequest for blocks of an engine without."""
        if self.cached is None:
            raise InvalidRequest("the session has no block generations")
        return self.cached.generations(block_ids)

    def announce(self, chunk_hashes: bytes, block_ids: BlockIds, generations: BlockIds) -> None:
        """The engine's cache holds chunks; see CachedChunks.announce. Raises InvalidRequest."""
        if self.cached is None:
            raise InvalidRequest("cached: register with block_generations first")
        count, most = len(chunk_hashes) // HASH_BYTES, self._config.max_request_chunks
        if count > most:
            raise InvalidRequest(f"cached: at most {most} chunks are announced at once, got {count}")
        self.cached.announce(chunk_hashes, block_ids, generations)

    async def only_match(self) -> None:
        """The engine has no memory here: reach the pagestore, which knows what is local. Raises Stopped."""
        await self._pool.connect()
        if self._closing is not None:
            raise Stopped("the session was closed while it was registered")

    @property
    def active_requests(self) -> int:
        """Loads and stores now running."""
        return len(self._running)

    async def match(self, hashes: Sequence[bytes], held_chunks: int) -> EngineMatch:
        """The longest prefix of a chain (from chunk 0), the engine's own `held_chunks` included."""
        limit = self._config.max_request_chunks
        if not 0 <= held_chunks <= len(hashes) <= limit:
            raise InvalidRequest(
                f"held_chunks must lie in [0, {len(hashes)}], and a chain has at most {limit} chunks; "
                f"got {held_chunks} and {len(hashes)}"
            )
        if held_chunks == len(hashes):
            return EngineMatch(matched_chunks=held_chunks, runs=())
        with self._metrics.match_duration.time():
            found = await self._match(hashes, held_chunks)
        for run in found:
            self._metrics.matched_chunks.labels(run.source.name.lower()).inc(run.chunk_count)
        found_chunks = sum(run.chunk_count for run in found)
        self._metrics.unmatched_chunks.inc(len(hashes) - held_chunks - found_chunks)
        return EngineMatch(matched_chunks=held_chunks + found_chunks, runs=tuple(self._estimated(run) for run in found))

    async def _match(self, hashes: Sequence[bytes], held_chunks: int) -> list[SourceRun]:
        if self._caches is None or not self.engine_id:
            return await self._locations.match(hashes, held_chunks)
        finding = asyncio.ensure_future(self._caches.find(self, b"".join(hashes[held_chunks:])))
        try:
            found = await self._locations.match(hashes, held_chunks)
        except KvPoolError:
            if not (await finding)[0]:
                raise
            found = []  # what GPUs of this host hold needs no index
        return with_cached(found, await finding)

    async def store(
        self, request_id: int, span: ChunkRange, ask_still_valid: AskStillValid, after: UsedEvent
    ) -> StoreOutcome:
        """Store chunks, after the engine's work; see StoreRun. Raises InvalidRequest before anything is touched."""
        cache = traced(self._ready_cache(), self._tracer)
        if self.rank.load_only:
            raise NotServed("this rank registered as load_only: another rank writes its shards")
        check_store(span, self.rank, max_chunks=self._config.max_request_chunks)
        with self._request(request_id, "store") as running, self._metrics.store_duration.time():
            run = StoreRun(self.rank, span, self._pool, cache, self._metrics)
            passed = partial(after.passed, cache.event_passed, running.stop)
            outcome = await run.run(ask_still_valid, running.stop, passed)
        self._locations.note_stored(span)
        count = self._metrics.stored_chunks
        count.labels("stored").inc(outcome.stored_chunks)
        count.labels("deduplicated").inc(outcome.deduplicated_chunks)
        count.labels("failed").inc(len(outcome.failed))
        return outcome

    async def load(
        self,
        request_id: int,
        span: ChunkRange,
        wait_s: float,
        report: ReportProgress,
        after: UsedEvent,
        *,
        compute_s_per_token: float = 0.0,
        from_gpu: bool = False,
        by_layer: bool = False,
    ) -> LoadOutcome:
        """Load chunks, after the engine's work; see LoadRun. Raises InvalidRequest before anything is touched.

        compute_s_per_token: of the engine, were it to compute them; 0 if unknown. from_gpu: what GPU caches of other
        ranks hold comes from there. by_layer: the engine starts its first layers early.
        """
        cache, loop = traced(self._ready_cache(), self._tracer), asyncio.get_running_loop()
        check_load(span, self.rank, max_chunks=self._config.max_request_chunks)
        started_s = loop.time()
        with self._request(request_id, "load") as running, self._metrics.load_duration.time():
            passed = partial(after.passed, cache.event_passed, running.stop)
            ends_at_s = started_s + wait_s
            pulled = await self._pull(span, passed, running.stop, ends_at_s) if from_gpu else None
            left = pulled.left if pulled is not None else range(span.chunk_count)
            outcome, loaded_bytes = LoadOutcome(chunk_count=0), dict.fromkeys(LoadSource, 0)
            if left:
                rest = span.part(left)
                run = LoadRun(
                    self.rank,
                    rest,
                    await self._locations.sources_of(rest, running.stop, ends_at_s),
                    self._pool,
                    cache,
                    self._metrics,
                    self._copied,
                    by_layer=by_layer,
                )
                outcome = await run.run(partial(_report_part, report, left), running.stop, ends_at_s, passed)
                loaded_bytes = run.loaded_bytes
            if pulled is not None:
                outcome = with_pulled(outcome, span, self.rank.spec.chunk_tokens, pulled)
                loaded_bytes[LoadSource.GPU] = pulled.size_bytes
                self._metrics.loaded_bytes.labels("gpu").inc(pulled.size_bytes)
        duration_s = loop.time() - started_s
        copying_s = (
            outcome.copying_s or duration_s
        )  # the engine's own work and other requests' turns are not the link's
        count_load(self._metrics, self._bandwidths, loaded_bytes, copying_s, outcome, compute_s_per_token)
        if outcome.error is not None:
            self._locations.forget(span)
        return outcome

    async def _pull(
        self, span: ChunkRange, passed: EnginePassed, stop: CancelToken, ends_at_s: float
    ) -> PulledChunks | None:
        """What GPU caches of other ranks bring of a load; None: nothing. Never raises."""
        if self._caches is None:
            return None
        try:
            await passed(max(0.0, ends_at_s - asyncio.get_running_loop().time()))
        except Exception:
            return None  # the rest of the load meets it, too, and says so
        return await self._caches.pull(self, span, stop, ends_at_s)

    async def lease(self, request_id: int, span: ChunkRange, hold_s: float, *, hold_only: bool = False) -> LeaseOutcome:
        """Keep chunks in staging for a load to come; see SessionLeases.lease. Raises Stopped while the session
        closes, InvalidRequest, NotServed, Overloaded."""
        if self._closing is not None:
            raise Stopped("the session is closing")
        check_chunks(span, self._config.max_request_chunks)
        if request_id in self._running:
            raise InvalidRequest(f"request id {request_id} is that of a running load or store")
        return await self._leases.lease(request_id, span, hold_s, hold_only=hold_only)

    def cancel(self, request_id: int) -> None:
        """Make a running load, store or lease end early; unknown ones are ignored (they may have ended)."""
        self._leases.cancel(request_id)
        running = self._running.get(request_id)
        if running is not None:
            running.stop.cancel()

    @property
    def is_open(self) -> bool:
        """Whether the session is ready and not ending: its engine lives, for all that is known."""
        return self._cache is not None and self._closing is None

    @contextmanager
    def share(self, stop: CancelToken | None = None) -> Iterator[CacheUse]:
        """The cache, as long as the block runs: a close of the session cancels `stop` and waits for the block's end.

        stop: to be shared with other uses. Raises Stopped while the session closes, InvalidRequest before it is ready.
        """
        use = CacheUse(self._ready_cache(), stop or CancelToken())
        self._uses.add(use)
        try:
            yield use
        finally:
            self._uses.discard(use)
            use.ended.set()

    def begin_close(self, reason: KvPoolError | None = None) -> None:
        """Refuse new requests, cancel running ones, and end the session in the background. reason: the agent's,
        for the engine."""
        if reason is not None and not self.ended.done():
            self.ended.set_result(reason)
        if self._closing is None:
            for stop in (*(run.stop for run in self._running.values()), *(use.stop for use in self._uses)):
                stop.cancel()
            self._leases.stop_all()
            self._closing = asyncio.ensure_future(self._close())

    async def close(self) -> None:
        """Stop and wait for everything that touches the engine's memory, unmap it, end the pool's session. Idempotent;
        a caller that is cancelled leaves it going on."""
        self.begin_close()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        running = [self._mapping.ended, *(run.ended for run in self._running.values())]
        for ended in (*running, *(use.ended for use in list(self._uses))):
            await ended.wait()
        await self._leases.wait_ended()
        try:
            if self._cache is not None:
                await self._cache.close()
            if self._hold_file is not None:
                await self._hold_file.release()
        except Exception:
            # The hold file stays open: then the end of this process says that the memory is untouched.
            _log.exception("an engine's memory could not be unmapped; its blocks stay held until this process ends")
        self.cached = None
        self.unmapped.set()
        try:
            await self._pool.close()
        except Exception:
            _log.exception("a page pool could not be closed")
        finally:
            self._on_closed(self)

    def _ready_cache(self) -> EngineCache:
        if self._closing is not None:
            raise Stopped("the session is closing")
        if self._cache is None:
            raise InvalidRequest("the session is not ready: wait for `ready`, and register without match_only")
        return self._cache

    @contextmanager
    def _request(self, request_id: int, operation: str) -> Iterator[_Running]:
        if request_id <= 0 or request_id in self._running or request_id in self._leases:
            raise InvalidRequest(f"request id {request_id} must be > 0 and unique in the session")
        if len(self._running) >= self._config.max_running_requests:
            raise Overloaded(f"{len(self._running)} loads and stores run in this session; wait for one to end")
        running = self._running[request_id] = _Running()
        gauge = self._metrics.active_requests.labels(operation)
        gauge.inc()
        try:
            yield running
        finally:
            gauge.dec()
            del self._running[request_id]
            running.ended.set()

    def _estimated(self, run: SourceRun) -> tuple[int, LoadSource, float]:
        run_bytes = chunk_bytes(self.rank.spec, self.rank.grid, self.rank.shards) * run.chunk_count
        return run.chunk_count, run.source, self._bandwidths.estimate_ms(run.source, run_bytes)


def _report_part(report: ReportProgress, part: range, layers: int, failed: Sequence[int]) -> None:
    """Report the progress of a part of a load."""
    report(layers, [part[position] for position in failed])


async def _give_up(handles: Sequence[MappedHandle], hold_file: HoldFile | None, generations: int | None) -> None:
    for descriptor in (*(handle.descriptor for handle in handles), generations):
        if descriptor is not None:
            os.close(descriptor)
    if hold_file is not None:
        await hold_file.release()


def count_load(
    metrics: AgentMetrics,
    bandwidths: Bandwidths,
    loaded_bytes: Mapping[LoadSource, int],
    duration_s: float,
    outcome: LoadOutcome,
    compute_s_per_token: float,
) -> None:
    """A load has ended. compute_s_per_token: of the engine, were it to compute them; 0 if unknown.

    One that was cancelled shows neither what loads bring nor how fast they are: an engine whose clients leave early
    would otherwise take loads for slow.
    """
    stopped = isinstance(outcome.error, Stopped)
    if compute_s_per_token and not stopped:
        saved_s = sum(outcome.tokens.values()) * compute_s_per_token - duration_s
        metrics.saved_seconds.inc(max(0.0, saved_s))
        metrics.lost_seconds.inc(max(0.0, -saved_s))
    used = [source for source, size_bytes in loaded_bytes.items() if size_bytes]
    if len(used) == 1 and not stopped:  # a mixture says nothing about either
        bandwidths.record(used[0], loaded_bytes[used[0]], duration_s)
        metrics.bandwidth.labels(used[0].name.lower()).set(bandwidths.bytes_per_s(used[0]))
    for source, tokens in outcome.tokens.items():
        metrics.loaded_tokens.labels(source.name.lower()).inc(tokens)
    if outcome.error is not None:
        metrics.failed_chunks.labels(outcome.error.reason).inc(len(outcome.failed_chunks))
