"""The connector's worker side: asynchronous loads and stores between KV cache blocks and the pool.

Jobs arrive, and reports are taken, on the engine's thread; everything in between runs on the pool's event loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.client.engine_items import LoadResult
from kvpool.client.handle import AsyncHandle
from kvpool.client.hashing import Prompt
from kvpool.client.pool import AsyncPool
from kvpool.connectors.vllm.agent_connection import AgentConnection, unreachable
from kvpool.connectors.vllm.announced_chunks import AnnouncedChunks
from kvpool.connectors.vllm.concurrency_limiter import ConcurrencyLimiter
from kvpool.connectors.vllm.layerwise_loads import LayerwiseLoads
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_events import StepEvent
from kvpool.connectors.vllm.step_jobs import LoadJob, LoadReport, StepJobs, StoreReport, block_table, prompt_of_job
from kvpool.connectors.vllm.switch_interval import switch_interval
from kvpool.connectors.vllm.worker_stores import WorkerKvCache, WorkerStores
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KvPoolError, Overloaded, ServiceUnavailable, Stopped

_LOADS_MAX = 40  # at once: an agent takes 64 loads and stores of a session
# With nothing to execute, vLLM's engine core asks for finished loads and sleeps 1 ms between two steps. Waiting here
# instead ends as soon as a load does, and leaves the GIL to the thread that receives the agent's answer.
_IDLE_WAIT_S = 0.002


@dataclass(slots=True)
class _Request:
    """Loads of one request, of all KV cache groups."""

    loads: list[_Load] = field(default_factory=list)  # that have not ended
    reports: list[LoadReport] = field(default_factory=list)
    failed: bool = False
    failed_blocks: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Load:
    job: LoadJob
    started_s: float
    request: _Request
    cancelled: bool = False
    handle: AsyncHandle[LoadResult] | None = None  # once it was begun; touched on the loop only


class ConnectorWorker:
    """Worker side of KvPoolConnector. Call all methods on the engine's thread; none raises for a cache failure.

    No method blocks, except that `take_finished_recving` may wait a moment (see `wait_when_idle`), and that
    `wait_layers`, `start_stores` and `take_failed_blocks` wait for layerwise loads. Each request that loads is returned
    by `take_finished_recving` or `take_arrived`, and each held one by `take_finished_sending`, after failures too: the
    engine waits for that.
    """

    def __init__(
        self,
        settings: VllmSettings,
        connection: AgentConnection,
        cache: WorkerKvCache,
        *,
        loads_wait_for_gpu: bool = True,
        wait_when_idle: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """loads_wait_for_gpu: whether loads wait for GPU work launched before, which may still write to their blocks.
        wait_when_idle: whether a step that computes nothing may wait a moment for a load to end, as no other rank waits
        for this one then."""
        self._settings, self._connection, self._cache, self._groups = settings, connection, cache, cache.groups
        self._all_or_nothing, self._generations = cache.all_or_nothing, cache.generations
        self._loads_wait_for_gpu, self._now_s = loads_wait_for_gpu, now_s
        self._announced = AnnouncedChunks(cache.generations) if cache.generations is not None else None
        self._done: deque[Callable[[], None]] = deque()  # appended on the loop, run here
        self._requests: dict[str, _Request] = {}  # whose loads have not ended
        self._waiting: deque[_Load] = deque()  # for an event
        self._limiter = ConcurrencyLimiter(count=_LOADS_MAX)
        self._wait_when_idle, self._engine_computes = wait_when_idle, True
        self._ended = threading.Event()  # a load has, since it was last looked at
        self._received: set[str] = set()
        self._scheduler_polls = False  # for what came in whole
        self._arrived: list[LoadReport] = []
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._invalid_blocks: set[int] = set()  # that the running step has read though their load failed
        self._reports: list[LoadReport | StoreReport] = []
        self._layerwise_loads = LayerwiseLoads(connection, self._layerwise_load_ended, now_s)
        self._stores = WorkerStores(
            settings,
            connection,
            cache,
            later=self._done.append,
            on_ended=self._reports.append,
            now_s=now_s,
        )

    @property
    def ready(self) -> bool:
        """Whether loads and stores can be started."""
        return bool(self._connection.pools)

    def handle_preemptions(self, jobs: StepJobs) -> None:
        """A step begins: blocks of preempted requests, newly allocated blocks and blocks that left a window may be
        written."""
        any_block = True
        try:
            any_block = self._stores.step_begins(jobs)
        finally:
            self._raise_generations(jobs, any_block)

    def _raise_generations(self, jobs: StepJobs, any_block: bool) -> None:
        """Read the generations of announced blocks, then raise those of blocks that are written.

        Must run before any work of the step is launched.
        """
        if self._generations is None or self._announced is None:
            return
        split, ended = self._groups[0].split, False
        try:
            for job in jobs.announce:
                self._announced.add(job.hashes, block_table(job.block_ids, split))
            if not any_block and jobs.written is not None:
                if len(jobs.written):
                    self._generations.raise_blocks(block_table(jobs.written, split))
                ended = True
        finally:
            if not ended:
                self._generations.raise_all()

    def start_loads(self, jobs: StepJobs) -> None:
        """Start loads and cancel those no longer needed. `take_finished_recving` returns all, also failed ones."""
        self._invalid_blocks = set()
        self._engine_computes = jobs.computes
        self._new_work()
        for request_id, loads in groupby(jobs.loads, lambda job: job.request_id):
            request = self._requests[request_id] = _Request()
            request.loads += [_Load(job, self._now_s(), request) for job in loads]
            self._waiting += request.loads
        for request_id in jobs.cancel:
            if request_id in self._requests:
                self._cancel(self._requests[request_id])
        while self._waiting:
            load = self._waiting.popleft()
            try:
                if not self._begin(load):
                    self._waiting.appendleft(load)
                    return
            except Exception as error:
                self._end_load(load, self._now_s() - load.started_s, error)

    def _begin(self, load: _Load) -> bool:
        """Start a load. Returns False if no event is free and the load can wait for one. raises: why it cannot be
        started."""
        job, waited_s = load.job, self._now_s() - load.started_s
        if not job.hashes:
            raise InvalidRequest("nothing is known of this load")
        if job.group >= len(self._groups):
            raise InvalidRequest(f"this rank has no KV cache group {job.group}")
        if load.cancelled:
            raise Stopped("the load is no longer needed")
        pools, step_events = self._connection.pools, self._groups[job.group].step_events
        if not pools:
            raise unreachable()
        pool = pools[job.group]
        if waited_s > job.timeout_s:
            raise Overloaded("no event became free for this load: the agent waits for work that has not ended")
        step_event = step_events.record() if self._loads_wait_for_gpu else StepEvent()
        if step_event is None:
            if self._settings.layerwise:
                raise ServiceUnavailable("no event is free: the agent waits for work that has not ended")
            return False
        try:
            if self._settings.layerwise:
                self._layerwise_loads.begin(job, partial(self._begin_layers, pool, job, step_event))
            else:
                future = self._connection.start(partial(self._load, pool, load, step_event), job.trace)
                switch_interval.shorten_until(future)
                future.add_done_callback(partial(self._loaded_soon, load))
        except Exception:
            step_events.give_back(step_event)
            raise
        return True

    def _cancel(self, request: _Request) -> None:
        for load in request.loads:
            load.cancelled = True
            if load not in self._waiting:  # else nothing of it has begun
                with suppress(ServiceUnavailable):  # closed: then it ends anyway
                    self._connection.start(partial(_cancel_begun, load))

    def _new_work(self) -> None:
        for group in self._groups:
            group.step_events.new_step()

    def start_stores(self, jobs: StepJobs) -> None:
        """Start stores after this step's work, and hold the blocks of finished requests that vLLM left to the
        connector."""
        self._layerwise_loads.finish()  # what was computed from blocks that did not come must not be stored
        self._new_work()
        for job in jobs.stores:
            self._stores.start(job, self._invalid_blocks)
        self._stores.begin_waiting()
        self._stores.hold(jobs.release)
        self._announce()

    def _announce(self) -> None:
        """Tell the agent what the GPU cache holds. Lost announcements are not an error."""
        pools = self._connection.pools
        session = pools[0].session if pools else None
        cached = self._announced.take(session) if self._announced is not None else None
        if cached is None or session is None:
            return

        async def announce() -> None:
            session.announce_cached(*cached)

        with suppress(ServiceUnavailable):  # closed
            self._connection.start(announce)

    def finish_stores(self, timeout_s: float) -> None:
        """Wait up to timeout_s for running stores, before the engine's memory is freed."""
        self._stores.finish(timeout_s)

    def take_finished_recving(self) -> set[str]:
        """Return requests whose loads have ended: nothing accesses their blocks any more. May wait, see
        `wait_when_idle`."""
        if self._wait_when_idle and self._requests and not self._done and not self._engine_computes:
            self._ended.wait(_IDLE_WAIT_S)
        if self._ended.is_set():
            self._ended.clear()
        self._run_done()
        received, self._received = self._received, set()
        return received

    def take_arrived(self) -> tuple[LoadReport, ...]:
        """Return complete loads to a scheduler in the same process.

        After the first call complete loads are returned neither by `take_finished_recving` nor by `take_reports`.
        Failed loads always are, together with their failed blocks.
        """
        self._scheduler_polls = True
        self._run_done()
        arrived = tuple(self._arrived)
        self._arrived.clear()
        return arrived

    def wait_layers(self, layers: int) -> None:
        """Return when the first `layers` layers of this step's loads are in, or are known to have failed."""
        self._layerwise_loads.wait_layers(layers)

    def take_failed_blocks(self) -> set[int]:
        """Return blocks that were not loaded and must be computed."""
        self._layerwise_loads.finish()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Return requests of `take_finished_recving` that must be computed completely, of an engine that cannot use
        part of a load."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_finished_sending(self) -> set[str]:
        """Return requests of `StepJobs.release` whose blocks vLLM may free."""
        self._run_done()
        return self._stores.take_finished_sending()

    def take_reports(self) -> tuple[LoadReport | StoreReport, ...]:
        """Return how loads and stores ended since the last call."""
        self._run_done()
        reports = tuple(self._reports)
        self._reports.clear()
        return reports

    def _run_done(self) -> None:
        while self._done:
            self._done.popleft()()

    async def _begin_layers(self, pool: AsyncPool, job: LoadJob, step_event: StepEvent) -> AsyncHandle[LoadResult]:
        prompt, blocks = self._what(job)
        return await pool.start_load(prompt, blocks, **self._span(job), wait_event=step_event.event)

    def _layerwise_load_ended(self, job: LoadJob, duration_s: float, result: LoadResult | Exception) -> None:
        request = self._requests.get(job.request_id) or _Request()
        load = next(iter(request.loads), None) or _Load(job, self._now_s(), request)
        self._end_load(load, duration_s, result)

    def _what(self, job: LoadJob) -> tuple[Prompt, npt.NDArray[np.int64]]:
        return prompt_of_job(job, self._settings.chunk_tokens), block_table(
            job.block_ids, self._groups[job.group].split
        )

    def _span(self, job: LoadJob) -> dict[str, Any]:
        return {
            "first_chunk": job.first_chunk,
            "end_chunk": job.end_chunk,
            "skip_tokens": job.first_token - job.first_chunk * self._settings.chunk_tokens,
            "timeout_s": job.timeout_s,
            "compute_us_per_token": job.compute_us_per_token,
            "from_gpu": job.from_gpu,
        }

    async def _load(self, pool: AsyncPool, load: _Load, step_event: StepEvent) -> LoadResult:
        """Run one load on the pool's event loop."""
        job, begun = load.job, False
        try:
            async with asyncio.timeout(job.timeout_s) as turn, self._limiter.acquire(0):
                turn.reschedule(None)  # the load has a deadline of its own
                begun = True
                prompt, blocks = self._what(job)
                load.handle = handle = await pool.start_load(
                    prompt, blocks, **self._span(job), wait_event=step_event.event, by_layer=False
                )
                if load.cancelled:
                    handle.cancel()
                result = await handle.result()
        except TimeoutError:
            raise DeadlineExceeded("the load did not come to its turn in time") from None
        finally:
            if not begun:
                self._groups[job.group].step_events.give_back(step_event)
        # The engine computes in these very blocks what did not come: not before the agent has stopped writing there.
        await handle.wait_released()
        return result

    def _loaded_soon(self, load: _Load, future: Future[LoadResult]) -> None:
        self._done.append(partial(self._loaded, load, self._now_s() - load.started_s, future))
        self._ended.set()

    def _loaded(self, load: _Load, duration_s: float, future: Future[LoadResult]) -> None:
        try:
            result: LoadResult | Exception = future.result()
        except KvPoolError as error:
            result = error
        except BaseException as error:
            result = KvPoolError(f"it ended unexpectedly: {error!r}")
        self._end_load(load, duration_s, result)

    def _end_load(self, load: _Load, duration_s: float, result: LoadResult | Exception) -> None:
        job = load.job
        if isinstance(result, Exception):
            error = result if isinstance(result, KvPoolError) else KvPoolError(str(result) or repr(result))
            failed = tuple(range(job.first_chunk, job.end_chunk))
            result = LoadResult(job.first_chunk, failed_chunks=failed, error=error)
        end_chunk, group, request = result.end_chunk, self._cache.group(job.group), load.request
        report = LoadReport(
            request_id=job.request_id,
            group=job.group,
            result=result,
            duration_s=duration_s,
            size_bytes=(end_chunk - job.first_chunk) * group.page_bytes,
            cancelled=load.cancelled,
        )
        request.reports.append(report)
        if load in request.loads:
            request.loads.remove(load)
        if result.error is not None or end_chunk < job.end_chunk:
            request.failed = True
            request.failed_blocks |= job.failed_blocks(end_chunk, self._settings.chunk_tokens, group.block_tokens)
            self._cancel(request)  # what other groups load is of no use
        if not request.loads:
            self._end_request(job.request_id, request)

    def _end_request(self, request_id: str, request: _Request) -> None:
        """All loads of the request have ended: nothing accesses its blocks any more."""
        if self._requests.get(request_id) is request:
            del self._requests[request_id]
        if self._all_or_nothing and request.failed:
            self._failed_requests.add(request_id)
        else:
            self._failed_blocks |= request.failed_blocks
        if self._settings.layerwise:
            self._invalid_blocks |= request.failed_blocks  # this step computes from them
            self._reports += request.reports
        elif self._scheduler_polls and not request.failed:
            self._arrived += request.reports
        else:
            self._reports += request.reports
            self._received.add(request_id)


async def _cancel_begun(load: _Load) -> None:
    if load.handle is not None:
        load.handle.cancel()
