"""Loads: acquire pages window by window, verify, scatter layer group by layer group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from kvpool.core.clock import Clock
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import DeadlineExceeded, KvPoolError, PageCorrupt, PageMissing, Stopped
from kvpool.core.grid import shards_in
from kvpool.core.page import PageKey, verify
from kvpool_gpuagent.core.bandwidth import Bandwidths, LoadSource
from kvpool_gpuagent.core.requests import ChunkSpan, LoadOutcome, Rank
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import EngineCache, PageCopy, PagePool, PageWish, ReadSlot
from kvpool_gpuagent.workers import Workers

ReportProgress = Callable[[int, Sequence[int]], None]
"""Told (layers of the rank that are in, failed positions so far)."""

BATCH_BYTES = 8 << 20  # one hand-over to a worker thread; small pages travel together


@dataclass(frozen=True, slots=True)
class _Wanted:
    position: int  # of the chunk in the request
    wish: PageWish


class LoadRun:
    """One load request. Never cancelled from outside: `stop` makes it end after the copies that have begun.

    Pages are taken layer group by layer group, inside one in chunk order: an engine can start its first layers early.
    A chunk that fails in any group ends the loadable prefix before it; nothing of it or after it is asked for any more.
    """

    def __init__(
        self,
        rank: Rank,
        span: ChunkSpan,
        sources: Sequence[tuple[RemoteSource, ...]],
        pool: PagePool,
        cache: EngineCache,
        workers: Workers,
        metrics: AgentMetrics,
        bandwidths: Bandwidths,
        clock: Clock,
    ) -> None:
        self._rank, self._span, self._sources = rank, span, sources
        self._pool, self._cache, self._workers = pool, cache, workers
        self._metrics, self._bandwidths, self._clock = metrics, bandwidths, clock
        self._first_failed = len(span.chunks)
        self._error: KvPoolError | None = None
        self._lock = threading.Lock()  # worker threads report failures and bytes too
        self._source_of = [LoadSource.STAGING] * len(span.chunks)
        self._loaded_bytes = dict.fromkeys(LoadSource, 0)

    async def run(self, report: ReportProgress, stop: asyncio.Event, wait_s: float) -> LoadOutcome:
        """Load what can be loaded; never raises for the cluster's faults. Then nothing touches the blocks any more."""
        started_s = self._clock.monotonic_s()
        deadline_s = started_s + wait_s
        for layer_group in range(self._rank.grid.layer_groups):
            wanted = self._wanted(layer_group)
            if not wanted:
                continue
            await self._load_group(wanted, stop, deadline_s)
            layers = self._rank.grid.layers_of(wanted[0].wish.key.shard)
            report(layers.stop - self._rank.layout.first_layer, range(self._first_failed, len(self._span.chunks)))
        self._measure(self._clock.monotonic_s() - started_s)
        return self._outcome()

    def _wanted(self, layer_group: int) -> list[_Wanted]:
        grid = self._rank.grid
        shards = [s for s in shards_in(self._rank.shards) if s // grid.head_groups == layer_group]
        return [_Wanted(position, self._wish(position, s)) for position in range(self._first_failed) for s in shards]

    def _wish(self, position: int, shard: int) -> PageWish:
        span = self._span
        return PageWish(
            key=PageKey(self._rank.keyspace, span.chunks[position].chunk_hash, shard),
            chunk_index=span.first_index + position,
            parent_hash=span.parent(position),
            group_head_hash=span.group_head(position),
            chain_head_hash=span.chain_head,
            sources=self._sources[position] if position < len(self._sources) else (),
        )

    async def _load_group(self, wanted: Sequence[_Wanted], stop: asyncio.Event, deadline_s: float) -> None:
        # Two half windows: one is being copied while the next is promoted or pulled. No more is ever held.
        half = max(1, self._pool.window_pages // 2)
        in_flight = asyncio.Semaphore(2)

        async def one_window(part: Sequence[_Wanted]) -> None:
            try:
                await self._load_window([item for item in part if item.position < self._first_failed], stop, deadline_s)
            finally:
                in_flight.release()

        tasks: list[asyncio.Task[None]] = []
        for start in range(0, len(wanted), half):
            await in_flight.acquire()
            tasks.append(asyncio.ensure_future(one_window(wanted[start : start + half])))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _load_window(self, wanted: Sequence[_Wanted], stop: asyncio.Event, deadline_s: float) -> None:
        remaining_s = deadline_s - self._clock.monotonic_s()
        if not wanted:
            return
        if stop.is_set() or remaining_s <= 0:
            cause = Stopped("the load was cancelled") if stop.is_set() else DeadlineExceeded("the load's time is up")
            self._fail(wanted[0].position, cause)
            return
        settled: set[int] = set()
        copying: list[asyncio.Task[None]] = []
        batch: list[tuple[_Wanted, ReadSlot]] = []
        batch_bytes = 0
        try:
            answers = self._pool.acquire([item.wish for item in wanted], remaining_s)
            async for number, answer in until_stopped(answers, stop):
                settled.add(number)
                if not isinstance(answer, ReadSlot):
                    self._miss(wanted[number], answer)
                    continue
                batch.append((wanted[number], answer))
                batch_bytes += len(answer.page)
                if batch_bytes * self._workers.thread_count >= BATCH_BYTES:
                    copying.append(asyncio.ensure_future(self._copy(batch, stop)))
                    batch, batch_bytes = [], 0
        except KvPoolError as error:
            unsettled = [item.position for number, item in enumerate(wanted) if number not in settled]
            self._fail(min(unsettled, default=len(self._span.chunks)), error)
        finally:
            if batch:
                copying.append(asyncio.ensure_future(self._copy(batch, stop)))
            results = await asyncio.gather(*copying, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _copy(self, batch: Sequence[tuple[_Wanted, ReadSlot]], stop: asyncio.Event) -> None:
        corrupt: list[ReadSlot] = []
        try:
            if not stop.is_set():
                corrupt = await self._workers.run(lambda: self._verify_and_scatter(batch))
            else:
                self._fail(batch[0][0].position, Stopped("the load was cancelled"))
        finally:
            bad = {id(slot) for slot in corrupt}
            try:
                await self._pool.release([slot for _, slot in batch if id(slot) not in bad], corrupt)
            except KvPoolError:
                # The session broke: its leases end by the owner's rules once our copies are over, and they are.
                self._metrics.broken_releases.inc(len(batch))

    def _verify_and_scatter(self, batch: Sequence[tuple[_Wanted, ReadSlot]]) -> list[ReadSlot]:
        """Runs on a worker thread. Returns the slots that failed verification."""
        corrupt: list[ReadSlot] = []
        for item, slot in batch:
            if item.position >= self._first_failed:
                continue
            key = item.wish.key
            fault = verify(slot.page, key, self._rank.spec.codec)
            if fault is not None:
                corrupt.append(slot)
                self._fail(item.position, PageCorrupt(f"page {key} failed its check in the agent: {fault}"))
                continue
            chunk = self._span.chunks[item.position]
            layers = self._rank.grid.layers_of(key.shard)
            copy = PageCopy(key=key, page=slot.page, block_ids=chunk.block_ids, skip_tokens=chunk.skip_tokens)
            self._cache.scatter(copy, layers.start, layers.stop)
            source = LoadSource(slot.source)
            with self._lock:
                self._source_of[item.position] = max(self._source_of[item.position], source)
                self._loaded_bytes[source] += len(slot.page)
        return corrupt

    def _miss(self, item: _Wanted, error: KvPoolError | None) -> None:
        self._fail(item.position, error or PageMissing(f"page {item.wish.key} is nowhere to be had"))

    def _fail(self, position: int, error: KvPoolError) -> None:
        with self._lock:
            if position < self._first_failed:
                self._first_failed = position
                self._error = error

    def _measure(self, duration_s: float) -> None:
        used = [source for source, size_bytes in self._loaded_bytes.items() if size_bytes]
        for source in used:
            self._metrics.loaded_bytes.labels(source.name.lower()).inc(self._loaded_bytes[source])
        if len(used) == 1:  # a mixture says nothing about either
            self._bandwidths.record(used[0], self._loaded_bytes[used[0]], duration_s)

    def _outcome(self) -> LoadOutcome:
        outcome = LoadOutcome(chunk_count=len(self._span.chunks), loaded_chunks=self._first_failed, error=self._error)
        chunk_tokens = self._rank.spec.chunk_tokens
        for position in range(self._first_failed):
            tokens = chunk_tokens - self._span.chunks[position].skip_tokens
            source = self._source_of[position]
            if source is LoadSource.STAGING:
                outcome.staging_tokens += tokens
            elif source is LoadSource.DISK:
                outcome.disk_tokens += tokens
            else:
                outcome.remote_tokens += tokens
        return outcome


async def until_stopped(
    answers: AsyncGenerator[tuple[int, ReadSlot | KvPoolError | None], None], stop: asyncio.Event
) -> AsyncIterator[tuple[int, ReadSlot | KvPoolError | None]]:
    """Pass answers on until they end, or raise Stopped; what settles later is released by the pool's own rule."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        while True:
            following = asyncio.ensure_future(anext(answers))
            await asyncio.wait((following, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                following.cancel()
                await asyncio.wait((following,))
                # It may have settled while it was being cancelled: then its slot is ours and must be passed on.
                if following.cancelled() or following.exception() is not None:
                    raise Stopped("the load was cancelled")
            try:
                yield following.result()
            except StopAsyncIteration:
                return
    finally:
        stopping.cancel()
        await answers.aclose()
