"""One worker's side: loads and stores between the engine's blocks and the pool, none of which the engine waits for.

Orders come and ends are fetched on the engine's thread; what runs in between runs on the pool's loop.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.client.hashing import Chain
from kvpool.client.pool import KvPool
from kvpool.client.pool_values import LoadReport, LoadTicket, StoreReport
from kvpool.connectors.vllm.layer_loads import LayerLoads
from kvpool.connectors.vllm.link import PoolLink, unreachable
from kvpool.connectors.vllm.orders import LoadEnd, LoadOrder, StepOrders, StoreEnd, StoreOrder
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.core.errors import KvPoolError, Overloaded
from kvpool.core.ipc import EngineEvent

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name


@dataclass(slots=True, kw_only=True)
class _Load:
    order: LoadOrder
    started_s: float


@dataclass(slots=True, kw_only=True)
class _Store:
    order: StoreOrder
    started_s: float
    size_bytes: int
    kept: bool = True  # whether the blocks have held their bytes until now
    released: bool = False
    ended_s: float = 0.0


@dataclass(slots=True)
class _Request:
    """What still touches blocks of a request. held: the engine keeps its blocks until it is told that nothing does."""

    stores: list[_Store] = field(default_factory=list)
    held_since_s: float | None = None


class WorkerSide:
    """All methods on the engine's thread; none blocks, none raises for trouble of the cache."""

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
        self._block_tokens, self._chunk_bytes, self._load_only = block_tokens, chunk_bytes, load_only
        self._split, self._record, self._now_s = split, record, now_s
        self._done: deque[Callable[[], None]] = deque()  # appended on the loop, run here
        self._requests: dict[str, _Request] = {}
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._ends: list[LoadEnd | StoreEnd] = []
        self._store_bytes = 0  # in flight
        self._layer_loads = LayerLoads(link, self._layer_load_ended)

    def before_step(self, orders: StepOrders) -> None:
        """Blocks of preempted requests may be written from now on."""
        for request_id in orders.preempted:
            for store in self._requests.get(request_id, _Request()).stores:
                store.kept = False

    def start_loads(self, orders: StepOrders) -> None:
        """Begin them; each ends in `take_received`, whatever happens to it."""
        for order in orders.loads:
            load = _Load(order=order, started_s=self._now_s())
            pool = self._link.pool
            try:
                if pool is None:
                    raise unreachable()
                if self._settings.layerwise:
                    self._layer_loads.begin(order, partial(self._begin_layers, pool, order, self._record()))
                    continue
                future = self._link.start(partial(self._load, pool, order, self._record()))
                future.add_done_callback(partial(self._loaded_soon, load))
            except KvPoolError as error:
                self._end_load(load, None, str(error))

    def start_stores(self, orders: StepOrders) -> None:
        """Begin them after this step's work, and hold the blocks of requests that the engine gave up to us."""
        for order in orders.stores:
            if self._load_only:  # another rank has the same heads and stores them
                self._ends.append(_nothing_to_store(order))
            else:
                self._start_store(order)
        for request_id in orders.release:
            self._requests.setdefault(request_id, _Request()).held_since_s = self._now_s()

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
        released: set[str] = set()
        for request_id, request in list(self._requests.items()):
            if request.held_since_s is not None:
                if self._now_s() - request.held_since_s > self._settings.store_hold_max_s:
                    for store in request.stores:
                        store.kept = False  # the agent only reads them, and throws away what it has read
                    request.stores.clear()
                if all(store.released for store in request.stores):
                    released.add(request_id)
                    del self._requests[request_id]
            elif not request.stores:
                del self._requests[request_id]
        return released

    def take_ends(self) -> tuple[LoadEnd | StoreEnd, ...]:
        """How loads and stores ended since the last call."""
        self._run_done()
        ends, self._ends = tuple(self._ends), []
        return ends

    def _run_done(self) -> None:
        while self._done:
            self._done.popleft()()

    def _begin_layers(self, pool: KvPool, order: LoadOrder, after: EngineEvent | None) -> LoadTicket:
        return pool.begin_load(self._chain(order), _block_table(order, self._split), **self._span(order), after=after)

    def _layer_load_ended(self, order: LoadOrder, report: LoadReport | None, failure: str) -> None:
        self._end_load(_Load(order=order, started_s=self._now_s()), report, failure)

    def _span(self, order: LoadOrder) -> dict[str, Any]:
        return {
            "first_chunk": order.first_chunk,
            "end_chunk": order.end_chunk,
            "skip_tokens": order.first_token - order.first_chunk * self._settings.chunk_tokens,
            "timeout_s": order.timeout_s,
        }

    async def _load(self, pool: KvPool, order: LoadOrder, after: EngineEvent | None) -> LoadReport:
        report = await pool.load(self._chain(order), _block_table(order, self._split), **self._span(order), after=after)
        # The engine computes in these very blocks what did not come: not before the agent has stopped to write there.
        await report.hold.wait()
        return report

    def _loaded_soon(self, load: _Load, future: Future[LoadReport]) -> None:
        def end() -> None:
            try:
                report = future.result()
            except BaseException as error:
                _log.warning("kvpool: a load ended unexpectedly: %r", error)
                self._end_load(load, None, repr(error))
            else:
                self._end_load(load, report, str(report.error) if report.error is not None else "")

        self._done.append(end)

    def _end_load(self, load: _Load, report: LoadReport | None, failure: str) -> None:
        order = load.order
        end_chunk = report.end_chunk if report is not None else order.first_chunk
        if end_chunk < order.end_chunk:
            self._failed_blocks |= order.failed_blocks(end_chunk, self._settings.chunk_tokens, self._block_tokens)
        if not self._settings.layerwise:
            self._received.add(order.request_id)
        tokens = report.tokens if report is not None else None
        self._ends.append(
            LoadEnd(
                request_id=order.request_id,
                chunk_count=end_chunk - order.first_chunk,
                failed_chunks=order.end_chunk - end_chunk,
                duration_s=self._now_s() - load.started_s,
                size_bytes=(end_chunk - order.first_chunk) * self._chunk_bytes,
                staging_tokens=tokens.staging if tokens is not None else 0,
                disk_tokens=tokens.disk if tokens is not None else 0,
                remote_tokens=tokens.remote if tokens is not None else 0,
                failure=failure,
            )
        )

    def _start_store(self, order: StoreOrder) -> None:
        size_bytes = (order.end_chunk - order.first_chunk) * self._chunk_bytes
        store = _Store(order=order, started_s=self._now_s(), size_bytes=size_bytes)
        pool = self._link.pool
        try:
            if pool is None:
                raise unreachable()
            if self._store_bytes + size_bytes > self._settings.store_bytes_in_flight_max:
                raise Overloaded("too many bytes are being stored")
            future = self._link.start(partial(self._store, pool, store, self._record()))
        except KvPoolError as error:
            self._end_store(store, None, str(error))
            return
        self._store_bytes += size_bytes
        self._requests.setdefault(order.request_id, _Request()).stores.append(store)
        future.add_done_callback(partial(self._stored_soon, store))

    async def _store(self, pool: KvPool, store: _Store, after: EngineEvent | None) -> StoreReport:
        order = store.order
        ticket = await pool.store(
            self._chain(order),
            _block_table(order, self._split),
            first_chunk=order.first_chunk,
            end_chunk=order.end_chunk,
            kept=lambda: store.kept,
            after=after,
        )
        await ticket.wait_reusable()
        store.released = True
        return await ticket.report(self._settings.store_hold_max_s)

    def _stored_soon(self, store: _Store, future: Future[StoreReport]) -> None:
        store.ended_s = self._now_s()  # an idle engine hears of it with its next request

        def end() -> None:
            self._store_bytes -= store.size_bytes
            request = self._requests.get(store.order.request_id)
            if request is not None and store in request.stores:
                request.stores.remove(store)
            try:
                report = future.result()
            except BaseException as error:
                self._end_store(store, None, repr(error))
            else:
                self._end_store(store, report, "; ".join({str(error) for error in report.failed_chunks.values()}))

        self._done.append(end)

    def _end_store(self, store: _Store, report: StoreReport | None, failure: str) -> None:
        count = store.order.end_chunk - store.order.first_chunk
        stored = report.stored_chunks if report is not None else 0
        self._ends.append(
            StoreEnd(
                request_id=store.order.request_id,
                first_chunk=store.order.first_chunk,
                end_chunk=store.order.end_chunk,
                stored_chunks=stored,
                deduplicated_chunks=report.deduplicated_chunks if report is not None else 0,
                failed_chunks=len(report.failed_chunks) if report is not None else count,
                duration_s=max(0.0, store.ended_s - store.started_s),
                size_bytes=stored * self._chunk_bytes,
                failure=failure,
            )
        )

    def _chain(self, order: LoadOrder | StoreOrder) -> Chain:
        return Chain(self._settings.chunk_tokens, order.token_count, order.hashes)


def _nothing_to_store(order: StoreOrder) -> StoreEnd:
    return StoreEnd(
        request_id=order.request_id,
        first_chunk=order.first_chunk,
        end_chunk=order.end_chunk,
        stored_chunks=0,
        deduplicated_chunks=0,
        failed_chunks=0,
        duration_s=0.0,
        size_bytes=0,
    )


def _block_table(order: LoadOrder | StoreOrder, split: int) -> npt.NDArray[np.int64]:
    blocks = np.array(order.block_ids, dtype=np.int64)
    return blocks if split == 1 else (blocks[:, None] * split + np.arange(split)).reshape(-1)
