"""One worker's side: loads and stores between the engine's blocks and the pool, none of which the engine waits for.

Orders come and ends are fetched on the engine's thread; what runs in between runs on the pool's loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from kvpool.client.pool import KvPool
from kvpool.client.pool_values import LoadReport, LoadStop, LoadTicket
from kvpool.connectors.vllm.layer_loads import LayerLoads
from kvpool.connectors.vllm.link import PoolLink, unreachable
from kvpool.connectors.vllm.orders import LoadEnd, LoadOrder, StepOrders, StoreEnd
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.worker_stores import WorkerStores
from kvpool.connectors.vllm.worker_tables import block_table, chain_of
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, PageCorrupt, PageMissing, ServiceUnavailable
from kvpool.core.ipc import EngineEvent


class WorkerSide:
    """All methods on the engine's thread; none blocks, none raises for trouble of the cache. Each load ends in
    `take_received` and each held request in `take_released`, whatever happens: the engine waits for that."""

    def __init__(
        self,
        settings: VllmSettings,
        link: PoolLink,
        *,
        block_tokens: int,
        chunk_bytes: int,
        load_only: bool,
        split: int = 1,
        record: Callable[[], EngineEvent | None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """chunk_bytes: of this rank. split: blocks of the tensors in one of vLLM's. record: see CacheMemory."""
        self._settings, self._link = settings, link
        self._block_tokens, self._chunk_bytes = block_tokens, chunk_bytes
        self._split, self._record, self._now_s = split, record, now_s
        self._done: deque[Callable[[], None]] = deque()  # appended on the loop, run here
        self._stops: dict[str, LoadStop] = {}  # of running loads, by request
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._spoiled_blocks: set[int] = set()  # that the running step has read though their load failed
        self._ends: list[LoadEnd | StoreEnd] = []
        self._layer_loads = LayerLoads(link, self._layer_load_ended, now_s)
        self._stores = WorkerStores(
            settings,
            link,
            chunk_bytes=chunk_bytes,
            load_only=load_only,
            split=split,
            record=record,
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
        """Begin them, and end early what nobody needs; each ends in `take_received`, whatever happens to it."""
        self._spoiled_blocks = set()
        for order in orders.loads:
            started_s = self._now_s()
            try:
                if not order.hashes:
                    raise InvalidRequest("nothing is known of this load")
                pool = self._link.pool
                if pool is None:
                    raise unreachable()
                if self._settings.layerwise:
                    self._layer_loads.begin(order, partial(self._begin_layers, pool, order, self._record()))
                    continue
                stop = self._stops[order.request_id] = LoadStop()
                future = self._link.start(partial(self._load, pool, order, self._record(), stop), order.trace)
                future.add_done_callback(partial(self._loaded_soon, order, started_s))
            except Exception as error:
                self._end_load(order, self._now_s() - started_s, None, str(error) or repr(error))
        for stop in (self._stops[request_id] for request_id in orders.cancel if request_id in self._stops):
            with suppress(ServiceUnavailable):  # closed: then it ends anyway
                self._link.start(partial(_ask, stop))

    def start_stores(self, orders: StepOrders) -> None:
        """Begin them after this step's work, and hold the blocks of requests that the engine gave up to us."""
        self._layer_loads.finish()  # whoever computed from blocks that did not come must not store that
        for order in orders.stores:
            self._stores.start(order, self._spoiled_blocks)
        self._stores.hold(orders.release)

    def take_received(self) -> set[str]:
        """Requests whose loads have ended: nothing touches their blocks any more."""
        self._run_done()
        received, self._received = self._received, set()
        return received

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

    def _begin_layers(self, pool: KvPool, order: LoadOrder, after: EngineEvent | None) -> LoadTicket:
        chain, blocks = chain_of(order, self._settings.chunk_tokens), block_table(order, self._split)
        pool.session.compute_us_per_token = order.compute_us_per_token
        return pool.begin_load(chain, blocks, **self._span(order), after=after)

    def _layer_load_ended(self, order: LoadOrder, duration_s: float, report: LoadReport | None, failure: str) -> None:
        self._spoiled_blocks |= self._end_load(order, duration_s, report, failure)

    def _span(self, order: LoadOrder) -> dict[str, Any]:
        return {
            "first_chunk": order.first_chunk,
            "end_chunk": order.end_chunk,
            "skip_tokens": order.first_token - order.first_chunk * self._settings.chunk_tokens,
            "timeout_s": order.timeout_s,
        }

    async def _load(self, pool: KvPool, order: LoadOrder, after: EngineEvent | None, stop: LoadStop) -> LoadReport:
        chain, blocks = chain_of(order, self._settings.chunk_tokens), block_table(order, self._split)
        pool.session.compute_us_per_token = order.compute_us_per_token
        report = await pool.load(chain, blocks, **self._span(order), after=after, stop=stop)
        # The engine computes in these very blocks what did not come: not before the agent has stopped to write there.
        await report.hold.wait()
        return report

    def _loaded_soon(self, order: LoadOrder, started_s: float, future: Future[LoadReport]) -> None:
        self._done.append(partial(self._loaded, order, self._now_s() - started_s, future))

    def _loaded(self, order: LoadOrder, duration_s: float, future: Future[LoadReport]) -> None:
        try:
            report = future.result()
        except BaseException as error:
            self._end_load(order, duration_s, None, f"it ended unexpectedly: {error!r}")
        else:
            self._end_load(order, duration_s, report, str(report.error) if report.error is not None else "")

    def _end_load(self, order: LoadOrder, duration_s: float, report: LoadReport | None, failure: str) -> set[int]:
        """The blocks that did not come."""
        end_chunk = report.end_chunk if report is not None else order.first_chunk
        stop = self._stops.pop(order.request_id, None)
        failed_blocks: set[int] = set()
        if report is None or end_chunk < order.end_chunk:
            failed_blocks = order.failed_blocks(end_chunk, self._settings.chunk_tokens, self._block_tokens)
        self._failed_blocks |= failed_blocks
        if not self._settings.layerwise:
            self._received.add(order.request_id)
        tokens = report.tokens if report is not None else None
        self._ends.append(
            LoadEnd(
                request_id=order.request_id,
                chunk_count=end_chunk - order.first_chunk,
                failed_chunks=order.end_chunk - end_chunk,
                duration_s=duration_s,
                size_bytes=(end_chunk - order.first_chunk) * self._chunk_bytes,
                staging_tokens=tokens.staging if tokens is not None else 0,
                disk_tokens=tokens.disk if tokens is not None else 0,
                remote_tokens=tokens.remote if tokens is not None else 0,
                cancelled=stop is not None and stop.asked,
                late=report is not None and isinstance(report.error, DeadlineExceeded),
                gone=report is not None and isinstance(report.error, (PageCorrupt, PageMissing)),
                failure=failure,
            )
        )
        return failed_blocks


async def _ask(stop: LoadStop) -> None:
    stop.ask()
