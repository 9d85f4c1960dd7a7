"""The arena's memory: segments made and destroyed on threads, prepared ahead of use, and quarantined after peers.

Slots are handed out on the loop. Memory that a vanished peer may still map is not used again until it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from kvpool.core.clock import Clock
from kvpool.core.errors import ArenaFull, KvPoolError
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.sessions import Session, SessionState
from kvpool_pagestore.core.slots import Segment, Slot, SpaceNeed, slot_bytes_for
from kvpool_pagestore.engine.context import EngineTasks, background, cancelled
from kvpool_pagestore.ports import Arena, Workers

_log = logging.getLogger(__name__)
T = TypeVar("T")

_ATTEMPTS = 4  # each one makes or destroys a segment; more means that others take what we make
_GROWTH_PAUSE_S = 1.0  # after the file system had no room for a segment


class ArenaSpace:
    """Finds slots, making segments where the budget allows."""

    def __init__(self, table: PageTable, arena: Arena, workers: Workers, tasks: EngineTasks, clock: Clock) -> None:
        self._table = table
        self._arena = arena
        self._workers = workers
        self._tasks = tasks
        self._clock = clock
        self._growing: dict[tuple[str, int], asyncio.Task[None] | asyncio.Future[None]] = {}
        self._reaping: asyncio.Future[None] | None = None
        self._coming: set[asyncio.Future[None]] = set()
        self._paused_until_s = 0.0

    def view(self, slot: Slot) -> memoryview:
        """Exactly the page's bytes of a slot."""
        return self._arena.view(slot.segment.segment_id, slot.offset, slot.page.page_bytes)

    async def find(self, tenant: str, page_bytes: int, attempt: Callable[[], T | SpaceNeed]) -> T | KvPoolError:
        """Return what `attempt` answers once there is room for it.

        Otherwise ArenaFull if there is none, none can be made and none is expected, or why making room failed.
        """
        attempts_left = _ATTEMPTS
        while attempts_left:
            attempts_left -= 1
            self.look_for_growth()
            answer = attempt()
            if answer is SpaceNeed.FULL and self._coming:
                attempts_left += 1
                await asyncio.wait(self._coming, return_when=asyncio.FIRST_COMPLETED)
            elif answer is SpaceNeed.SEGMENT:
                await self._grow(tenant, slot_bytes_for(page_bytes))
            elif answer is SpaceNeed.RETIREMENT:
                try:
                    await self.reap()
                except KvPoolError as refused:  # no room in the queue, or closing
                    return refused
                except OSError as error:
                    return ArenaFull(f"a segment that is out of use could not be destroyed: {error}")
            elif not isinstance(answer, SpaceNeed):
                self.grow_ahead(tenant, slot_bytes_for(page_bytes))
                return answer
            elif answer is SpaceNeed.QUOTA:
                return ArenaFull("the quota is used up by pages that are in use, pinned or not yet durable")
            else:
                break
        return ArenaFull("every slot of the arena is leased, not yet durable or in quarantine")

    def expect(self, room: asyncio.Future[None]) -> None:
        """Have `find` wait until `room` is done instead of reporting a full arena. It must end soon in any case."""
        self._coming.add(room)
        room.add_done_callback(self._coming.discard)

    async def reap(self) -> None:
        """Destroy segments that are out of service and that no peer maps. One caller works, the others wait."""
        if self._reaping is None:
            self._reaping = asyncio.ensure_future(self._tasks.finish(self._reap(), "reap-segments"))
            self._reaping.add_done_callback(self._reaped)
        await asyncio.shield(self._reaping)

    def look_for_growth(self) -> None:
        """Note whether segments may be made now: before each row of attempts that `find` does not make."""
        self._table.space.growth_allowed = self._clock.monotonic_s() >= self._paused_until_s

    def grow_ahead(self, tenant: str, slot_bytes: int) -> None:
        """Making a segment takes tens of milliseconds: begin before the last slot is gone."""
        if (tenant, slot_bytes) not in self._growing and self._table.space.runs_short(tenant, slot_bytes):
            self._tasks.start(self._grow(tenant, slot_bytes), "grow-ahead")

    async def prepare(self, size_bytes: int, workers: Workers, is_wanted: Callable[[], bool]) -> int:
        """Make a segment with all its memory in place, for the first tenant that needs one; returns its size.

        0 if the budget has no room for it, or if it is not wanted any more. Raises what the arena raises.
        """
        segment = self._table.space.plan_prepared(size_bytes)
        if segment is None:
            return 0
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.expect(ended)
        made = False
        try:
            made = await workers.run(self._arena.prepare_segment, segment.segment_id, segment.size_bytes, is_wanted)
        finally:
            if made:
                self._table.space.segment_prepared(segment)
            else:
                self._table.space.segment_gone(segment)
            ended.set_result(None)
        return segment.size_bytes if made else 0

    async def _grow(self, tenant: str, slot_bytes: int) -> None:
        at = (tenant, slot_bytes)
        growing = self._growing.get(at)
        if growing is None:
            segment = self._table.space.plan_segment(tenant, slot_bytes)
            if segment is None:
                return
            growing = asyncio.ensure_future(self._tasks.finish(self._make(at, segment), "make-segment"))
            self._growing[at] = growing
        await asyncio.shield(growing)

    async def _make(self, at: tuple[str, int], segment: Segment) -> None:
        try:
            await self._workers.run(self._arena.create_segment, segment.segment_id, segment.size_bytes)
        except BaseException as error:  # also an unforeseen one: as long as it is being made, all of its class wait
            self._table.space.segment_gone(segment)
            self._paused_until_s = self._clock.monotonic_s() + _GROWTH_PAUSE_S
            if not isinstance(error, Exception):
                raise
            _log.error("no new arena segment: %s", error, exc_info=not isinstance(error, (KvPoolError, OSError)))
        else:
            self._table.space.segment_made(segment)
        finally:
            # Here, not in a callback: a request that needs a segment before that has run would wait for this one.
            self._growing.pop(at, None)

    async def _reap(self) -> None:
        try:
            for segment in self._table.space.reapable():
                await self._workers.run(self._arena.destroy_segment, segment.segment_id)
                self._table.space.segment_gone(segment)
        finally:
            self._reaping = None  # at once, as above

    def _reaped(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("an arena segment could not be destroyed: %s", error)


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
        """Check once which peers are gone, and free what they held."""
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


_LOG_PARTS = 10  # progress is logged so many times
_LOG_INTERVAL_S = 5.0  # or so often


class Preparation:
    """Fills the budget with segments that belong to no tenant. What fails is made when it is needed, as without it."""

    def __init__(
        self,
        segment_bytes: int,
        capacity_bytes: int,
        space: ArenaSpace,
        workers: Workers,
        quarantine: Quarantine,
        tasks: EngineTasks,
        clock: Clock,
    ) -> None:
        self._segment_bytes = segment_bytes
        self._capacity_bytes = capacity_bytes
        self._space = space
        self._workers = workers
        self._quarantine = quarantine
        self._tasks = tasks
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._is_filling = False
        self._is_stopped = False
        self._logged_s = 0.0
        self._logged_bytes = 0
        self.prepared_bytes = 0  # so far
        self.took_s = 0.0  # so far

    @property
    def goes_on(self) -> bool:
        """Whether there will be more prepared segments soon."""
        if self._is_stopped:
            return False
        return self._is_filling or (self._task is not None and self._quarantine.old_gone.is_set())

    def start(self) -> None:
        """Begin. Call once the node serves, on the engine's loop."""
        self._is_filling = True
        self._task = background(self._run(), "prepare-arena")

    async def stop(self) -> None:
        """Make no more segments; one that is being made is given up within some tens of milliseconds."""
        self._is_stopped = True
        await cancelled(self._task)

    # Inside

    async def _run(self) -> None:
        try:
            # Not cancelled in the middle: threads go on, and the engine waits for them before it lets go of the arena.
            await self._tasks.finish(self._fill(), "fill-arena")
            if not self._quarantine.old_gone.is_set():
                await self._quarantine.old_gone.wait()
                await self._tasks.finish(self._fill(), "fill-arena")
        finally:
            self._task = None

    async def _fill(self) -> None:
        """Make segments until the budget has no room for another one."""
        self._is_filling = True
        self._logged_s = self._clock.monotonic_s()
        began_s, before_bytes = self._logged_s - self.took_s, self.prepared_bytes
        try:
            await asyncio.gather(*(self._make_segments(began_s) for _ in range(self._workers.threads)))
        finally:
            self._is_filling = False
        if self.prepared_bytes > before_bytes:
            self._log_progress("prepared")

    async def _make_segments(self, began_s: float) -> None:
        """What one thread does. began_s: counts the time of earlier fills as well."""
        while not self._is_stopped and (made_bytes := await self._make()):
            self.prepared_bytes += made_bytes
            now_s = self._clock.monotonic_s()
            self.took_s = now_s - began_s
            grown_bytes = self.prepared_bytes - self._logged_bytes
            if now_s - self._logged_s >= _LOG_INTERVAL_S or grown_bytes * _LOG_PARTS >= self._capacity_bytes:
                self._logged_s, self._logged_bytes = now_s, self.prepared_bytes
                self._log_progress("being prepared")

    async def _make(self) -> int:
        """Bytes of a segment that was made; 0 if there is nothing left to make."""
        try:
            return await self._space.prepare(self._segment_bytes, self._workers, lambda: not self._is_stopped)
        except (KvPoolError, OSError) as error:
            if not self._is_stopped:  # the first one speaks for those that others are making
                _log.error("the arena is prepared in part, the rest is made when it is needed: %s", error)
            self._is_stopped = True
            return 0

    def _log_progress(self, what: str) -> None:
        _log.info(
            "the arena is %s: %.2f of %.2f GiB in %.1f s (%.1f GB/s)",
            what,
            self.prepared_bytes / (1 << 30),
            self._capacity_bytes / (1 << 30),
            self.took_s,
            self.prepared_bytes / 1e9 / self.took_s if self.took_s else 0.0,
        )
