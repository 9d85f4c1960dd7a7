"""One worker's side: asynchronous loads and stores between the engine's KV cache blocks and the pool.

Orders come and ends are fetched on the engine's thread; what runs in between runs on the pool's loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpool.client.engine_items import LoadResult
from kvpool.client.handle import AsyncHandle
from kvpool.client.pool import AsyncPool
from kvpool.connectors.vllm.concurrency_limiter import ConcurrencyLimiter
from kvpool.connectors.vllm.engine_work import EngineWork, WorkPoint
from kvpool.connectors.vllm.layer_loads import LayerLoads
from kvpool.connectors.vllm.link import PoolLink, unreachable
from kvpool.connectors.vllm.orders import LoadEnd, LoadOrder, StepOrders, StoreEnd, block_table, prompt_of
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.worker_stores import WorkerStores
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KvPoolError, Overloaded, ServiceUnavailable, Stopped

_LOADS_MAX = 40  # at once: an agent takes 64 loads and stores of a session
# With nothing to execute, vLLM's engine core asks for finished loads and sleeps 1 ms between two steps. Waiting here
# instead ends as soon as a load does, and leaves the GIL to the thread that receives the agent's answer.
_IDLE_WAIT_S = 0.002


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    started_s: float
    cancelled: bool = False
    handle: AsyncHandle[LoadResult] | None = None  # once it was begun; touched on the loop only


class WorkerSide:
    """All methods on the engine's thread; none raises for trouble of the cache. None blocks, except that
    `take_received` may wait a moment (see `idle_wait`), and that layerwise loads are waited for by `wait_layers`,
    `start_stores` and `take_failed_blocks`. Each load ends in `take_received` or `take_arrived`, each held request in
    `take_released`, whatever happens: the engine waits for that."""

    def __init__(
        self,
        settings: VllmSettings,
        link: PoolLink,
        work: EngineWork,
        *,
        block_tokens: int,
        chunk_bytes: int,
        load_only: bool,
        split: int = 1,
        loads_wait: bool = True,
        idle_wait: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """chunk_bytes: of this rank. split: blocks of the tensors in one of vLLM's. loads_wait: for GPU work that was
        launched before, as it may still write to their blocks. idle_wait: a step of an engine that computes nothing may
        wait a moment for the end of a load: no other rank waits for this one then."""
        self._settings, self._link, self._work = settings, link, work
        self._block_tokens, self._chunk_bytes = block_tokens, chunk_bytes
        self._split, self._loads_wait, self._now_s = split, loads_wait, now_s
        self._done: deque[Callable[[], None]] = deque()  # appended on the loop, run here
        self._loads: dict[str, _Load] = {}  # that have not ended, by request
        self._waiting: deque[_Load] = deque()  # for an event
        self._limiter = ConcurrencyLimiter(count=_LOADS_MAX, size_bytes=1 << 62)
        self._idle_wait, self._engine_computes = idle_wait, True
        self._ended = threading.Event()  # a load has, since it was last looked at
        self._received: set[str] = set()
        self._scheduler_asks = False  # for what came in whole
        self._arrived: list[LoadEnd] = []
        self._failed_blocks: set[int] = set()
        self._spoiled_blocks: set[int] = set()  # that the running step has read though their load failed
        self._ends: list[LoadEnd | StoreEnd] = []
        self._layer_loads = LayerLoads(link, self._layer_load_ended, now_s)
        self._stores = WorkerStores(
            settings,
            link,
            work,
            chunk_bytes=chunk_bytes,
            load_only=load_only,
            split=split,
            later=self._done.append,
            on_ended=self._ends.append,
            now_s=now_s,
        )

    @property
    def ready(self) -> bool:
        """Whether loads and stores can be ordered."""
        return self._link.pool is not None

    def before_step(self, orders: StepOrders) -> None:
        """Blocks of preempted requests may be written from now on."""
        self._stores.preempted(orders.preempted)

    def start_loads(self, orders: StepOrders) -> None:
        """Begin them, and end early what is not needed any more; each ends in `take_received`, whatever happens."""
        self._spoiled_blocks = set()
        self._engine_computes = orders.computes
        self._work.new_step()
        for order in orders.loads:
            load = self._loads[order.request_id] = _Load(order, self._now_s())
            self._waiting.append(load)
        for request_id in orders.cancel:
            if request_id in self._loads:
                self._cancel(self._loads[request_id])
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
        pool = self._link.pool
        if pool is None:
            raise unreachable()
        if waited_s > order.timeout_s:
            raise Overloaded("no event became free for this load: the agent waits for work that has not ended")
        point = self._work.point() if self._loads_wait else WorkPoint()
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
            self._work.give_back(point)
            raise
        return True

    def _cancel(self, load: _Load) -> None:
        load.cancelled = True
        if load not in self._waiting:  # else nothing of it has begun
            with suppress(ServiceUnavailable):  # closed: then it ends anyway
                self._link.start(partial(_cancel_begun, load))

    def start_stores(self, orders: StepOrders) -> None:
        """Begin them after this step's work, and hold the blocks of requests that the engine gave up to us."""
        self._layer_loads.finish()  # what was computed from blocks that did not come must not be stored
        self._work.new_step()
        for order in orders.stores:
            self._stores.start(order, self._spoiled_blocks)
        self._stores.begin_waiting()
        self._stores.hold(orders.release)

    def take_received(self) -> set[str]:
        """Requests whose loads have ended: nothing touches their blocks any more. May wait a moment for one, see
        `idle_wait`."""
        if self._idle_wait and self._loads and not self._done and not self._engine_computes:
            self._ended.wait(_IDLE_WAIT_S)
        self._ended.clear()
        self._run_done()
        received, self._received = self._received, set()
        return received

    def take_arrived(self) -> tuple[LoadEnd, ...]:
        """For a scheduler in the same process: loads that have come in whole. Once it has asked, later ones are named
        neither by `take_received` nor by `take_ends`. One that failed always is, together with its blocks."""
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
        prompt, blocks = prompt_of(order, self._settings.chunk_tokens), block_table(order, self._split)
        return await pool.start_load(prompt, blocks, **self._span(order), wait_event=point.event)

    def _layer_load_ended(self, order: LoadOrder, duration_s: float, result: LoadResult | Exception) -> None:
        self._end_load(self._loads.get(order.request_id) or _Load(order, self._now_s()), duration_s, result)

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
                prompt, blocks = prompt_of(order, self._settings.chunk_tokens), block_table(order, self._split)
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
                self._work.give_back(point)
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
        end_chunk = result.end_chunk
        if self._loads.get(order.request_id) is load:
            del self._loads[order.request_id]
        failed_blocks: set[int] = set()
        if result.error is not None or end_chunk < order.end_chunk:
            failed_blocks = order.failed_blocks(end_chunk, self._settings.chunk_tokens, self._block_tokens)
        self._failed_blocks |= failed_blocks
        end = LoadEnd(
            request_id=order.request_id,
            result=result,
            duration_s=duration_s,
            size_bytes=(end_chunk - order.first_chunk) * self._chunk_bytes,
            cancelled=load.cancelled,
        )
        if self._settings.layerwise:
            self._spoiled_blocks |= failed_blocks  # this step computes from them
            self._ends.append(end)
        elif self._scheduler_asks and not failed_blocks:
            self._arrived.append(end)
        else:
            self._ends.append(end)
            self._received.add(order.request_id)


async def _cancel_begun(load: _Load) -> None:
    if load.handle is not None:
        load.handle.cancel()
