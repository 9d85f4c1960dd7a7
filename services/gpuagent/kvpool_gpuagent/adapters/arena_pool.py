"""Pages through the local pagestore's arena: slots under leases of one session, mapped by this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from kvpool.client.config import ClientConfig
from kvpool.client.page_items import AcquireItem, ReserveItem
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError, LeaseLost, ServiceUnavailable
from kvpool_gpuagent.ports import PageWish, ReadSlot, WriteSlot

_log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.5
DEFAULT_WINDOW_PAGES = 64


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

    def __init__(self, plan: SessionPlan, config: ClientConfig) -> None:
        self._plan, self._config = plan, config
        self._session: PageStoreSession | None = None
        self._opening = asyncio.Lock()
        self._slots_out = 0
        self._failed_s = float("-inf")
        self._closed = False
        self.local_node_id = b""
        self.window_pages = DEFAULT_WINDOW_PAGES

    async def connect(self) -> None:
        """See ports.PagePool."""
        try:
            await self._live()
        except KvPoolError as error:
            _log.warning("the local pagestore is not there yet: %s", error)

    async def reserve(
        self, wishes: Sequence[PageWish], page_bytes: Sequence[int]
    ) -> Sequence[WriteSlot | int | KvPoolError]:
        """See ports.PagePool."""
        session = await self._live()
        items = [ReserveItem(wish.key, size, _metadata(wish)) for wish, size in zip(wishes, page_bytes, strict=True)]
        answers: list[WriteSlot | int | KvPoolError] = []
        for wish, result in zip(wishes, await session.reserve(items), strict=True):
            if result.slot is not None:
                lease = _Lease(session, result.slot.lease_id)
                answers.append(WriteSlot(key=wish.key, page=session.slot_view(result.slot), lease=lease))
                self._slots_out += 1
            else:
                answers.append(result.error if result.error is not None else int(result.admission))
        return answers

    async def commit(self, slots: Sequence[WriteSlot]) -> Sequence[KvPoolError | None]:
        """See ports.PagePool."""
        leases = [_lease(slot) for slot in slots]
        try:
            session = self._current(leases)
            return await session.commit([lease.lease_id for lease in leases])
        except KvPoolError as error:
            # Whether the pages became visible is not known; they are sealed and true, so both are fine.
            return [error] * len(slots)
        finally:
            self._slots_out -= len(slots)

    async def abort(self, slots: Sequence[WriteSlot]) -> None:
        """See ports.PagePool."""
        leases = [_lease(slot) for slot in slots]
        self._slots_out -= len(slots)
        if leases and not leases[0].session.broken.is_set():
            leases[0].session.abort_soon([lease.lease_id for lease in leases])

    async def acquire(
        self, wishes: Sequence[PageWish], wait_s: float
    ) -> AsyncGenerator[tuple[int, ReadSlot | KvPoolError | None], None]:
        """See ports.PagePool."""
        session = await self._live()
        items = [AcquireItem(wish.key, wish.sources, _metadata(wish)) for wish in wishes]
        async with session.acquire(items, wait_s=wait_s) as answers:
            async for result in answers:
                wish = wishes[result.item_index]
                if result.slot is None or result.source is None:
                    yield result.item_index, result.error
                    continue
                lease = _Lease(session, result.slot.lease_id)
                page = session.slot_view(result.slot)
                self._slots_out += 1
                slot = ReadSlot(key=wish.key, page=page, source=int(result.source), lease=lease)
                del page
                yield result.item_index, slot
                del slot  # a view that lingers here would keep the arena mapped after a break

    async def release(self, slots: Sequence[ReadSlot], corrupt: Sequence[ReadSlot] = ()) -> None:
        """See ports.PagePool."""
        good, bad = [_lease(slot) for slot in slots], [_lease(slot) for slot in corrupt]
        self._slots_out -= len(good) + len(bad)
        if not good and not bad:
            return
        session = (good or bad)[0].session
        if session.broken.is_set():
            return
        if bad:
            await session.release(
                [lease.lease_id for lease in good], corrupt_lease_ids=[lease.lease_id for lease in bad]
            )
        else:
            session.release_soon([lease.lease_id for lease in good])

    async def close(self) -> None:
        """See ports.PagePool."""
        self._closed = True
        if self._session is not None and not await self._session.close():
            _log.warning("the pagestore session did not end normally; its slots come back when this process lets go")

    async def _live(self) -> PageStoreSession:
        async with self._opening:
            session = self._session
            if session is not None and not session.broken.is_set():
                return session
            if self._closed:
                raise ServiceUnavailable("the engine session is closing")
            now_s = asyncio.get_running_loop().time()
            if now_s - self._failed_s < RETRY_INTERVAL_S:
                raise ServiceUnavailable(f"the pagestore at {self._plan.endpoint} did not answer a moment ago")
            if session is not None and self._slots_out:
                raise ServiceUnavailable("the pagestore session broke and its last copies still run")
            try:
                session = await (
                    PageStoreSession.open(self._plan, self._config) if session is None else session.reopen(drained=True)
                )
            except KvPoolError:
                self._failed_s = asyncio.get_running_loop().time()
                raise
            self._session = session
            self.local_node_id = session.node_id
            self.window_pages = max(2, session.max_leases)
            return session

    def _current(self, leases: Sequence[_Lease]) -> PageStoreSession:
        session = leases[0].session
        if session is not self._session or session.broken.is_set():
            raise LeaseLost("the pagestore session of these slots has ended")
        return session


def _lease(slot: WriteSlot | ReadSlot) -> _Lease:
    assert isinstance(slot.lease, _Lease)
    return slot.lease


def _metadata(wish: PageWish) -> PageMetadata:
    return PageMetadata(
        parent_hash=wish.parent_hash, chunk_index=wish.chunk_index, group_head_hash=wish.group_head_hash
    )
