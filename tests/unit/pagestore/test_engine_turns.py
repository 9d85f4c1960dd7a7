"""No turn of the event loop takes more steps because more pages are staged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvpool.core.policy import KeyspacePolicy, VersionedPolicy, WritePolicy
from kvpool_pagestore.engine import writeback
from kvpool_pagestore.engine.removal import EvictTarget
from tests.fixtures.many_pages import room_for, stage_tiny, steps_of_a_turn
from tests.fixtures.pagestore import KEYSPACE, TENANT, Running, new_world, running_engine
from tests.fixtures.pagestore_calls import open_session
from tests.fixtures.patience import PATIENCE_S

FEW, MANY = 1024, 4096
WHOLE = EvictTarget(keyspace=KEYSPACE, whole_keyspace=True)


async def listed(running: Running) -> int:
    parts = running.engine.listing.chunks(TENANT, b"", most_read=0, pinned_only=False)
    return sum([len(part) async for part in parts])


async def swept(running: Running) -> int:
    return sum(map(len, await running.engine.replication._planner.local.buckets()))


async def evicted(running: Running) -> int:
    return (await running.engine.evicting.evict(TENANT, WHOLE)).page_count


async def previewed(running: Running) -> int:
    return (await running.engine.evicting.preview(TENANT, WHOLE)).chunk_count


async def cleared(running: Running) -> int:
    return await running.engine.clear(TENANT, b"")


async def reconsidered(running: Running) -> int:
    """A policy changes that concerns every page."""
    policy = KeyspacePolicy(write_policy=WritePolicy.SELECTIVE, selective_min_uses=99)
    await running.engine.policies._apply(VersionedPolicy(keyspace=KEYSPACE, policy=policy, version=1))
    return running.engine.gauges().staging_pages


@pytest.mark.parametrize("work", [listed, swept, evicted, previewed, cleared, reconsidered])
async def test_work_on_all_pages_is_done_in_turns_of_one_length(
    work: Callable[[Running], Coroutine[Any, Any, int]],
) -> None:
    async def longest(page_count: int) -> int:
        with new_world() as world:
            async with running_engine(
                world, write_policy="selective", selective_min_uses=100, **room_for(page_count)
            ) as running:
                peer = await open_session(running)
                for number in range(page_count):
                    stage_tiny(running, peer, number)
                steps, found = await steps_of_a_turn(work(running))
                assert found == page_count
                return steps

    assert await longest(MANY) < 1.2 * await longest(FEW)


@pytest.mark.parametrize("work", [cleared, reconsidered])
async def test_a_page_that_goes_between_two_turns_is_left_alone(
    work: Callable[[Running], Coroutine[Any, Any, int]],
) -> None:
    with new_world() as world:
        async with running_engine(world, write_policy="selective", selective_min_uses=100, **room_for(FEW)) as running:
            peer, table = await open_session(running), running.engine.tiers.staging.table
            slots = [stage_tiny(running, peer, number) for number in range(FEW)]

            async def give_up() -> int:
                """In the first pause, of parts that come later."""
                while work is cleared and slots[0].evictable:  # noqa: ASYNC110  # it waits for something else first
                    await asyncio.sleep(0)
                there = [slot for slot in slots[64:] if slot.evictable]
                for slot in there:
                    table.give_up(slot)
                return len(there)

            found, gone = await asyncio.gather(work(running), give_up())
            assert gone and found == FEW - gone
            assert table.ready_count == (0 if work is cleared else FEW - gone)


@pytest.mark.parametrize("is_durable", [True, False])
async def test_a_flush_of_any_number_of_pages_has_turns_of_one_length(
    is_durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pages that were postponed and became durable otherwise, and of pages that are dirty and then dropped."""
    monkeypatch.setattr(writeback, "_PAGES_A_TURN", 256)
    monkeypatch.setattr(writeback, "_POSTPONED_A_TURN", 256)

    async def longest(page_count: int) -> int:
        with new_world() as world:
            async with running_engine(world, linger_ms=int(1000 * PATIENCE_S), **room_for(page_count)) as running:
                peer, tiers = await open_session(running), running.engine.tiers
                assert tiers.write_back is not None and tiers.disk is not None
                for number in range(page_count):
                    slot = stage_tiny(running, peer, number)
                    if is_durable:
                        tiers.write_back.postpone(slot)
                        tiers.disk.map.add(slot.page.key, slot.page.metadata)
                    else:
                        tiers.write_back.enqueue(slot)
                await running.engine.clear(TENANT, b"") if not is_durable else None
                steps, counts = await steps_of_a_turn(running.engine.flush(TENANT, b""))
                assert counts == (page_count if is_durable else 0, 0)
                return steps

    assert await longest(4096) < 1.2 * await longest(1024)
