"""One worker's side: asynchronous loads and stores between the engine's KV cache blocks and the pool.

Orders come and ends are fetched on the engine's thread; what runs in between runs on the pool's loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from kvpool.connectors.vllm.concurrency_limiter import ConcurrencyLimiter
from kvpool.connectors.vllm.engine_work import WorkPoint
from kvpool.connectors.vllm.layer_loads import LayerLoads
from kvpool.connectors.vllm.link import PoolLink, unreachable
from kvpool.connectors.vllm.orders import LoadEnd, LoadOrder, StepOrders, StoreEnd, block_table, prompt_of
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.worker_stores import WorkerGroup, WorkerStores
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KvPoolError, Overloaded, ServiceUnavailable, Stopped

_LOADS_MAX = 40  # at once: an agent takes 64 loads and stores of a session
# With nothing to execute, vLLM's engine core asks for finished loads and sleeps 1 ms between two steps. Waiting here
# instead ends as soon as a load does, and leaves the GIL to the thread that receives the agent's answer.
_IDLE_WAIT_S = 0.002


@dataclass(slots=True)
class _Request:
    """What a request loads: a load for each KV cache group."""

    loads: list[_Load] = field(default_factory=list)  # that have not ended
    ends: list[LoadEnd] = field(default_factory=list)
    failed: bool = False
    failed_blocks: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Load:
    order: LoadOrder
    started_s: float
    request: _Request
    cancelled: bool = False
    handle: AsyncHandle[LoadResult] | None = None  # once it was begun; touched on the loop only


class WorkerSide:
    """All methods on the engine's thread; none raises for trouble of the cache. None blocks, except that
    `take_received` may wait a moment (see `idle_wait`), and that layerwise loads are waited for by `wait_layers`,
    `start_stores` and `take_failed_blocks`. Each request that loads ends in `take_received` or `take_arrived`, each
    held one in `take_released`, whatever happens: the engine waits for that."""

    def __init__(
        self,
        settings: VllmSettings,
        link: PoolLink,
        groups: Sequence[WorkerGroup],
        *,
        load_only: bool,
        fails_whole: bool = False,
        loads_wait: bool = True,
        idle_wait: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """groups: in vLLM's order, as the pools of the link. fails_whole: of a load that fails in part the engine can
        use nothing: it is named by `take_failed_requests`, not by blocks. loads_wait: for GPU work that was
        launched before, as it may still write to their blocks. idle_wait: a step of an engine that computes nothing may
        wait a moment for the end of a load: no other rank waits for this one then."""
        self._settings, self._link, self._groups = settings, link, groups
        self._fails_whole, self._loads_wait, self._now_s = fails_whole, loads_wait, now_s
        self._done: deque[Callable[[], None]] = deque()  # appended on the loop, run here
        self._requests: dict[str, _Request] = {}  # whose loads have not ended
        self._waiting: deque[_Load] = deque()  # for an event
        self._limiter = ConcurrencyLimiter(count=_LOADS_MAX, size_bytes=1 << 62)
        self._idle_wait, self._engine_computes = idle_wait, True
        self._ended = threading.Event()  # a load has, since it was last looked at
        self._received: set[str] = set()
        self._scheduler_asks = False  # for what came in whole
        self._arrived: list[LoadEnd] = []
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._spoiled_blocks: set[int] = set()  # that the running step has read though their load failed
        self._ends: list[LoadEnd | StoreEnd] = []
        self._layer_loads = LayerLoads(link, self._layer_load_ended, now_s)
        self._stores = WorkerStores(
            settings,
            link,
            groups,
            load_only=load_only,
            later=self._done.append,
            on_ended=self._ends.append,
            now_s=now_s,
        )

    @property
    def ready(self) -> bool:
        """Whether loads and stores can be ordered."""
        return bool(self._link.pools)

    def before_step(self, orders: StepOrders) -> None:
        """Blocks of preempted requests, and those that have left a window, may be written from now on."""
        self._stores.preempted(orders.preempted)
        self._stores.overwritten(orders.overwritten, all_stores=not orders.step)

    def start_loads(self, orders: StepOrders) -> None:
        """Begin them, and end early what is not needed any more; each ends in `take_received`, whatever happens."""
        self._spoiled_blocks = set()
        self._engine_computes = orders.computes
        self._new_work()
        for request_id, loads in groupby(orders.loads, lambda order: order.request_id):
            request = self._requests[request_id] = _Request()
            request.loads += [_Load(order, self._now_s(), request) for order in loads]
            self._waiting += request.loads
        for request_id in orders.cancel:
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
        """False: no event is free, and the load can wait for one. raises: whatever keeps it from being begun."""
        order, waited_s = load.order, self._now_s() - load.started_s
        if not order.hashes:
            raise InvalidRequest("nothing is known of this load")
        if load.cancelled:
            raise Stopped("the load is no longer needed")
        pools, work = self._link.pools, self._groups[order.group].work
        if not pools:
            raise unreachable()
        pool = pools[order.group]
        if waited_s > order.timeout_s:
            raise Overloaded("no event became free for this load: the agent waits for work that has not ended")
        point = work.point() if self._loads_wait else WorkPoint()
        if point is None:
            if self._settings.layerwise:
                raise ServiceUnavailable("no event is free: the agent waits for work that has not ended")
            return False
        try:
            if self._settings.layerwise:
                self._layer_loads.begin(order, partial(self._begin_layers, pool, order, point))
            else:
                future = self._link.start(partial(self._load, pool, load, point), order.trace)
                future.add_done_callback(partial(self._loaded_soon, load))
        except Exception:
            work.give_back(point)
            raise
        return True

    def _cancel(self, request: _Request) -> None:
        for load in request.loads:
            load.cancelled = True
            if load not in self._waiting:  # else nothing of it has begun
                with suppress(ServiceUnavailable):  # closed: then it ends anyway
                    self._link.start(partial(_cancel_begun, load))

    def _new_work(self) -> None:
        for group in self._groups:
            group.work.new_step()

    def start_stores(self, orders: StepOrders) -> None:
        """Begin them after this step's work, and hold the blocks of requests that the engine gave up to us."""
        self._layer_loads.finish()  # what was computed from blocks that did not come must not be stored
        self._new_work()
        for order in orders.stores:
            self._stores.start(order, self._spoiled_blocks)
        self._stores.begin_waiting()
        self._stores.hold(orders.release)

    def finish_stores(self, timeout_s: float) -> None:
        """Before the engine's memory goes: wait so long for stores that have begun."""
        self._stores.finish(timeout_s)

    def take_received(self) -> set[str]:
        """Requests whose loads have ended: nothing touches their blocks any more. May wait a moment for one, see
        `idle_wait`."""
        if self._idle_wait and self._requests and not self._done and not self._engine_computes:
            self._ended.wait(_IDLE_WAIT_S)
        self._ended.clear()
        self._run_done()
        received, self._received = self._received, set()
        return received

    def take_arrived(self) -> tuple[LoadEnd, ...]:
        """For a scheduler in the same process: loads that have come in whole. Once it has asked, later ones are named
        neither by `take_received` nor by `take_ends`. One that failed always is, together with what failed."""
        self._scheduler_asks = True
        self._run_done()
        arrived = tuple(self._arrived)
        self._arrived.clear()
        return arrived

    def wait_layers(self, layers: int) -> None:
        """Return when so many leading layers of this step's loads are in, or are known not to come."""
        self._layer_loads.wait_layers(layers)

    def take_failed_blocks(self) -> set[int]:
        """Blocks that the engine must compute."""
        self._layer_loads.finish()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests of `take_received` of which the engine must compute all."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_released(self) -> set[str]:
        """Requests of `StepOrders.release` whose blocks the engine may have back."""
        self._run_done()
        return self._stores.take_released()

    def take_ends(self) -> tuple[LoadEnd | StoreEnd, ...]:
        """How loads and stores ended since the last call."""
        self._run_done()
        ends = tuple(self._ends)
        self._ends.clear()
        return ends

    def _run_done(self) -> None:
        while self._done:
            self._done.popleft()()

    async def _begin_layers(self, pool: AsyncPool, order: LoadOrder, point: WorkPoint) -> AsyncHandle[LoadResult]:
        prompt, blocks = self._what(order)
        return await pool.start_load(prompt, blocks, **self._span(order), wait_event=point.event)

    def _layer_load_ended(self, order: LoadOrder, duration_s: float, result: LoadResult | Exception) -> None:
        request = self._requests.get(order.request_id) or _Request()
        load = next(iter(request.loads), None) or _Load(order, self._now_s(), request)
        self._end_load(load, duration_s, result)

    def _what(self, order: LoadOrder) -> tuple[Prompt, npt.NDArray[np.int64]]:
        return prompt_of(order, self._settings.chunk_tokens), block_table(order, self._groups[order.group].split)

    def _span(self, order: LoadOrder) -> dict[str, Any]:
        return {
            "first_chunk": order.first_chunk,
            "end_chunk": order.end_chunk,
            "skip_tokens": order.first_token - order.first_chunk * self._settings.chunk_tokens,
            "timeout_s": order.timeout_s,
            "compute_us_per_token": order.compute_us_per_token,
        }

    async def _load(self, pool: AsyncPool, load: _Load, point: WorkPoint) -> LoadResult:
        """On the pool's loop."""
        order, begun = load.order, False
        try:
            async with asyncio.timeout(order.timeout_s) as patience, self._limiter.acquire(0):
                patience.reschedule(None)  # the load has a deadline of its own
                begun = True
                prompt, blocks = self._what(order)
                load.handle = handle = await pool.start_load(
                    prompt, blocks, **self._span(order), wait_event=point.event, by_layer=False
                )
                if load.cancelled:
                    handle.cancel()
                result = await handle.result()
        except TimeoutError:
            raise DeadlineExceeded("the load did not come to its turn in time") from None
        finally:
            if not begun:
                self._groups[order.group].work.give_back(point)
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
        order = load.order
        if isinstance(result, Exception):
            error = result if isinstance(result, KvPoolError) else KvPoolError(str(result) or repr(result))
            failed = tuple(range(order.first_chunk, order.end_chunk))
            result = LoadResult(order.first_chunk, failed_chunks=failed, error=error)
        end_chunk, group, request = result.end_chunk, self._groups[order.group], load.request
        end = LoadEnd(
            request_id=order.request_id,
            group=order.group,
            result=result,
            duration_s=duration_s,
            size_bytes=(end_chunk - order.first_chunk) * group.chunk_bytes,
            cancelled=load.cancelled,
        )
        request.ends.append(end)
        if load in request.loads:
            request.loads.remove(load)
        if result.error is not None or end_chunk < order.end_chunk:
            request.failed = True
            request.failed_blocks |= order.failed_blocks(end_chunk, self._settings.chunk_tokens, group.block_tokens)
            self._cancel(request)  # what other groups load is of no use
        if not request.loads:
            self._end_request(order.request_id, request)

    def _end_request(self, request_id: str, request: _Request) -> None:
        """Nothing touches its blocks any more."""
        if self._requests.get(request_id) is request:
            del self._requests[request_id]
        if self._fails_whole and request.failed:
            self._failed_requests.add(request_id)
        else:
            self._failed_blocks |= request.failed_blocks
        if self._settings.layerwise:
            self._spoiled_blocks |= request.failed_blocks  # this step computes from them
            self._ends += request.ends
        elif self._scheduler_asks and not request.failed:
            self._arrived += request.ends
        else:
            self._ends += request.ends
            self._received.add(request_id)


async def _cancel_begun(load: _Load) -> None:
    if load.handle is not None:
        load.handle.cancel()
