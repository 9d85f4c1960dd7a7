"""Room in the arena: segments are made and destroyed on threads, slots handed out on the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from kvpool.core.clock import Clock
from kvpool.core.errors import ArenaFull, KvPoolError
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.slots import Segment, Slot, SpaceNeed, slot_bytes_for
from kvpool_pagestore.engine_tasks import EngineTasks
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
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.expect(settled)
        made = False
        try:
            made = await workers.run(self._arena.prepare_segment, segment.segment_id, segment.size_bytes, is_wanted)
        finally:
            if made:
                self._table.space.segment_prepared(segment)
            else:
                self._table.space.segment_gone(segment)
            settled.set_result(None)
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
        except (KvPoolError, OSError) as error:
            self._table.space.segment_gone(segment)
            self._paused_until_s = self._clock.monotonic_s() + _GROWTH_PAUSE_S
            _log.error("no new arena segment: %s", error)
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
