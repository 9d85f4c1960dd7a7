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
from kvpool.client.retry import Backoff
from kvpool.client.segments import MapHook
from kvpool.core.errors import DeadlineExceeded, KvPoolError, LeaseLost, Overloaded, ServiceUnavailable
from kvpool.core.ipc import MappedSegment
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.spans import Int64s, PageGrants, PageSpan
from kvpool_gpuagent.adapters.budget import Budget
from kvpool_gpuagent.core.pages import AcquiredPages, PageSlots, ReservedPages

_log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.5
PREPARE_RETRY_MAX_S = 30.0
RESERVE_WAIT_S = 5.0  # for other stores of the same agent to end
CONNECT_WAIT_S = 1.0
_FIRST_WINDOW_PAGES = 64  # until a pagestore has named its own


class ArenaLink:
    """The session of one agent with its pagestore, and who may have how many of its leases.

    Opened when first needed, and again after a break: only when every slot of the broken session was handed back, as by
    then no copy touches the old arena, which is what `drained` says to the pagestore. That happens as soon as it can,
    whether or not an engine asks for pages: until then a pagestore that came back after a crash lacks the memory that
    is mapped here.
    """

    def __init__(self, plan: SessionPlan, config: ClientConfig, *, on_map: MapHook | None = None) -> None:
        self.endpoint = plan.endpoint
        self._plan, self._config, self._on_map = replace(plan, trusts_arena=True), config, on_map
        self.mapped_bytes = 0
        self._session: PageStoreSession | None = None
        self._keyspaces = dict(plan.keyspaces)
        self._opening = asyncio.Lock()
        self.reads, self.writes = Budget(_FIRST_WINDOW_PAGES), Budget(_FIRST_WINDOW_PAGES)
        self._settling: set[asyncio.Future[None]] = set()
        self._failed_s = float("-inf")
        self._out_of_reach = False
        self._prepares = False  # whether each session is
        self._unprepared = asyncio.Event()  # the session is to be prepared, and that has not succeeded yet
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self.local_node_id = b""
        self.arena_bytes = 0
        self.broken = asyncio.Event()  # of the session whose slots are out
        self.broken.set()

    @property
    def slots_out(self) -> int:
        """Slots that were granted and not given back, and those asked for."""
        return self.reads.used + self.writes.used

    async def live(self, keyspace: bytes, spec: KeyspaceSpec) -> PageStoreSession:
        """The session, which knows the keyspace. Raises ServiceUnavailable and what opening raises."""
        session = await self._live()
        if self._keyspaces.get(keyspace) != spec:
            await session.add_keyspace(keyspace, spec)
            self._keyspaces[keyspace] = spec
        return session

    async def prepare(self) -> None:
        """Have this agent's share of the arena mapped and registered, now and by each later session; returns when the
        pagestore has no more to give. Raises what the session raises; it is tried again in the background then."""
        self._prepares = True
        try:
            await (await self._live()).prepare(0)
        except BaseException:
            self._unprepared.set()
            raise
        finally:
            self._keep()

    def current(self) -> PageStoreSession:
        """The session whose slots are out. Raises LeaseLost once it has ended."""
        session = self._session
        if session is None or session.broken.is_set():
            raise LeaseLost("the pagestore session of these slots has ended")
        return session

    def give_when_settled(self, acquisition: SpanAcquisition, count: int) -> None:
        """Pages that a load no longer waits for stay in the session's window until the pagestore has settled them."""
        if not count:
            return
        task = asyncio.ensure_future(acquisition.wait_settled())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        task.add_done_callback(lambda _: self.reads.give(count))

    async def close(self) -> None:
        """End the session; no slot is out. Idempotent."""
        self._closed = True
        async with self._opening:  # a session that is being opened is seen to its end
            session, self._session = self._session, None
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
        if session is not None and not await session.close():
            _log.warning("the pagestore session did not end normally; its slots come back when this process lets go")

    def note_out_of_reach(self, why: object) -> None:
        """Log it once an outage: every request of the engines fails on it meanwhile."""
        if not self._out_of_reach:
            _log.warning("the local pagestore is out of reach, engines recompute meanwhile: %s", why)
            self._out_of_reach = True

    def _mapped(self, segment: MappedSegment) -> Callable[[], None]:
        """In a thread; see MapHook."""
        size_bytes = len(segment.view)
        undo = self._on_map(segment) if self._on_map is not None else None
        self.mapped_bytes += size_bytes

        def unmapped() -> None:
            self.mapped_bytes -= size_bytes
            if undo is not None:
                undo()

        return unmapped

    def _keep(self) -> None:
        if self._keeper is None and not self._closed:
            self._keeper = asyncio.ensure_future(self._keep_open())

    async def _keep_open(self) -> None:
        """Open the next session as soon as one has ended and no slot of it is out; prepare it until that succeeds."""
        session, pauses = self._session, Backoff(RETRY_INTERVAL_S, PREPARE_RETRY_MAX_S)
        while not self._closed:
            if session is not None:
                await self._work_on(session)
            pause_s = RETRY_INTERVAL_S
            try:
                if (newest := await self._live()) is not session:
                    session = newest
                    if self._prepares:
                        self._unprepared.set()
                        pauses.reset()
            except (KvPoolError, OSError) as error:
                _log.debug("no new pagestore session yet: %s", error)
            else:
                if self._unprepared.is_set() and not await self._prepared(session):
                    pause_s = pauses.next_s()
            await asyncio.sleep(pause_s)

    async def _work_on(self, session: PageStoreSession) -> None:
        """Return once the session has ended or is to be prepared."""
        waits = [asyncio.ensure_future(event.wait()) for event in (session.broken, self._unprepared)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _prepared(self, session: PageStoreSession) -> bool:
        try:
            await session.prepare(0)
        except (KvPoolError, OSError) as error:
            _log.warning("arena memory is not ready yet, tried again in up to %g s: %s", PREPARE_RETRY_MAX_S, error)
            return False
        self._unprepared.clear()
        _log.info("arena memory is ready: %d bytes are mapped", self.mapped_bytes)
        return True

    async def _live(self) -> PageStoreSession:
        async with self._opening:
            session, loop = self._session, asyncio.get_running_loop()
            if self._closed:
                raise ServiceUnavailable("the agent is closing")
            if session is not None and not session.broken.is_set():
                return session
            if loop.time() - self._failed_s < RETRY_INTERVAL_S:
                raise ServiceUnavailable(f"the pagestore at {self._plan.endpoint} did not answer a moment ago")
            if session is not None and self.slots_out:
                raise ServiceUnavailable("the pagestore session broke and its last copies still run")
            try:
                if session is None:
                    plan = replace(self._plan, keyspaces=tuple(self._keyspaces.items()))
                    session = await PageStoreSession.open(plan, self._config, on_map=self._mapped)
                else:
                    session = await session.reopen(drained=True)
            except KvPoolError as error:
                self._failed_s = loop.time()
                self.note_out_of_reach(error)
                raise
            if self._out_of_reach:
                _log.warning("the local pagestore is back")
                self._out_of_reach = False
            self._session = session
            self.local_node_id, self.arena_bytes, self.broken = session.node_id, session.arena_bytes, session.broken
            for budget in (self.reads, self.writes):
                budget.resize(max(2, session.max_leases))
            self._keep()
            return session


class ArenaPool:
    """See ports.PagePool. Of one engine session; all of an agent share its link."""

    kind = "arena"

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
        try:
            async with asyncio.timeout(CONNECT_WAIT_S):
                await self._live()
        except KvPoolError:
            pass  # it was logged, and the next request tries again
        except TimeoutError:
            self._link.note_out_of_reach(f"no answer within {CONNECT_WAIT_S:g} s")

    async def reserve(self, span: PageSpan, chain_head_hash: bytes) -> ReservedPages:
        """See ports.PagePool. Raises Overloaded when other stores keep the session's leases for too long."""
        session, budget = await self._live(), self._link.writes
        try:
            async with asyncio.timeout(RESERVE_WAIT_S):
                await budget.take(span.page_count)
        except TimeoutError:
            raise Overloaded("other stores of this agent hold all leases of its pagestore session") from None
        granted = 0
        try:
            # What was granted before a cancellation or a failure is given back by the session.
            answer = await session.reserve_span(span)
            slots = _slots_of(session, answer.granted, session.abort_soon)
            granted = slots.count
        finally:
            budget.give(span.page_count - granted)
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
        try:
            async with asyncio.timeout_at(ends_at_s):
                await budget.take(span.page_count)
        except TimeoutError:
            raise DeadlineExceeded("other loads of this agent hold all leases of its pagestore session") from None
        unsettled = span.page_count
        try:
            acquisition = session.acquire_span(span, wait_s=max(1e-3, ends_at_s - asyncio.get_running_loop().time()))
        except BaseException:
            budget.give(unsettled)
            raise
        try:
            async with acquisition as answers:
                async for answer in answers:
                    slots = _slots_of(session, answer.granted, session.release_soon)
                    unsettled -= slots.count + len(answer.failed)
                    budget.give(len(answer.failed))
                    yield AcquiredPages(slots, answer.failed)
        finally:
            self._link.give_when_settled(acquisition, unsettled)

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
        return await self._link.live(self._keyspace, self._spec)

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
