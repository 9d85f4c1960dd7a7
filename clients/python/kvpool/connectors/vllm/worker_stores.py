"""One worker's stores: begun, their blocks held, their ends told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvpool.client.pool import KvPool
from kvpool.client.pool_values import StoreReport
from kvpool.connectors.vllm.link import PoolLink, unreachable
from kvpool.connectors.vllm.orders import StoreEnd, StoreOrder
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.worker_tables import block_table, chain_of
from kvpool.core.errors import Overloaded, ServiceUnavailable
from kvpool.core.ipc import EngineEvent


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
    """What still reads blocks of a request. held: the engine keeps its blocks until it is told that nothing does."""

    stores: list[_Store] = field(default_factory=list)
    held_since_s: float | None = None


class WorkerStores:
    """All methods on the engine's thread, but for what is marked; none blocks, none raises for trouble of the cache."""

    def __init__(
        self,
        settings: VllmSettings,
        link: PoolLink,
        *,
        chunk_bytes: int,
        load_only: bool,
        split: int,
        record: Callable[[], EngineEvent | None],
        later: Callable[[Callable[[], None]], None],
        on_ended: Callable[[StoreEnd], None],
        now_s: Callable[[], float],
    ) -> None:
        """later: has something run on the engine's thread soon. Otherwise as WorkerSide."""
        self._settings, self._link = settings, link
        self._chunk_bytes, self._load_only, self._split, self._record = chunk_bytes, load_only, split, record
        self._later, self._on_ended, self._now_s = later, on_ended, now_s
        self._requests: dict[str, _Request] = {}
        self._bytes = 0  # in flight

    def start(self, order: StoreOrder, spoiled_blocks: Set[int]) -> None:
        """Begin one after this step's work. spoiled_blocks: what was computed in this step from them is wrong."""
        chunks = 0 if self._load_only else order.end_chunk - order.first_chunk  # another rank stores the same heads
        store = _Store(order=order, started_s=self._now_s(), size_bytes=chunks * self._chunk_bytes)
        if not chunks:
            self._end(store, StoreReport(0, 0, {}), "")
            return
        try:
            future = self._begin(store, spoiled_blocks)
        except Exception as error:
            self._end(store, None, str(error) or repr(error))
            return
        self._bytes += store.size_bytes
        self._requests.setdefault(order.request_id, _Request()).stores.append(store)
        future.add_done_callback(partial(self._ended_soon, store))

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Their blocks may be written from now on."""
        for request_id in request_ids:
            for store in self._requests.get(request_id, _Request()).stores:
                store.kept = False

    def hold(self, request_ids: Iterable[str]) -> None:
        """Requests that have finished; the engine holds their blocks until `take_released` names them."""
        for request_id in request_ids:
            self._requests.setdefault(request_id, _Request()).held_since_s = self._now_s()

    def take_released(self) -> set[str]:
        """Held requests whose blocks nothing reads any more."""
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

    def _begin(self, store: _Store, spoiled_blocks: Set[int]) -> Future[StoreReport]:
        pool = self._link.pool
        if pool is None:
            raise unreachable()
        if self._bytes + store.size_bytes > self._settings.store_bytes_in_flight_max:
            raise Overloaded("too many bytes are being stored")
        if not spoiled_blocks.isdisjoint(store.order.block_ids):
            raise ServiceUnavailable("they were computed from blocks whose load has failed")
        return self._link.start(partial(self._store, pool, store, self._record()), store.order.trace)

    async def _store(self, pool: KvPool, store: _Store, after: EngineEvent | None) -> StoreReport:
        """On the pool's loop."""
        order = store.order
        ticket = await pool.store(
            chain_of(order, self._settings.chunk_tokens),
            block_table(order, self._split),
            first_chunk=order.first_chunk,
            end_chunk=order.end_chunk,
            kept=lambda: store.kept,
            after=after,
        )
        await ticket.wait_reusable()
        store.released = True
        return await ticket.report(self._settings.store_hold_max_s)

    def _ended_soon(self, store: _Store, future: Future[StoreReport]) -> None:
        """On the pool's loop."""
        store.ended_s = self._now_s()  # an idle engine hears of it with its next request
        self._later(partial(self._ended, store, future))

    def _ended(self, store: _Store, future: Future[StoreReport]) -> None:
        self._bytes -= store.size_bytes
        request = self._requests.get(store.order.request_id)
        if request is not None and store in request.stores:
            request.stores.remove(store)
        try:
            report = future.result()
        except BaseException as error:
            self._end(store, None, repr(error))
        else:
            self._end(store, report, "; ".join({str(error) for error in report.failed_chunks.values()}))

    def _end(self, store: _Store, report: StoreReport | None, failure: str) -> None:
        chunks = store.order.end_chunk - store.order.first_chunk
        stored = report.stored_chunks if report is not None else 0
        self._on_ended(
            StoreEnd(
                number=store.order.number,
                stored_chunks=stored,
                deduplicated_chunks=report.deduplicated_chunks if report is not None else 0,
                failed_chunks=len(report.failed_chunks) if report is not None else chunks,
                duration_s=max(0.0, store.ended_s - store.started_s),
                size_bytes=stored * self._chunk_bytes,
                failure=failure,
            )
        )
