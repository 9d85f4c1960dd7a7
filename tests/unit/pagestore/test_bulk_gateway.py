"""Small pages of a bulk stream share the engine's steps, and each gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.client.sync import BackgroundLoop
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import ArenaFull, KvPoolError, PageCorrupt, SessionUnknown, StoreFault
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool_pagestore.bulk.gateway import EngineBulkSession
from kvpool_pagestore.core.page_table import Grant
from tests.fixtures.patience import PATIENCE_S

METADATA = PageMetadata(parent_hash=bytes(16), chunk_index=0, group_head_hash=bytes(16))


def key(number: int) -> PageKey:
    return PageKey(b"k" * 16, number.to_bytes(16, "big"), 0)


class Pages:
    """Answers what a test has planned for a key; else it stores."""

    def __init__(self) -> None:
        self.reserved: list[int] = []  # how many at once
        self.committed: list[tuple[int, bool]] = []
        self.slots: dict[int, bytearray] = {}
        self.plan: dict[PageKey, Admission | KvPoolError] = {}
        self.spoilt: set[PageKey] = set()
        self.gone = False
        self._keys: dict[int, PageKey] = {}

    async def reserve(self, peer: Any, items: Sequence[Any]) -> list[Any]:
        if self.gone:
            raise SessionUnknown("the session has ended")
        self.reserved.append(len(items))
        return [self.plan[item.key] if item.key in self.plan else self._grant(item) for item in items]

    def view(self, grant: Grant) -> memoryview:
        return memoryview(self.slots[grant.lease_id])

    async def commit(self, peer: Any, lease_ids: Sequence[int], *, durable: bool) -> list[KvPoolError | None]:
        self.committed.append((len(lease_ids), durable))
        return [PageCorrupt("spoilt") if self._keys[one] in self.spoilt else None for one in lease_ids]

    async def make_durable(self, page_key: PageKey) -> KvPoolError | None:
        return StoreFault("the disk is gone")

    def _grant(self, item: Any) -> Grant:
        lease_id = len(self._keys) + 1
        self._keys[lease_id], self.slots[lease_id] = item.key, bytearray(item.page_bytes)
        return Grant(lease_id=lease_id, slot=None)  # type: ignore[arg-type]


class World:
    def __init__(self, *, durable: bool = False) -> None:
        self.pages, self.loop = Pages(), BackgroundLoop("test bulk")
        engine: Any = SimpleNamespace(pages=self.pages)
        running = self.loop.run(self._running, 5.0)
        self.session = EngineBulkSession(engine, running, SimpleNamespace(), durable)  # type: ignore[arg-type]

    async def _running(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def put(self, numbers: Sequence[int]) -> list[int | KvPoolError]:
        """All while the loop has other work, so that they come to it together."""
        held, go = Event(), Event()

        async def hold() -> None:
            held.set()
            go.wait()

        holding = self.loop.start(hold)
        held.wait()
        puts = [self.session.put(key(number), memoryview(bytes([number]) * 8), METADATA) for number in numbers]
        go.set()
        holding.result(PATIENCE_S)
        return [put.result(PATIENCE_S) for put in puts]


@pytest.fixture
def world() -> Any:
    world = World()
    yield world
    world.loop.stop()


def test_pages_that_wait_for_the_engine_are_one_step_of_it(world: World) -> None:
    assert world.put(range(20)) == [Admission.RESERVED] * 20
    assert (world.pages.reserved, world.pages.committed) == ([20], [(20, False)])
    assert [bytes(slot) for slot in world.pages.slots.values()] == [bytes([number]) * 8 for number in range(20)]
    assert world.put([30]) == [Admission.RESERVED], "who comes later has a step of its own"
    assert world.pages.reserved == [20, 1]


def test_each_page_has_its_own_answer(world: World) -> None:
    full = ArenaFull("no slot")
    world.pages.plan = {key(1): full, key(3): Admission.EXISTS, key(4): Admission.PENDING}
    world.pages.spoilt = {key(2)}
    answers = world.put(range(6))
    assert answers[:2] == [Admission.RESERVED, full]
    assert isinstance(answers[2], PageCorrupt)
    assert answers[3:] == [Admission.EXISTS, Admission.PENDING, Admission.RESERVED]


def test_what_exists_is_made_durable_where_that_is_wanted() -> None:
    world = World(durable=True)
    world.pages.plan = {key(0): Admission.EXISTS}
    answers = world.put(range(2))
    assert isinstance(answers[0], StoreFault)
    assert (answers[1], world.pages.committed) == (Admission.RESERVED, [(1, True)])
    world.loop.stop()


def test_no_caller_waits_for_a_session_that_has_ended(world: World) -> None:
    world.pages.gone = True
    puts = [world.session.put(key(number), memoryview(b"x"), METADATA) for number in range(3)]
    for put in puts:
        with pytest.raises(SessionUnknown):
            put.result(PATIENCE_S)
