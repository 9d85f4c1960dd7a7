"""Write-back, promotion, flush, clear and faults of the disk tier through the engine."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvpool.core.errors import PageCorrupt, StoreFault
from kvpool.core.outcome import Admission, Tier
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.engine.fetch import Source
from tests.fixtures.pagestore import (
    KEYSPACE,
    PAGE_BYTES,
    TENANT,
    Gate,
    fill_page,
    new_world,
    page_key,
    running_engine,
    sealed_page,
)
from tests.fixtures.pagestore_calls import acquire, acquire_one, evict_all, open_session, reserve_item, store, wanted
from tests.fixtures.stored_pages import stored_pages


async def test_committed_pages_become_durable_and_survive_a_restart() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, range(20))
            assert running.engine.incarnation == 1
            count, failed = await running.engine.flush(TENANT, b"")
            assert (count <= 20, failed) == (True, 0)
            assert running.engine.gauges().arena_dirty_bytes == 0
            assert world.index.shards(7, Tier.DISK) == 1
            running.engine.sessions.close(peer)
        async with running_engine(world) as running:
            assert running.engine.incarnation == 2
            assert running.engine.gauges().disk_pages == 20
            peer = await open_session(running)
            results = await acquire(running, peer, [wanted(number) for number in range(20)])
            assert {one.source for one in results} == {Source.DISK}
            for number, one in enumerate(results):
                assert one.grant is not None
                assert running.engine.pages.view(one.grant) == sealed_page(page_key(number))
                assert one.grant.slot.page.metadata.chunk_index == number
            # Promoted pages are clean, and announced.
            assert running.engine.gauges().arena_dirty_bytes == 0
            await eventually(lambda: world.index.shards(7, Tier.STAGING) == 1)
            assert await running.engine.pages.reserve(peer, [reserve_item(7)]) == [Admission.EXISTS]


async def test_a_page_on_disk_alone_exists_for_writers() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), [1])
        async with running_engine(world) as running:
            peer = await open_session(running)
            assert await running.engine.pages.reserve(peer, [reserve_item(1)]) == [Admission.EXISTS]


async def test_durable_pages_are_evicted_when_room_is_needed_and_come_back() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            await evict_all(running, peer)
            assert running.metric("evicted_pages_total", tier="staging") > 0
            assert (await acquire_one(running, peer, wanted(1))).source is Source.DISK


async def test_many_who_want_a_page_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), [1])
        reads: list[PageKey] = []
        inner = world.memory.get_into

        def counting(key: PageKey, destination: memoryview) -> int | None:
            reads.append(key)
            return inner(key, destination)

        monkeypatch.setattr(world.memory, "get_into", counting)
        async with running_engine(world) as running:
            peers = [await open_session(running) for _ in range(5)]
            results = await asyncio.gather(*(acquire_one(running, peer, wanted(1)) for peer in peers))
            assert all(one.source is Source.DISK for one in results)
            assert len(reads) == 1


async def test_a_page_flipped_on_disk_is_a_miss_and_is_dropped_everywhere() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), [1])
        world.memory.damage(page_key(1), 50_000)
        async with running_engine(world) as running:
            peer = await open_session(running)
            world.index.known[(KEYSPACE, page_key(1).chunk_hash, Tier.DISK)] = 1
            answer = await acquire_one(running, peer, wanted(1))
            assert answer.grant is None and isinstance(answer.error, PageCorrupt)
            assert running.metric("verification_failures_total", place="disk") == 1
            assert running.engine.gauges().disk_pages == 0
            await eventually(lambda: world.index.shards(1, Tier.DISK) == 0)
            assert running.engine.gauges().arena_used_bytes == 0
            # It can be stored again, and the deletion of the bad copy does not hit the new one.
            await store(running, peer, [1])
            await running.engine.flush(TENANT, b"")
        async with running_engine(world) as running:
            assert (await acquire_one(running, await open_session(running), wanted(1))).source is Source.DISK


@pytest.mark.slow
async def test_a_failing_disk_costs_durability_but_not_service() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            await running.engine.flush(TENANT, b"")
            world.memory.fault = StoreFault("the disk is gone")
            await store(running, peer, [2])
            with pytest.raises(StoreFault):
                await running.engine.flush(TENANT, b"")
            assert "the disk is gone" in running.engine.disk_fault
            assert (await acquire_one(running, peer, wanted(2))).source is Source.STAGING
            # Pages that cannot be written do not fill the arena for ever.
            for number in range(100, 200):
                assert await store(running, peer, [number]) == [None]
                await eventually(lambda: running.engine.gauges().arena_dirty_bytes == 0)
            world.memory.fault = None
            await eventually(lambda: not running.engine.disk_fault)
            await running.engine.flush(TENANT, b"")
            assert (await acquire_one(running, peer, wanted(1))).grant is not None
            assert running.engine.gauges().disk_pages > 1


async def test_pages_that_failed_hold_no_slots_for_tries_while_the_disk_is_out_of_service() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            world.memory.fault = StoreFault("the disk is gone")
            for number in range(100, 140):
                assert await store(running, peer, [number]) == [None]
                await eventually(lambda: running.engine.gauges().arena_dirty_bytes == 0)
            assert running.metric("written_pages_total", outcome="failed") == 40  # one try each
            world.memory.fault = None
            await eventually(lambda: running.engine.gauges().disk_pages > 0)


async def test_flush_waits_for_what_is_dirty_when_it_is_called() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            world.memory.gate = gate = threading.Event()
            await store(running, peer, [1])
            flushing = asyncio.ensure_future(running.engine.flush(TENANT, b""))
            await eventually(lambda: running.engine.gauges().arena_dirty_bytes > 0)
            assert not flushing.done()
            gate.set()
            assert await flushing == (1, 0)


async def test_the_index_being_down_does_not_fail_a_flush() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            world.index.reachable = False
            await store(running, await open_session(running), [1])
            assert (await running.engine.flush(TENANT, b""))[1] == 0


async def test_clear_drops_a_keyspace_from_staging_disk_and_index() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, [1, 2, 3])
            await running.engine.flush(TENANT, b"")
            held = await acquire_one(running, peer, wanted(1))
            assert held.grant is not None
            assert await running.engine.clear(TENANT, KEYSPACE) == 3
            assert world.index.dropped == [KEYSPACE] and not world.index.known
            assert running.engine.pages.view(held.grant) == sealed_page(page_key(1)), "a leased page went"
            for number in (1, 2, 3):
                assert (await acquire_one(running, peer, wanted(number))).grant is None
            assert running.engine.gauges().arena_used_bytes > 0
            running.engine.pages.release(peer, [held.grant.lease_id])
            assert running.engine.gauges().arena_used_bytes == 0
        async with running_engine(world) as running:
            assert running.engine.gauges().disk_pages == 0


async def test_clear_catches_pages_that_are_being_written() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            world.memory.gate = gate = Gate()
            await store(running, peer, [1])
            await eventually(gate.reached.is_set)
            clearing = asyncio.ensure_future(running.engine.clear(TENANT, b""))
            await eventually(lambda: running.engine.gauges().staging_pages == 0)
            gate.set()
            assert await clearing == 1
            assert stored_pages(world.memory) == []
            assert running.engine.gauges().arena_used_bytes == 0


async def test_another_tenant_clears_and_flushes_nothing_of_ours() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            assert await running.engine.clear("another tenant", b"") == 0
            assert await running.engine.clear("another tenant", KEYSPACE) == 0
            assert await running.engine.flush("another tenant", KEYSPACE) == (0, 0)
            assert (await acquire_one(running, peer, wanted(1))).grant is not None


async def test_the_disk_budget_is_kept_by_giving_up_what_was_unused_longest() -> None:
    with new_world() as world:
        async with running_engine(world, disk_bytes=10 * PAGE_BYTES) as running:
            peer = await open_session(running)
            for number in range(0, 25 * 16, 16):  # chains of one page each
                await store(running, peer, [number])
                await running.engine.flush(TENANT, b"")
                assert sum(page.page_bytes for page in stored_pages(world.memory)) <= 10 * PAGE_BYTES
            assert {page.key for page in stored_pages(world.memory)} == {
                page_key(16 * number) for number in range(15, 25)
            }
            await eventually(
                lambda: not world.index.shards(3 * 16, Tier.DISK) and world.index.shards(24 * 16, Tier.DISK)
            )


async def test_a_commit_goes_on_when_its_caller_leaves() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            (grant,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
            assert isinstance(grant, Grant)
            fill_page(running.engine.pages.view(grant), page_key(1))
            committing = asyncio.ensure_future(running.engine.pages.commit(peer, [grant.lease_id]))
            await asyncio.sleep(0)
            committing.cancel()
            await eventually(lambda: running.engine.gauges().staging_pages == 1)


async def test_an_orderly_end_waits_for_what_is_still_being_verified_and_written() -> None:
    with new_world() as world:
        async with running_engine(world, linger_ms=60_000) as running:
            peer = await open_session(running)
            (grant,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
            assert isinstance(grant, Grant)
            fill_page(running.engine.pages.view(grant), page_key(1))
            committing = asyncio.ensure_future(running.engine.pages.commit(peer, [grant.lease_id]))
            await store(running, peer, [2])
            await committing
            await running.engine.stop(5.0)
            assert {page.key for page in stored_pages(world.memory)} == {page_key(1), page_key(2)}
