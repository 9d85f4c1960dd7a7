"""Pages through the local pagestore's arena: slots under leases of one session, mapped by this process.

One session serves all engines of an agent: its mappings, which a device registers (a GPU's takes 50 ms a GiB), outlive
any engine, and are made before the first one comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from kvpool.client.acquisition import SpanAcquisition
from kvpool.client.config import ClientConfig
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.pagestore_link import RETRY_INTERVAL_S, PagestoreLink
from kvpool.client.segments import MapHook
from kvpool.core.chunks import Int64s
from kvpool.core.errors import DeadlineExceeded, KvPoolError, LeaseLost, Overloaded, ServiceUnavailable
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.spans import PageGrants, PageSpan
from kvpool_gpuagent.adapters.budget import Budget
from kvpool_gpuagent.core.pages import AcquiredPages, PageSlots, ReservedPages

_log = logging.getLogger(__name__)

# An engine waits for either: together they stay well under 5 s.
RESERVE_WAIT_S = 3.0  # for other stores of the same agent to end, and for the pagestore's answer
CONNECT_WAIT_S = 1.0  # for a session; its opening goes on in the background
_FIRST_WINDOW_PAGES = 64  # until a pagestore has named its own


class ArenaLink(PagestoreLink):
    """The session of one agent with its pagestore, and the budgets of its leases."""

    def __init__(self, plan: SessionPlan, config: ClientConfig, *, on_map: MapHook | None = None) -> None:
        self._on_segment = on_map
        self.reads, self.writes = Budget(_FIRST_WINDOW_PAGES), Budget(_FIRST_WINDOW_PAGES)
        super().__init__(
            replace(plan, trusts_arena=True),
            config,
            on_map=self._map_segment,
            on_open=self._note_opened,
            slots_out=lambda: self.slots_out,
            retry_interval_s=RETRY_INTERVAL_S,
        )
        self._answering: set[asyncio.Future[None]] = set()
        self.mapped_bytes = 0
        self.local_node_id = b""
        self.arena_bytes = 0
        self.broken = asyncio.Event()  # of the session whose slots are out
        self.broken.set()

    @property
    def slots_out(self) -> int:
        """Slots that were granted and not given back, and those asked for."""
        return self.reads.used + self.writes.used

    def current(self) -> PageStoreSession:
        """The session whose slots are out. Raises LeaseLost once it has ended."""
        session = self.session
        if session is None or session.broken.is_set():
            raise LeaseLost("the pagestore session of these slots has ended")
        return session

    def give_when_answered(self, acquisition: SpanAcquisition, count: int) -> None:
        """Pages that a load no longer waits for stay in the session's window until the pagestore has answered for
        them."""
        if not count:
            return
        task = asyncio.ensure_future(acquisition.wait_settled())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        task.add_done_callback(lambda _: self.reads.give(count))

    def _note_opened(self, session: PageStoreSession) -> None:
        self.local_node_id, self.arena_bytes, self.broken = session.node_id, session.arena_bytes, session.broken
        for budget in (self.reads, self.writes):
            budget.resize(max(2, session.max_leases))

    def _map_segment(self, segment: memoryview) -> Callable[[], None]:
        """In a thread; see MapHook."""
        size_bytes = len(segment)
        undo = self._on_segment(segment) if self._on_segment is not None else None
        self.mapped_bytes += size_bytes

        def unmapped() -> None:
            self.mapped_bytes -= size_bytes
            if undo is not None:
                undo()

        return unmapped


class ArenaPool:
    """See ports.PagePool. Of one engine session; all of an agent share its link."""

    def __init__(self, link: ArenaLink, keyspace: bytes, spec: KeyspaceSpec) -> None:
        self._link, self._keyspace, self._spec = link, keyspace, spec
        self._closed = False

    @property
    def local_node_id(self) -> bytes:
        """See ports.PagePool."""
        return self._link.local_node_id

    @property
    def window_pages(self) -> int:
        """See ports.PagePool."""
        return self._link.reads.capacity

    @property
    def arena_bytes(self) -> int:
        """See ports.PagePool."""
        return self._link.arena_bytes

    @property
    def broken(self) -> asyncio.Event:
        """See ports.PagePool."""
        return self._link.broken

    async def connect(self) -> None:
        """See ports.PagePool. An engine is not kept waiting for a pagestore that hangs."""
        with contextlib.suppress(KvPoolError):  # it was logged, and the next request tries again
            await self._live()

    async def reserve(self, span: PageSpan, chain_head_hash: bytes) -> ReservedPages:
        """See ports.PagePool. Raises Overloaded when the pagestore, or other stores of this agent, take too long."""
        session = await self._live()
        try:
            async with asyncio.timeout(RESERVE_WAIT_S):
                await self._link.writes.take(span.page_count)
                return await self._reserve(session, span)
        except TimeoutError:
            raise Overloaded(f"the pagestore granted no slots to this store within {RESERVE_WAIT_S:g} s") from None

    async def _reserve(self, session: PageStoreSession, span: PageSpan) -> ReservedPages:
        """Gives permits back that are not needed."""
        granted = 0
        try:
            # What was granted before a cancellation or a failure is given back by the session.
            answer = await session.reserve_span(span)
            slots = _slots_of(session, answer.granted, session.abort_soon)
            granted = slots.count
        finally:
            self._link.writes.give(span.page_count - granted)
        failed = tuple(
            (page, error or ServiceUnavailable("the pagestore gave no reason")) for page, error in answer.failed
        )
        return ReservedPages(slots, answer.exists, answer.pending, failed)

    async def commit(self, span: PageSpan, slots: PageSlots) -> Sequence[tuple[int, KvPoolError]]:
        """See ports.PagePool."""
        if not slots.count:
            return ()
        try:
            return await self._session_of(slots).commit(slots.leases, sealed=False)
        except KvPoolError as error:
            # Whether the pages became visible is not known; their bytes are in place and true, so both are fine.
            return [(index, error) for index in range(slots.count)]
        finally:
            self._link.writes.give(slots.count)

    async def abort(self, slots: PageSlots) -> None:
        """See ports.PagePool."""
        with contextlib.suppress(LeaseLost):
            if slots.count:
                self._session_of(slots).abort_soon(slots.leases)
        self._link.writes.give(slots.count)

    async def acquire(self, span: PageSpan, wait_s: float) -> AsyncGenerator[AcquiredPages, None]:
        """See ports.PagePool."""
        ends_at_s = asyncio.get_running_loop().time() + wait_s
        session, budget = await self._live(), self._link.reads
        if not budget.take_now(span.page_count):
            try:
                async with asyncio.timeout_at(ends_at_s):
                    await budget.take(span.page_count)
            except TimeoutError:
                raise DeadlineExceeded("other loads of this agent hold all leases of its pagestore session") from None
        unanswered = span.page_count
        try:
            acquisition = session.acquire_span(span, wait_s=max(1e-3, ends_at_s - asyncio.get_running_loop().time()))
        except BaseException:
            budget.give(unanswered)
            raise
        try:
            async with acquisition as answers:
                async for answer in answers:
                    slots = _slots_of(session, answer.granted, session.release_soon)
                    unanswered -= slots.count + len(answer.failed)
                    budget.give(len(answer.failed))
                    yield AcquiredPages(slots, answer.failed)
        finally:
            self._link.give_when_answered(acquisition, unanswered)

    async def release(self, slots: PageSlots) -> None:
        """See ports.PagePool."""
        with contextlib.suppress(LeaseLost):
            if slots.count:
                self._session_of(slots).release_soon(slots.leases)
        self._link.reads.give(slots.count)

    async def close(self) -> None:
        """See ports.PagePool. The link stays for the agent's other engines."""
        self._closed = True

    async def _live(self) -> PageStoreSession:
        if self._closed:
            raise ServiceUnavailable("the engine session is closing")
        session = self._link.live_now(self._keyspace, self._spec)
        if session is not None:
            return session
        try:
            async with asyncio.timeout(CONNECT_WAIT_S):
                return await self._link.live(self._keyspace, self._spec)
        except TimeoutError:
            self._link.note_out_of_reach(f"no answer within {CONNECT_WAIT_S:g} s")
            raise ServiceUnavailable(f"the pagestore opened no session within {CONNECT_WAIT_S:g} s") from None

    def _session_of(self, slots: PageSlots) -> PageStoreSession:
        session = self._link.current()
        if slots.session is not session:
            raise LeaseLost("the pagestore session of these slots has ended")
        return session


def _slots_of(session: PageStoreSession, grants: PageGrants, give_back: Callable[[Int64s], None]) -> PageSlots:
    """give_back: called with the leases if they cannot be used; that is raised."""
    try:
        addresses = session.addresses(grants)
    except BaseException:
        give_back(grants.lease_ids)
        raise
    return PageSlots(grants.pages, addresses, grants.sources, grants.lease_ids, session)
