"""Stores of one worker: queues them, starts them, holds their blocks and reports their results."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from kvpool.client.block_generations import BlockGenerations
from kvpool.client.engine_items import StoreResult
from kvpool.client.pool import AsyncPool
from kvpool.connectors.vllm.agent_connection import AgentConnection, unreachable
from kvpool.connectors.vllm.concurrency_limiter import ConcurrencyLimiter
from kvpool.connectors.vllm.engine_introspection import StepStart
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_events import StepEvent, StepEvents
from kvpool.connectors.vllm.step_jobs import StepJobs, StoreJob, StoreReport, block_table, prompt_of_job
from kvpool.core.errors import KvPoolError

ResultT = TypeVar("ResultT")

_STORES_MAX = 16  # of a group at once: an agent takes 64 loads and stores of a session


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKvCacheGroup:
    """A KV cache group on one rank.

    page_bytes: of a page on this rank: of a chunk, unless chunks have several. step_events: events of this group's
    session. split: number of blocks of the tensors in one of vLLM's.
    """

    block_tokens: int
    page_bytes: int
    step_events: StepEvents
    split: int = 1


_NO_GROUP = WorkerKvCacheGroup(block_tokens=1, page_bytes=0, step_events=StepEvents(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKvCache:
    """The KV cache of one rank.

    groups: as the pools of a connection. load_only: another rank stores the same heads.
    all_or_nothing: the engine can resume only from the end of a load, not from its middle. generations: of the blocks
    of the only group, if other engines may copy them.
    """

    groups: Sequence[WorkerKvCacheGroup]
    load_only: bool = False
    all_or_nothing: bool = False
    generations: BlockGenerations | None = None

    def group(self, number: int) -> WorkerKvCacheGroup:
        """Return a group; one without pages if there is none, for a job that fails."""
        return self.groups[number] if number < len(self.groups) else _NO_GROUP


@dataclass(slots=True, kw_only=True)
class _Store:
    job: StoreJob
    started_s: float
    still_valid: bool = True  # whether the blocks have held their bytes until now
    released: bool = False
    ended_s: float | None = None


@dataclass(slots=True)
class _Request:
    """Stores that still read blocks of a request.

    held_since_s: since when vLLM keeps the blocks of the finished request; None while it runs.
    """

    stores: list[_Store] = field(default_factory=list)
    held_since_s: float | None = None


@dataclass(slots=True)
class _Outcome:
    """Chunk counts of one store, all windows together."""

    stored: int = 0
    deduplicated: int = 0
    failed: int = 0
    skipped: int = 0
    failures: set[str] = field(default_factory=set)


class WorkerStores:
    """Stores of one worker. Call methods on the engine's thread unless noted; none blocks or raises for a cache
    failure.

    Stores that exceed the bytes in flight wait in order, window by window. Meanwhile their blocks belong to the request
    or, after it has finished, are kept by the engine for up to `store_hold_max_s`.
    """

    def __init__(
        self,
        settings: VllmSettings,
        connection: AgentConnection,
        cache: WorkerKvCache,
        *,
        later: Callable[[Callable[[], None]], None],
        on_ended: Callable[[StoreReport], None],
        now_s: Callable[[], float],
    ) -> None:
        """later: runs a function on the engine's thread soon. For the others see ConnectorWorker."""
        self._step_start = StepStart()
        self._settings, self._connection, self._cache, self._groups = settings, connection, cache, cache.groups
        self._later, self._on_ended, self._now_s = later, on_ended, now_s
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[_Store] = deque()  # for an event
        self._futures: set[Future[None]] = set()  # of those that have begun and not ended
        self._places = [ConcurrencyLimiter(count=_STORES_MAX) for _ in cache.groups]
        self._bytes = ConcurrencyLimiter(size_bytes=settings.store_bytes_in_flight_max)

    def start(self, job: StoreJob, invalid_blocks: Set[int]) -> None:
        """Queue a store of this step's results. invalid_blocks: blocks that this step read but whose load failed."""
        store = _Store(job=job, started_s=self._now_s())
        chunks = job.end_chunk - job.first_chunk
        if self._cache.load_only:  # another rank stores the same heads
            self._end(store, _Outcome())
        elif job.group >= len(self._groups):
            self._end(store, _Outcome(failed=chunks, failures={f"this rank has no KV cache group {job.group}"}))
        elif not self._connection.pools:
            self._end(store, _Outcome(failed=chunks, failures={str(unreachable())}))
        elif invalid_blocks and not invalid_blocks.isdisjoint(job.block_ids.tolist()):
            self._end(store, _Outcome(failed=chunks, failures={"they were computed from blocks whose load has failed"}))
        else:
            self._requests.setdefault(job.request_id, _Request()).stores.append(store)
            self._waiting.append(store)

    def begin_waiting(self) -> None:
        """Start queued stores as long as there are free events."""
        begun: list[tuple[_Store, StepEvent]] = []
        while self._waiting:
            store = self._waiting[0]
            try:
                step_event = self._events_of(store).record() if store.still_valid else StepEvent()
            except Exception as error:
                self._waiting.popleft()
                self._fail(store, error)
                continue
            if step_event is None:
                break
            begun.append((self._waiting.popleft(), step_event))
        # Started together, they go to the agent in one message of each session.
        for trace, of_trace in groupby(begun, lambda one: one[0].job.trace):
            stores = list(of_trace)
            try:
                future = self._connection.start(partial(self._store_all, stores), trace)
            except Exception as error:
                for store, step_event in stores:
                    self._events_of(store).give_back(step_event)
                    self._fail(store, error)
            else:
                self._futures.add(future)
                future.add_done_callback(partial(self._all_ended, stores))

    def finish(self, timeout_s: float) -> None:
        """Wait up to timeout_s for running stores: the engine's memory is freed afterwards."""
        concurrent.futures.wait(list(self._futures), timeout_s)

    def step_begins(self, jobs: StepJobs) -> bool:
        """A step begins that may write to blocks which stores have not read yet: those stores are dropped.

        True: it is not known which blocks were written, and all stores are dropped.
        """
        any_block = not jobs.step or self._step_start.misses_steps(jobs)
        for request_id in jobs.preempted:
            for store in self._requests.get(request_id, _Request()).stores:
                store.still_valid = False
        if jobs.overwritten or any_block:
            for request in self._requests.values():
                for store in request.stores:
                    store.still_valid &= not (any_block or store.job.number in jobs.overwritten)
        self._step_start.step_begins(jobs)
        return any_block

    def hold(self, request_ids: Iterable[str]) -> None:
        """vLLM keeps the blocks of these finished requests until `take_finished_sending` returns them."""
        for request_id in request_ids:
            self._requests.setdefault(request_id, _Request()).held_since_s = self._now_s()

    def take_finished_sending(self) -> set[str]:
        """Return held requests whose blocks nothing reads any more."""
        released: set[str] = set()
        for request_id, request in list(self._requests.items()):
            if request.held_since_s is not None:
                if self._now_s() - request.held_since_s > self._settings.store_hold_max_s:
                    for store in request.stores:
                        store.still_valid = False  # the agent only reads them, and throws away what it has read
                    request.stores.clear()
                if all(store.released for store in request.stores):
                    released.add(request_id)
                    del self._requests[request_id]
            elif not request.stores:
                del self._requests[request_id]
        return released

    async def _store_all(self, stores: Sequence[tuple[_Store, StepEvent]]) -> None:
        """Run stores on the pool's event loop."""

        async def run(store: _Store, step_event: StepEvent) -> None:
            self._ended_soon(store, await _result_of(self._store(store, step_event)))

        await asyncio.gather(*(run(*one) for one in stores))

    async def _store(self, store: _Store, step_event: StepEvent) -> _Outcome:
        """Run one store on the pool's event loop. Its windows start in order and end in any order."""
        job, outcome, pools = store.job, _Outcome(), self._connection.pools
        group, places, step_events = self._groups[job.group], self._places[job.group], self._events_of(store)
        try:
            if not pools:
                raise unreachable()
            pool = pools[job.group]
            prompt, blocks = prompt_of_job(job, self._settings.chunk_tokens), block_table(job.block_ids, group.split)
            limit = self._window_chunks(pool, group.page_bytes)
            starts = range(job.first_chunk, job.end_chunk, limit)
            left = len(starts)

            async def valid_after_step() -> bool:
                return await self._step_start.passed() and store.still_valid

            def still_valid(_: int) -> bool | Awaitable[bool]:
                return store.still_valid if self._step_start.is_current else valid_after_step()

            def note_released() -> None:
                nonlocal left
                left -= 1
                store.released = not left

            async def window(chunks: range) -> None:
                async with places.acquire(0), self._bytes.acquire(len(chunks) * group.page_bytes):
                    if not store.still_valid:
                        outcome.skipped += len(chunks)
                        note_released()
                        return
                    try:
                        request = await pool.begin_store(
                            prompt,
                            blocks,
                            chunks,
                            wait_event=step_events.share(step_event).event,
                            retention=job.retention,
                            still_valid=still_valid,
                        )
                    except KvPoolError:  # nothing was sent
                        note_released()
                        raise
                    await request.wait_released()
                    note_released()
                    _add(outcome, await request.done(self._settings.store_hold_max_s))

            windows = [range(start, min(start + limit, job.end_chunk)) for start in starts]
            ends: list[BaseException | None]
            if len(windows) == 1:  # mostly there is one, which needs no task of its own
                ends = [await _result_of(window(windows[0]))]
            else:
                ends = await asyncio.gather(*map(window, windows), return_exceptions=True)
            for chunks, end in zip(windows, ends, strict=True):
                if end is not None:
                    outcome.failed += len(chunks)
                    outcome.failures.add(str(end) or repr(end))
            return outcome
        finally:
            step_events.give_back(step_event)

    def _events_of(self, store: _Store) -> StepEvents:
        return self._groups[store.job.group].step_events

    def _window_chunks(self, pool: AsyncPool, page_bytes: int) -> int:
        """Return the chunks of one request to the agent: few enough to copy one window while the next is prepared."""
        fitting = self._settings.store_bytes_in_flight_max // 2 // max(1, page_bytes)
        return max(1, min(fitting, pool.session.max_request_chunks or fitting))

    def _all_ended(self, stores: Sequence[tuple[_Store, StepEvent]], future: Future[None]) -> None:
        self._futures.discard(future)
        for store, _ in stores:
            if store.ended_s is None:  # the loop was stopped before it ran
                self._ended_soon(store, unreachable())

    def _ended_soon(self, store: _Store, outcome: _Outcome | BaseException) -> None:
        """Called on the pool's event loop when a store has ended."""
        store.ended_s = self._now_s()  # an idle engine hears of it with its next request
        self._later(partial(self._ended, store, outcome))

    def _ended(self, store: _Store, outcome: _Outcome | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self._fail(store, outcome)
        else:
            self._forget(store)
            self._end(store, outcome)

    def _fail(self, store: _Store, error: BaseException) -> None:
        self._forget(store)
        chunks = store.job.end_chunk - store.job.first_chunk
        self._end(store, _Outcome(failed=chunks, failures={str(error) or repr(error)}))

    def _forget(self, store: _Store) -> None:
        request = self._requests.get(store.job.request_id)
        if request is not None and store in request.stores:
            request.stores.remove(store)

    def _end(self, store: _Store, outcome: _Outcome) -> None:
        self._on_ended(
            StoreReport(
                number=store.job.number,
                stored_chunks=outcome.stored,
                deduplicated_chunks=outcome.deduplicated,
                failed_chunks=outcome.failed,
                skipped_chunks=outcome.skipped,
                duration_s=(store.ended_s or store.started_s) - store.started_s,
                size_bytes=outcome.stored * self._cache.group(store.job.group).page_bytes,
                failure="; ".join(sorted(outcome.failures)),
            )
        )


async def _result_of(work: Coroutine[Any, Any, ResultT]) -> ResultT | BaseException:
    """Return what the work returns, or the error that it has ended in."""
    try:
        return await work
    except (Exception, asyncio.CancelledError) as error:
        return error


def _add(outcome: _Outcome, result: StoreResult) -> None:
    outcome.stored += result.stored_chunks
    outcome.deduplicated += result.deduplicated_chunks
    outcome.failed += len(result.failed_chunks)
    outcome.failures |= {str(error) for error in result.failed_chunks.values()}
