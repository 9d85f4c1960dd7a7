"""What vanished peers may still touch, and when it comes back: on `drained`, or when the kernel says they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from kvpool.core.clock import Clock
from kvpool.core.errors import KvPoolError
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.sessions import Session, SessionState
from kvpool_pagestore.engine_space import ArenaSpace
from kvpool_pagestore.engine_tasks import background, cancelled
from kvpool_pagestore.ports import Arena, Workers

_log = logging.getLogger(__name__)

_DEPARTING_POLLS = 10  # nothing is held back for a session that was closed, so it is looked at this much more rarely


class Quarantine:
    """Watches ended sessions, and segments of an earlier process. Runs only while there is something to watch."""

    def __init__(
        self,
        ledger: PageTable,
        space: ArenaSpace,
        arena: Arena,
        workers: Workers,
        clock: Clock,
        poll_s: float,
    ) -> None:
        self._ledger = ledger
        self._space = space
        self._arena = arena
        self._workers = workers
        self._clock = clock
        self._poll_s = poll_s
        # Of an earlier process, not yet resolved: sizes, by id, of the segments that each one's peer may map.
        self._old_sessions: dict[bytes, Mapping[int, int]] = {}
        self._old_bytes = 0  # of those segments, each counted once
        self._departing: set[bytes] = set()  # closed properly, but their peers may not have unmapped yet
        self._resolved: set[bytes] = set()  # nothing is held back for them; their files are still to be removed
        self._is_failing = False  # the last attempt to look failed
        self._task: asyncio.Task[None] | None = None
        self._poke = asyncio.Event()
        self._old_going: asyncio.Future[None] | None = None  # while all that old segments wait for is time
        self.old_gone = asyncio.Event()  # set while there are no segments of an earlier process
        self.old_gone.set()

    def adopt_old(self, sessions: Mapping[bytes, Mapping[int, int]]) -> None:
        """Count what an earlier process left: a segment's memory is there until none of its peers can touch it."""
        self._old_sessions = dict(sessions)
        for session_id in sessions:
            self._ledger.sessions.add_old(session_id)
        self._count_old()
        if sessions:
            self.watch()
            self._expect_old_room(is_going=bool(self._old_bytes))  # until a look says that a peer lives

    def watch(self) -> None:
        """A session has ended abnormally."""
        self._poke.set()
        if self._task is None:
            self._task = background(self._watch(), "quarantine")

    def departed(self, session_id: bytes) -> None:
        """A session was closed; its slots are free, but its segments may stay mapped for a while."""
        self._departing.add(session_id)
        self.watch()

    async def drained(self, session: Session) -> None:
        """The peer of an ended session says that all its work and mappings have ended."""
        self._resolve(session)
        await self._remove_files()

    async def all_gone(self) -> bool:
        """Whether it is known that no peer can map segments any more, those of an earlier process included."""
        ended = {one.session_id for one in self._ledger.sessions.ended} | self._departing
        try:
            gone = await self._workers.run(self._arena.gone_sessions, sorted(ended))
        except KvPoolError:  # no room in the queue
            return False
        return ended == set(gone)

    async def resolve_gone(self) -> None:
        """Look once which peers are gone, and give back what they held."""
        sessions = self._ledger.sessions
        waiting = [one.session_id for one in sessions.ended if one.gone_s is None]
        if waiting or self._departing:
            gone = await self._workers.run(self._arena.gone_sessions, [*waiting, *self._departing])
            sessions.note_gone(list(gone), self._clock.monotonic_s())
            self._forget_departed(self._departing.intersection(gone))
        for session in sessions.resolvable(self._clock.monotonic_s()):
            self._resolve(session)
        await self._remove_files()
        if self._old_bytes:
            alive = {one.session_id for one in sessions.ended if one.gone_s is None}
            self._expect_old_room(is_going=not alive & self._old_sessions.keys())
        if self._ledger.space.reapable():
            await self._space.reap()

    async def stop(self) -> None:
        await cancelled(self._task)

    async def _watch(self) -> None:
        try:
            while True:
                self._poke.clear()
                await self._look()
                urgent = self._ledger.sessions.ended or self._old_bytes or self._is_failing
                if not urgent and not self._departing:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s * (1 if urgent else _DEPARTING_POLLS)):
                        await self._poke.wait()
        finally:
            self._task = None
            if self._old_bytes:
                self._expect_old_room(is_going=False)

    async def _look(self) -> None:
        """A failure, as of a full queue, passes: the next poll tries again."""
        try:
            await self.resolve_gone()
        except (KvPoolError, OSError) as error:
            if not self._is_failing:
                _log.warning("ended sessions could not be looked at, which is tried again: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    def _expect_old_room(self, *, is_going: bool) -> None:
        """Let those who need room wait for that of old segments exactly while it is sure to come soon."""
        if is_going and self._old_going is None:
            self._old_going = asyncio.get_running_loop().create_future()
            self._space.expect(self._old_going)
        elif not is_going and self._old_going is not None:
            self._old_going.set_result(None)
            self._old_going = None

    def _resolve(self, session: Session) -> None:
        if session.state is SessionState.ENDED:
            self._ledger.resolve_session(session)
        if self._old_sessions.pop(session.session_id, None):
            self._count_old()
        self._resolved.add(session.session_id)

    def _forget_departed(self, session_ids: set[bytes]) -> None:
        self._departing -= session_ids
        for session_id in session_ids:
            self._ledger.space.forget_mapper(session_id)
        self._resolved |= session_ids

    async def _remove_files(self) -> None:
        if self._resolved:
            session_ids = set(self._resolved)
            await self._workers.run(self._arena.forget_sessions, sorted(session_ids))
            self._resolved -= session_ids

    def _count_old(self) -> None:
        """Count each segment of an earlier process that some peer may still map; the kernel has freed the others."""
        sizes: dict[int, int] = {}
        for segments in self._old_sessions.values():
            sizes.update(segments)
        old_bytes = sum(sizes.values())
        self._ledger.space.hold_old_bytes(old_bytes - self._old_bytes)
        if old_bytes < self._old_bytes:
            _log.info("%d bytes of an earlier process's segments are gone", self._old_bytes - old_bytes)
            self._expect_old_room(is_going=False)  # some has come
        self._old_bytes = old_bytes
        if old_bytes:
            self.old_gone.clear()
        else:
            self.old_gone.set()
