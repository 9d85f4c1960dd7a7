"""One worker's stores: queued, begun, their blocks held, their ends reported."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvpool.client.engine_items import StoreResult
from kvpool.client.pool import AsyncPool
from kvpool.connectors.vllm.concurrency_limiter import ConcurrencyLimiter
from kvpool.connectors.vllm.engine_work import EngineWork, WorkPoint
from kvpool.connectors.vllm.link import PoolLink, unreachable
from kvpool.connectors.vllm.orders import StoreEnd, StoreOrder, block_table, prompt_of
from kvpool.connectors.vllm.settings import VllmSettings

_STORES_MAX = 16  # at once: an agent takes 64 loads and stores of a session


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """One of vLLM's KV cache groups on one rank.

    chunk_bytes: of this rank. work: of the session of this group. split: blocks of the tensors in one of vLLM's.
    """

    block_tokens: int
    chunk_bytes: int
    work: EngineWork
    split: int = 1


@dataclass(slots=True, kw_only=True)
class _Store:
    order: StoreOrder
    started_s: float
    kept: bool = True  # whether the blocks have held their bytes until now
    released: bool = False
    ended_s: float = 0.0


@dataclass(slots=True)
class _Request:
    """What still reads blocks of a request. held_since_s: since when a finished request's blocks are kept from the
    engine; None while it runs."""

    stores: list[_Store] = field(default_factory=list)
    held_since_s: float | None = None


@dataclass(slots=True)
class _Outcome:
    """Of one store, all windows together."""

    stored: int = 0
    deduplicated: int = 0
    failed: int = 0
    skipped: int = 0
    failures: set[str] = field(default_factory=set)


class WorkerStores:
    """All methods on the engine's thread, but for what is marked; none blocks, none raises for trouble of the cache.

    What is more than may be in flight waits, in order, window by window. Meanwhile the blocks are the request's or,
    when it has finished, the engine keeps them for a while.
    """

    def __init__(
        self,
        settings: VllmSettings,
        link: PoolLink,
        groups: Sequence[WorkerGroup],
        *,
        load_only: bool,
        later: Callable[[Callable[[], None]], None],
        on_ended: Callable[[StoreEnd], None],
        now_s: Callable[[], float],
    ) -> None:
        """later: has something run on the engine's thread soon. Otherwise as WorkerSide."""
        self._settings, self._link, self._groups, self._load_only = settings, link, groups, load_only
        self._later, self._on_ended, self._now_s = later, on_ended, now_s
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[_Store] = deque()  # for an event
        self._futures: set[Future[_Outcome]] = set()  # of those that have begun and not ended
        self._limiter = ConcurrencyLimiter(count=_STORES_MAX, size_bytes=settings.store_bytes_in_flight_max)

    def start(self, order: StoreOrder, spoiled_blocks: Set[int]) -> None:
        """Store after this step's work. spoiled_blocks: what was computed in this step from them is wrong."""
        store = _Store(order=order, started_s=self._now_s())
        chunks = order.end_chunk - order.first_chunk
        if self._load_only:  # another rank stores the same heads
            self._end(store, _Outcome())
        elif not self._link.pools:
            self._end(store, _Outcome(failed=chunks, failures={str(unreachable())}))
        elif spoiled_blocks and not spoiled_blocks.isdisjoint(order.block_ids.tolist()):
            self._end(store, _Outcome(failed=chunks, failures={"they were computed from blocks whose load has failed"}))
        else:
            self._requests.setdefault(order.request_id, _Request()).stores.append(store)
            self._waiting.append(store)

    def begin_waiting(self) -> None:
        """Begin what was ordered, as far as there are events for it."""
        while self._waiting:
            store = self._waiting[0]
            try:
                point = self._work_of(store).point() if store.kept else WorkPoint()
            except Exception as error:
                self._waiting.popleft()
                self._fail(store, error)
                continue
            if point is None:
                return
            self._waiting.popleft()
            try:
                future = self._link.start(partial(self._store, store, point), store.order.trace)
            except Exception as error:
                self._work_of(store).give_back(point)
                self._fail(store, error)
            else:
                self._futures.add(future)
                future.add_done_callback(partial(self._ended_soon, store))

    def finish(self, timeout_s: float) -> None:
        """Wait so long for the stores that have begun: the engine goes, and its memory with it."""
        concurrent.futures.wait(list(self._futures), timeout_s)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Their blocks may be written from now on: what was not read of them is not stored."""
        for request_id in request_ids:
            for store in self._requests.get(request_id, _Request()).stores:
                store.kept = False

    def overwritten(self, numbers: Collection[int], *, all_stores: bool = False) -> None:
        """Stores of whose blocks some may be written from now on: what was not read of them is not stored."""
        if numbers or all_stores:
            for request in self._requests.values():
                for store in request.stores:
                    store.kept &= not (all_stores or store.order.number in numbers)

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

    async def _store(self, store: _Store, point: WorkPoint) -> _Outcome:
        """On the pool's loop. All windows queue up at once, in order: they end in whatever order they like."""
        order, outcome, pools = store.order, _Outcome(), self._link.pools
        group, work = self._groups[order.group], self._work_of(store)
        try:
            if not pools:
                raise unreachable()
            pool = pools[order.group]
            prompt, blocks = prompt_of(order, self._settings.chunk_tokens), block_table(order, group.split)
            limit = self._window_chunks(pool, group.chunk_bytes)
            starts = range(order.first_chunk, order.end_chunk, limit)
            left = len(starts)

            async def window(chunks: range) -> None:
                nonlocal left
                async with self._limiter.acquire(len(chunks) * group.chunk_bytes):
                    if not store.kept:
                        outcome.skipped += len(chunks)
                        return
                    handle = await pool.store(
                        prompt,
                        blocks,
                        first_chunk=chunks.start,
                        end_chunk=chunks.stop,
                        retention=order.retention,
                        still_valid=lambda: store.kept,
                        wait_event=work.share(point).event,
                    )
                    await handle.wait_released()
                    left -= 1
                    store.released = not left
                    _add(outcome, await handle.result(self._settings.store_hold_max_s))

            windows = [range(start, min(start + limit, order.end_chunk)) for start in starts]
            ends = await asyncio.gather(*map(window, windows), return_exceptions=True)
            for chunks, end in zip(windows, ends, strict=True):
                if end is not None:
                    outcome.failed += len(chunks)
                    outcome.failures.add(str(end) or repr(end))
            return outcome
        finally:
            work.give_back(point)

    def _work_of(self, store: _Store) -> EngineWork:
        return self._groups[store.order.group].work

    def _window_chunks(self, pool: AsyncPool, chunk_bytes: int) -> int:
        """Of one request: small enough that one is copied while the next is prepared."""
        fitting = self._settings.store_bytes_in_flight_max // 2 // max(1, chunk_bytes)
        return max(1, min(fitting, pool.session.max_request_chunks or fitting))

    def _ended_soon(self, store: _Store, future: Future[_Outcome]) -> None:
        """On the pool's loop."""
        self._futures.discard(future)
        store.ended_s = self._now_s()  # an idle engine hears of it with its next request
        self._later(partial(self._ended, store, future))

    def _ended(self, store: _Store, future: Future[_Outcome]) -> None:
        try:
            outcome = future.result()
        except BaseException as error:
            self._fail(store, error)
        else:
            self._forget(store)
            self._end(store, outcome)

    def _fail(self, store: _Store, error: BaseException) -> None:
        self._forget(store)
        chunks = store.order.end_chunk - store.order.first_chunk
        self._end(store, _Outcome(failed=chunks, failures={str(error) or repr(error)}))

    def _forget(self, store: _Store) -> None:
        request = self._requests.get(store.order.request_id)
        if request is not None and store in request.stores:
            request.stores.remove(store)

    def _end(self, store: _Store, outcome: _Outcome) -> None:
        self._on_ended(
            StoreEnd(
                number=store.order.number,
                stored_chunks=outcome.stored,
                deduplicated_chunks=outcome.deduplicated,
                failed_chunks=outcome.failed,
                skipped_chunks=outcome.skipped,
                duration_s=max(0.0, store.ended_s - store.started_s),
                size_bytes=outcome.stored * self._groups[store.order.group].chunk_bytes,
                failure="; ".join(sorted(outcome.failures)),
            )
        )


def _add(outcome: _Outcome, result: StoreResult) -> None:
    outcome.stored += result.stored_chunks
    outcome.deduplicated += result.deduplicated_chunks
    outcome.failed += len(result.failed_chunks)
    outcome.failures |= {str(error) for error in result.failed_chunks.values()}
