"""The one session of a process with its pagestore: opened when first needed, and again after a break."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from kvpool.client.config import ClientConfig
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.retry import Backoff
from kvpool.client.segments import MapHook
from kvpool.core.errors import KvPoolError, ServiceUnavailable
from kvpool.core.keyspace import KeyspaceSpec

_log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.5
PREPARE_RETRY_MAX_S = 30.0


class PagestoreLink:
    """Belongs to one event loop.

    A new session is opened only when nothing uses the broken one any more: by then no copy touches the old arena, which
    is what `drained` says to the pagestore. That happens as soon as it can, whether or not pages are asked for: until
    then a pagestore that came back after a crash lacks the memory that is mapped here.
    """

    def __init__(
        self,
        plan: SessionPlan,
        config: ClientConfig,
        *,
        on_map: MapHook | None = None,
        on_open: Callable[[PageStoreSession], None] = lambda session: None,
        slots_out: Callable[[], int] = lambda: 0,
        retry_interval_s: float = RETRY_INTERVAL_S,
        share_bytes: int = 0,
    ) -> None:
        """on_open: takes each session that was opened. slots_out: slots of it that are in use, beside `use`.
        share_bytes: what the tenant is to have when it prepares, see PageStoreSession.prepare."""
        self._plan, self._config = plan, config
        self._on_map, self._on_open, self._slots_out = on_map, on_open, slots_out
        self._retry_interval_s, self._share_bytes = retry_interval_s, share_bytes
        self._keyspaces = dict(plan.keyspaces)  # that the session knows
        self._opening: asyncio.Task[PageStoreSession] | None = None
        self._users = 0
        self._failed_s = float("-inf")
        self._out_of_reach = False
        self._prepares = False  # whether each session is
        self._unprepared = asyncio.Event()  # the session is to be prepared, and that has not succeeded yet
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self.session: PageStoreSession | None = None  # the latest, live or broken

    @property
    def connected(self) -> bool:
        """Whether there is a live session now."""
        return self.session is not None and not self.session.broken.is_set()

    @property
    def node_id(self) -> bytes:
        """16 bytes: the pagestore; none before it was ever reached."""
        return self.session.node_id if self.session is not None else b""

    def live_now(self, keyspace: bytes, spec: KeyspaceSpec) -> PageStoreSession | None:
        """The session if it is open and knows the keyspace; else see `live`."""
        session = self.session
        if session is None or self._closed or session.broken.is_set() or self._keyspaces.get(keyspace) != spec:
            return None
        return session

    async def live(self, keyspace: bytes, spec: KeyspaceSpec) -> PageStoreSession:
        """The session, which knows the keyspace. Raises ServiceUnavailable and what opening raises."""
        session = await self._live()
        if self._keyspaces.get(keyspace) != spec:
            await session.add_keyspace(keyspace, spec)
            self._keyspaces[keyspace] = spec
        return session

    @contextlib.asynccontextmanager
    async def use(self, keyspace: bytes, spec: KeyspaceSpec) -> AsyncGenerator[PageStoreSession]:
        """The same, for as long as the block lasts; nothing may touch its slots afterwards."""
        session = await self.live(keyspace, spec)
        self._users += 1
        try:
            yield session
        finally:
            self._users -= 1

    async def prepare(self) -> None:
        """Have this process's share of the arena mapped, now and by each later session; returns when the pagestore has
        no more to give. Raises what the session raises; it is tried again in the background then."""
        self._prepares = True
        try:
            await (await self._live()).prepare(self._share_bytes)
        except BaseException:
            self._unprepared.set()
            raise
        finally:
            self._keep()

    async def close(self) -> None:
        """End the session; nothing uses it. Idempotent."""
        self._closed = True
        if self._opening is not None:  # a session that is being opened is seen to its end
            await asyncio.wait((self._opening,))
        session, self.session = self.session, None
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
        if session is not None and not await session.close():
            _log.warning("the pagestore session did not end normally; its slots come back when this process lets go")

    def note_out_of_reach(self, why: object) -> None:
        """Log it once an outage: every request fails on it meanwhile."""
        if not self._out_of_reach:
            _log.warning("the local pagestore is out of reach, engines recompute meanwhile: %s", why)
            self._out_of_reach = True

    # Inside

    async def _live(self) -> PageStoreSession:
        """All who ask meanwhile wait for one opening, which goes on when they leave."""
        if self._closed:
            raise ServiceUnavailable(f"the {self._plan.peer_name} is closing")
        if self.session is not None and not self.session.broken.is_set():
            return self.session
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="pagestore session opening")
            self._opening.add_done_callback(self._end_opening)
        return await asyncio.shield(self._opening)

    def _end_opening(self, opening: asyncio.Task[PageStoreSession]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # those who asked may have left

    async def _open(self) -> PageStoreSession:
        session, loop = self.session, asyncio.get_running_loop()
        if loop.time() - self._failed_s < self._retry_interval_s:
            raise ServiceUnavailable(f"the pagestore at {self._plan.endpoint} did not answer a moment ago")
        if session is not None and (self._users or self._slots_out()):
            raise ServiceUnavailable("the pagestore session broke and its last copies still run")
        try:
            if session is None:
                plan = replace(self._plan, keyspaces=tuple(self._keyspaces.items()))
                session = await PageStoreSession.open(plan, self._config, on_map=self._on_map)
            else:
                session = await session.reopen(drained=True)
        except KvPoolError as error:
            self._failed_s = loop.time()
            self.note_out_of_reach(error)
            raise
        if self._out_of_reach:
            _log.warning("the local pagestore is back")
            self._out_of_reach = False
        self.session = session
        self._on_open(session)
        self._keep()
        return session

    def _keep(self) -> None:
        if self._keeper is None and not self._closed:
            self._keeper = asyncio.ensure_future(self._keep_open())

    async def _keep_open(self) -> None:
        """Open the next session as soon as one has ended and nothing uses it; prepare it until that succeeds."""
        session, pauses = self.session, Backoff(self._retry_interval_s, PREPARE_RETRY_MAX_S)
        while not self._closed:
            if session is not None:
                await self._work_on(session)
            pause_s = self._retry_interval_s
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
            await session.prepare(self._share_bytes)
        except (KvPoolError, OSError) as error:
            _log.warning("arena memory is not ready yet, tried again in up to %g s: %s", PREPARE_RETRY_MAX_S, error)
            return False
        self._unprepared.clear()
        _log.info("arena memory is ready")
        return True
