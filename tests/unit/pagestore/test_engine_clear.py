"""What is cleared stays cleared, whatever goes on at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvpool.core.errors import StoreFault
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.engine import disk_tier, inventory, removal
from kvpool_pagestore.engine.fetch import PageRequest
from kvpool_pagestore.engine.sessions import PeerSession
from tests.fixtures.pagestore import (
    KEYSPACE,
    SPEC,
    TENANT,
    Running,
    World,
    new_world,
    page_key,
    running_engine,
)
from tests.fixtures.pagestore_calls import acquire, open_session, store
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stored_pages import stored_pages


class Stopped:
    """A method of the store that waits to be let go, before or after it has done its work."""

    def __init__(self, method: Callable[[bytes], None], *, after: bool) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._method, self._after = method, after

    def __call__(self, keyspace: bytes) -> None:
        if self._after:
            self._method(keyspace)
        self.reached.set()
        assert self.go_on.wait(PATIENCE_S)
        if not self._after:
            self._method(keyspace)


async def on_disk_alone(world: World, number: int) -> None:
    async with running_engine(world) as running:
        await store(running, await open_session(running), [number])
        await running.engine.flush(TENANT, b"")


async def is_there(running: Running, peer: PeerSession, number: int) -> bool:
    (answer,) = await acquire(running, peer, [PageRequest(key=page_key(number))])
    if answer.grant is not None:
        running.engine.pages.release(peer, [answer.grant.lease_id])
    return answer.grant is not None


async def test_a_page_promoted_while_it_is_cleared_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        await on_disk_alone(world, 1)
        stopped = Stopped(world.memory.delete_keyspace, after=False)
        monkeypatch.setattr(world.memory, "delete_keyspace", stopped)
        async with running_engine(world) as running:
            peer = await open_session(running)
            clear = asyncio.create_task(running.engine.clear(TENANT, b""))
            await eventually(stopped.reached.is_set)
            assert await is_there(running, peer, 1)  # read from disk before it is deleted there
            stopped.go_on.set()
            assert await clear == 1
            assert not await is_there(running, peer, 1)
            assert world.index.shards(1, Tier.STAGING) == 0 and world.index.shards(1, Tier.DISK) == 0


async def test_a_page_stored_while_one_of_two_clears_still_runs_is_known_if_it_is_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            engine, peer = running.engine, await open_session(running)
            stopped = Stopped(world.memory.delete_keyspace, after=True)
            deletions: list[Callable[[bytes], None]] = [stopped, world.memory.delete_keyspace]

            def delete(keyspace: bytes) -> None:
                deletions.pop()(keyspace)

            monkeypatch.setattr(world.memory, "delete_keyspace", delete)
            first = asyncio.create_task(engine.clear(TENANT, b""))
            second = asyncio.create_task(engine.clear(TENANT, b""))
            await first
            await eventually(stopped.reached.is_set)
            await store(running, peer, [2])
            flush = asyncio.create_task(engine.flush(TENANT, b""))
            await asyncio.wait([flush], timeout=0.2)  # ends here only if the page is written meanwhile
            stopped.go_on.set()
            await second
            assert await flush == (1, 0)
            assert engine.gauges().disk_pages == 1 and len(stored_pages(world.memory)) == 1


async def test_a_clear_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_CLEARED_CHUNKS", 4)
    monkeypatch.setattr(removal, "_PAGES_A_TURN", 4)
    monkeypatch.setattr(inventory, "_NAMES_A_PART", 4)
    with new_world() as world:
        async with running_engine(world) as running:
            engine, peer = running.engine, await open_session(running)
            for start in (0, 16):
                await store(running, peer, range(start, start + 16))
                await engine.flush(TENANT, b"")
            turn, removed, dropped = 0, Counter[int](), Counter[int]()
            true_drop, true_remove = PageTable.drop, DiskMap.remove_chunks

            def drop(self: PageTable, key: PageKey) -> bool:
                dropped[turn] += 1
                return true_drop(self, key)

            def remove(self: DiskMap, names: Sequence[bytes]) -> list[tuple[bytes, int]]:
                chunks = true_remove(self, names)
                removed[turn] += sum(shards.bit_count() for _, shards in chunks)
                return chunks

            async def turns() -> None:
                nonlocal turn
                while True:
                    turn += 1
                    await asyncio.sleep(0)

            monkeypatch.setattr(DiskMap, "remove_chunks", remove)
            monkeypatch.setattr(PageTable, "drop", drop)
            others = asyncio.ensure_future(turns())
            assert await engine.clear(TENANT, b"") == 32
            others.cancel()
            assert max(dropped.values()) <= 4
            assert sum(removed.values()) == 32 and max(removed.values()) <= 4
            assert engine.gauges().disk_pages == engine.gauges().staging_pages == 0


async def test_the_index_learns_of_what_was_cleared_before_another_keyspace_could_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other_spec = replace(SPEC, model_revision="other")
    other = keyspace_id(encode_keyspace(TENANT, other_spec))
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running, keyspaces=((KEYSPACE, SPEC), (other, other_spec)))
            await store(running, peer, [1])
            await running.engine.flush(TENANT, b"")
            cleared: list[bytes] = []

            def delete(keyspace: bytes) -> None:
                if cleared:
                    raise StoreFault("the disk is gone")
                cleared.append(keyspace)

            monkeypatch.setattr(world.memory, "delete_keyspace", delete)
            with pytest.raises(StoreFault):
                await running.engine.clear(TENANT, b"")
            assert cleared and world.index.dropped == cleared
