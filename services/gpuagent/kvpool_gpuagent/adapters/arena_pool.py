"""Pages through the local pagestore's arena: slots under leases of one session, mapped by this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from kvpool.client.acquisition import Acquisition
from kvpool.client.config import ClientConfig
from kvpool.client.page_items import AcquireItem, AcquireResult, ReserveItem, ReserveResult
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.segments import MapHook
from kvpool.core.errors import DeadlineExceeded, KvPoolError, LeaseLost, Overloaded, ServiceUnavailable
from kvpool_gpuagent.adapters.budget import Budget
from kvpool_gpuagent.ports import PageWish, ReadSlot, WriteSlot

_log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.5
RESERVE_WAIT_S = 5.0  # for other stores of the same engine to end
CONNECT_WAIT_S = 1.0
_FIRST_WINDOW_PAGES = 64  # until a pagestore has named its own


@dataclass(frozen=True, slots=True)
class _Lease:
    session: PageStoreSession
    lease_id: int


class ArenaPool:
    """See ports.PagePool. Opens its session when first needed, and again after a break.

    A new session is opened only when every slot of the broken one was handed back: by then no copy touches the old
    arena, which is what `drained` tells the pagestore (invariant 3).
    """

    kind = "arena"

    def __init__(
        self, plan: SessionPlan, config: ClientConfig, *, on_map: MapHook | None = None, reserve_wait_s: float = 0.0
    ) -> None:
        self._plan, self._config, self._on_map = plan, config, on_map
        self._reserve_wait_s = reserve_wait_s or RESERVE_WAIT_S
        self._session: PageStoreSession | None = None
        self._opening = asyncio.Lock()
        self._reads, self._writes = Budget(_FIRST_WINDOW_PAGES), Budget(_FIRST_WINDOW_PAGES)
        self._settling: set[asyncio.Future[None]] = set()
        self._failed_s = float("-inf")
        self._out_of_reach = False
        self._closed = False
        self.local_node_id = b""

    @property
    def window_pages(self) -> int:
        """See ports.PagePool."""
        return self._reads.capacity

    @property
    def slots_out(self) -> int:
        """Slots that were granted and not given back, and those asked for."""
        return self._reads.used + self._writes.used

    async def connect(self) -> None:
        """See ports.PagePool. An engine is not kept waiting for a pagestore that hangs."""
        try:
            async with asyncio.timeout(CONNECT_WAIT_S):
                await self._live()
        except KvPoolError:
            pass  # it was told, and the next request tries again
        except TimeoutError:
            self._told_out_of_reach(f"no answer within {CONNECT_WAIT_S:g} s")

    async def reserve(
        self, wishes: Sequence[PageWish], sizes_bytes: Sequence[int]
    ) -> Sequence[WriteSlot | int | KvPoolError]:
        """See ports.PagePool. Raises Overloaded when other stores keep the session's leases for too long."""
        items = [ReserveItem(wish.key, size, wish.metadata) for wish, size in zip(wishes, sizes_bytes, strict=True)]
        session = await self._live()
        try:
            async with asyncio.timeout(self._reserve_wait_s):
                await self._writes.take(len(items))
        except TimeoutError:
            raise Overloaded("other stores of this engine hold all leases of its pagestore session") from None
        granted = 0
        try:
            # What was granted before a cancellation or a failure is given back by the session.
            results = await session.reserve(items)
            answers = [_write_answer(session, wish, result) for wish, result in zip(wishes, results, strict=True)]
            granted = sum(isinstance(answer, WriteSlot) for answer in answers)
        finally:
            self._writes.give(len(items) - granted)
        return answers

    async def commit(self, slots: Sequence[WriteSlot]) -> Sequence[KvPoolError | None]:
        """See ports.PagePool."""
        if not slots:
            return []
        leases = _leases_of(slots)
        try:
            session = self._current(leases)
            errors = dict(await session.commit([lease.lease_id for lease in leases]))
            return [errors.get(index) for index in range(len(leases))]
        except KvPoolError as error:
            # Whether the pages became visible is not known; they are sealed and true, so both are fine.
            return [error] * len(slots)
        finally:
            self._writes.give(len(slots))

    async def abort(self, slots: Sequence[WriteSlot]) -> None:
        """See ports.PagePool."""
        for session, lease_ids in _by_session(slots):
            session.abort_soon(lease_ids)
        self._writes.give(len(slots))

    async def acquire(
        self, wishes: Sequence[PageWish], wait_s: float
    ) -> AsyncGenerator[tuple[int, ReadSlot | KvPoolError | None], None]:
        """See ports.PagePool."""
        ends_at_s = asyncio.get_running_loop().time() + wait_s
        session = await self._live()
        try:
            async with asyncio.timeout_at(ends_at_s):
                await self._reads.take(len(wishes))
        except TimeoutError:
            raise DeadlineExceeded("other loads of this engine held all leases of its pagestore session") from None
        unsettled = len(wishes)
        # Metadata is for what is pulled from elsewhere: most pages are here.
        items = [AcquireItem(wish.key, wish.sources, wish.metadata if wish.sources else None) for wish in wishes]
        acquisition = session.acquire(items, wait_s=max(1e-3, ends_at_s - asyncio.get_running_loop().time()))
        try:
            async with acquisition as answers:
                async for result in answers:
                    unsettled -= 1
                    answer = _read_answer(session, wishes[result.item_index], result)
                    if not isinstance(answer, ReadSlot):
                        self._reads.give(1)
                    yield result.item_index, answer
        finally:
            self._give_when_settled(acquisition, unsettled)

    def _give_when_settled(self, acquisition: Acquisition, count: int) -> None:
        """Pages that a load no longer waits for stay in the session's window until the pagestore has settled them."""
        if not count:
            return
        task = asyncio.ensure_future(acquisition.wait_settled())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        task.add_done_callback(lambda _: self._reads.give(count))

    async def release(self, slots: Sequence[ReadSlot], corrupt: Sequence[ReadSlot] = ()) -> None:
        """See ports.PagePool."""
        try:
            for session, lease_ids in _by_session(slots):
                session.release_soon(lease_ids)
            for session, lease_ids in _by_session(corrupt):
                await session.release([], corrupt_lease_ids=lease_ids)
        except KvPoolError as error:
            # The session broke: its leases end by the owner's rules once our copies are over, and they are.
            _log.warning("corrupt pages could not be reported to the pagestore: %s", error)
        finally:
            self._reads.give(len(slots) + len(corrupt))

    async def close(self) -> None:
        """See ports.PagePool."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None and not await session.close():
            _log.warning("the pagestore session did not end normally; its slots come back when this process lets go")

    async def _live(self) -> PageStoreSession:
        async with self._opening:
            session, loop = self._session, asyncio.get_running_loop()
            if self._closed:
                raise ServiceUnavailable("the engine session is closing")
            if session is not None and not session.broken.is_set():
                return session
            if loop.time() - self._failed_s < RETRY_INTERVAL_S:
                raise ServiceUnavailable(f"the pagestore at {self._plan.endpoint} did not answer a moment ago")
            if session is not None and self.slots_out:
                raise ServiceUnavailable("the pagestore session broke and its last copies still run")
            try:
                if session is None:
                    session = await PageStoreSession.open(self._plan, self._config, on_map=self._on_map)
                else:
                    session = await session.reopen(drained=True)
            except KvPoolError as error:
                self._failed_s = loop.time()
                self._told_out_of_reach(error)
                raise
            if self._out_of_reach:
                _log.warning("the local pagestore is back")
                self._out_of_reach = False
            self._session = session
            self.local_node_id = session.node_id
            for budget in (self._reads, self._writes):
                budget.resize(max(2, session.max_leases))
            return session

    def _told_out_of_reach(self, why: object) -> None:
        """Once an outage: every request of the engine fails on it meanwhile."""
        if not self._out_of_reach:
            _log.warning("the local pagestore is out of reach, its engine recomputes meanwhile: %s", why)
            self._out_of_reach = True

    def _current(self, leases: Sequence[_Lease]) -> PageStoreSession:
        session = leases[0].session
        if session is not self._session or session.broken.is_set():
            raise LeaseLost("the pagestore session of these slots has ended")
        return session


def _write_answer(session: PageStoreSession, wish: PageWish, result: ReserveResult) -> WriteSlot | int | KvPoolError:
    if result.slot is None:
        return result.error if result.error is not None else int(result.admission)
    try:
        page = session.slot_view(*result.slot.place)
    except KvPoolError as error:
        session.abort_soon([result.slot.lease_id])
        return error
    return WriteSlot(key=wish.key, page=page, lease=_Lease(session, result.slot.lease_id))


def _read_answer(session: PageStoreSession, wish: PageWish, result: AcquireResult) -> ReadSlot | KvPoolError | None:
    if result.slot is None or result.source is None:
        return result.error
    try:
        page = session.slot_view(*result.slot.place)
    except KvPoolError as error:
        session.release_soon([result.slot.lease_id])
        return error
    lease = _Lease(session, result.slot.lease_id)
    return ReadSlot(key=wish.key, page=page, source=int(result.source), lease=lease)


def _leases_of(slots: Sequence[WriteSlot | ReadSlot]) -> list[_Lease]:
    """Leases to give back. Their views die here: whoever still used one would get an error, not another's bytes."""
    leases = []
    for slot in slots:
        assert isinstance(slot.lease, _Lease)
        try:
            slot.page.release()
        except BufferError:
            _log.error("an array outlives the slot of page %s that it was made of", slot.key)
        leases.append(slot.lease)
    return leases


def _by_session(slots: Sequence[WriteSlot | ReadSlot]) -> list[tuple[PageStoreSession, list[int]]]:
    """Lease ids of each session that still lives (a broken one ends its leases by itself)."""
    groups: dict[PageStoreSession, list[int]] = {}
    for lease in _leases_of(slots):
        if not lease.session.broken.is_set():
            groups.setdefault(lease.session, []).append(lease.lease_id)
    return list(groups.items())
