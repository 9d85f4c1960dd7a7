"""Room in the arena: segments are made once, and a page that could have room is not refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.core.clock import SystemClock
from kvpool_pagestore.core.admission import AdmissionRules
from kvpool_pagestore.core.events import PageEvents
from kvpool_pagestore.core.page_table import ArenaLimits, PageTable
from kvpool_pagestore.core.slots import Slot, SlotState, SpaceNeed
from kvpool_pagestore.engine.arena import ArenaSpace
from kvpool_pagestore.engine.context import EngineTasks

SLOT_BYTES = 4096
SLOTS_A_SEGMENT = 8


class NamedSegments:
    """An arena that only remembers which segments it has."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def create_segment(self, segment_id: int, size_bytes: int) -> None:
        self.made.append(segment_id)

    def destroy_segment(self, segment_id: int) -> None:
        self.made.remove(segment_id)


class WorkersWithAnOnlooker:
    """Runs calls at once, and starts the onlooker so that it comes before those that wait for the call's end."""

    threads = 1

    def __init__(self) -> None:
        self.onlooker: Callable[[], Any] | None = None
        self.seen: asyncio.Task[Any] | None = None

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(*args)
        if self.onlooker is not None:
            onlooker, self.onlooker = self.onlooker, None
            self.seen = asyncio.get_running_loop().create_task(onlooker())
        return result


@pytest.mark.parametrize("turns", range(6))
async def test_a_segment_that_is_full_as_soon_as_it_is_made_hides_no_room(turns: int) -> None:
    limits = ArenaLimits(
        arena_bytes=4 * SLOTS_A_SEGMENT * SLOT_BYTES,
        segment_bytes=SLOTS_A_SEGMENT * SLOT_BYTES,
        writer_bytes=1 << 30,
        first_segment_id=1,
        grace_s=1,
    )
    ledger = PageTable(limits, PageEvents(), AdmissionRules(), lambda: 0)
    workers, arena, tasks = WorkersWithAnOnlooker(), NamedSegments(), EngineTasks()
    space = ArenaSpace(ledger, arena, workers, tasks, SystemClock())  # type: ignore[arg-type]

    def attempt() -> Slot | SpaceNeed:
        found = ledger.space.allocate("tenant", SLOT_BYTES)
        if isinstance(found, Slot):
            ledger.space.occupy(found, SlotState.RESERVED)
        return found

    async def take(count: int, turns: int = 0) -> list[Any]:
        for _ in range(turns):  # so that it comes between the segment's end and each of the steps that follow it
            await asyncio.sleep(0)
        return [await space.find("tenant", SLOT_BYTES, attempt) for _ in range(count)]

    workers.onlooker = lambda: take(SLOTS_A_SEGMENT + 1, turns)
    first = await take(1)
    assert workers.seen is not None
    taken = first + await workers.seen
    assert all(isinstance(one, Slot) for one in taken), taken[-1]
    await tasks.drain()
    assert len(arena.made) == len(set(arena.made)) >= 2
