"""Quotas in a running engine: hard, paid with pages of one's own, and over restarts."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest

from kvpool.core.errors import KvPoolError, QuotaExceeded
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool.core.page import PageKey
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool.core.retention import PINNED_FOREVER_US
from kvpool.testing import eventually
from kvpool_pagestore.core.events import PolicyChanged
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.ports import PageWrite
from tests.fixtures.many_pages import CHAIN_PAGES, reserve_tiny, room_for, stage_tiny, steps_of
from tests.fixtures.pagestore import (
    KEYSPACE,
    PAGE_BYTES,
    SLOT_BYTES,
    SPEC,
    TENANT,
    Running,
    World,
    fill_page,
    metadata,
    new_world,
    page_key,
    running_engine,
    sealed_page,
)
from tests.fixtures.pagestore_calls import acquire_one, open_session, store, wanted
from tests.fixtures.stored_pages import stored_pages

OTHER_SPEC = replace(SPEC, model_id="other")
OTHER = keyspace_id(encode_keyspace(TENANT, OTHER_SPEC))
STRANGER = keyspace_id(encode_keyspace("stranger", SPEC))
BOTH_BYTES = SLOT_BYTES + PAGE_BYTES  # of a page that is staged and on disk


def used_bytes(running: Running, keyspace: bytes) -> int:
    return running.engine.quotas._book.used_bytes(keyspace)


async def put(running: Running, peer: PeerSession, keyspace: bytes, number: int, **kept: int) -> KvPoolError | None:
    key = PageKey(keyspace, page_key(number).chunk_hash, 0)
    item = PageRecord(key=key, page_bytes=PAGE_BYTES, metadata=replace(metadata(number), **kept))  # type: ignore[arg-type]
    (answer,) = await running.engine.pages.reserve(peer, [item])
    if isinstance(answer, KvPoolError):
        return answer
    assert isinstance(answer, Grant), answer
    fill_page(running.engine.pages.view(answer), key)
    (error,) = await running.engine.pages.commit(peer, [answer.lease_id])
    return error


async def here(running: Running, peer: PeerSession, number: int) -> bool:
    found = await acquire_one(running, peer, wanted(number))
    if found.grant is not None:
        running.engine.pages.release(peer, [found.grant.lease_id])
    return found.grant is not None


def quota(world: World, size_bytes: int, version: int = 1) -> VersionedPolicy:
    reported = VersionedPolicy(keyspace=KEYSPACE, policy=KeyspacePolicy(quota_bytes=size_bytes), version=version)
    world.index.policies[KEYSPACE] = reported
    return reported


async def store_many(running: Running, peer: PeerSession) -> None:
    """300 durable pages of chunks of their own."""
    for first in range(0, 300, 10):
        await store(running, peer, range(16 * first, 16 * (first + 10), 16))
        await running.engine.flush(TENANT, b"")


async def test_a_writer_over_its_keyspaces_quota_gives_up_its_own_oldest_pages() -> None:
    with new_world() as world:
        quota(world, 6 * BOTH_BYTES)
        async with running_engine(world) as running:
            peer = await open_session(running, keyspaces=((KEYSPACE, SPEC), (OTHER, OTHER_SPEC)))
            assert [await put(running, peer, OTHER, number) for number in range(5)] == [None] * 5
            for number in range(30):
                assert await put(running, peer, KEYSPACE, number) is None
                await running.engine.flush(TENANT, b"")
                assert used_bytes(running, KEYSPACE) <= 6 * BOTH_BYTES
            assert used_bytes(running, OTHER) == 5 * BOTH_BYTES, "another keyspace paid"
            assert [await here(running, peer, number) for number in (0, 28, 29)] == [False, True, True]
            assert used_bytes(running, KEYSPACE) <= 6 * BOTH_BYTES, "reading took more than the quota"


async def test_what_is_in_use_is_not_given_up_and_the_page_is_refused() -> None:
    with new_world() as world:
        quota(world, 2 * SLOT_BYTES)
        async with running_engine(world, write_policy="staging-only") as running:
            peer = await open_session(running)
            assert await store(running, peer, [1, 2]) == [None, None]
            leased = [await acquire_one(running, peer, wanted(number)) for number in (1, 2)]
            assert isinstance(await put(running, peer, KEYSPACE, 3), QuotaExceeded)
            assert leased[0].grant is not None
            running.engine.pages.release(peer, [leased[0].grant.lease_id])
            assert await put(running, peer, KEYSPACE, 3) is None
            assert [await here(running, peer, number) for number in (1, 2, 3)] == [False, True, True]


async def test_pinned_pages_are_not_given_up() -> None:
    with new_world() as world:
        quota(world, 2 * SLOT_BYTES)
        async with running_engine(world, write_policy="staging-only") as running:
            peer = await open_session(running)
            assert await put(running, peer, KEYSPACE, 1, pinned_until_us=PINNED_FOREVER_US) is None
            for number in range(2, 9):
                assert await put(running, peer, KEYSPACE, number) is None
            assert [await here(running, peer, number) for number in (1, 7, 8)] == [True, False, True]


async def test_a_tenants_quota_is_that_of_all_its_keyspaces_and_of_no_other_tenant() -> None:
    with new_world() as world:
        async with running_engine(
            world, write_policy="staging-only", tenant_quotas=(f"{TENANT}={4 * SLOT_BYTES}",)
        ) as running:
            stranger = await open_session(running, tenant="stranger", keyspaces=((STRANGER, SPEC),))
            peer = await open_session(running, keyspaces=((KEYSPACE, SPEC), (OTHER, OTHER_SPEC)))
            for number in range(8):
                assert await put(running, stranger, STRANGER, number) is None
                assert await put(running, peer, KEYSPACE if number % 2 else OTHER, number) is None
            used = [used_bytes(running, one) for one in (KEYSPACE, OTHER, STRANGER)]
            assert used[0] + used[1] <= 4 * SLOT_BYTES
            assert used[2] == 8 * SLOT_BYTES


async def test_a_smaller_quota_evicts_down_at_once_and_after_a_restart() -> None:
    with new_world() as world:
        quota(world, 0)
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, range(10))
            await running.engine.flush(TENANT, b"")
            assert used_bytes(running, KEYSPACE) == 10 * BOTH_BYTES
            quota(world, 5 * PAGE_BYTES, version=2)
            running.engine.policies.version_seen(2)
            await eventually(lambda: used_bytes(running, KEYSPACE) <= 5 * PAGE_BYTES)
            await eventually(lambda: len(stored_pages(world.memory)) <= 5)
        async with running_engine(world, tenant_quotas=(f"{TENANT}={2 * PAGE_BYTES}",)) as running:
            assert used_bytes(running, KEYSPACE) <= 2 * PAGE_BYTES
            assert running.engine.gauges().disk_pages == 2 or running.engine.gauges().disk_pages == 1


async def test_a_lowered_quota_gives_up_a_bounded_number_of_pages_in_one_turn_of_the_loop() -> None:
    with new_world() as world:
        quota(world, 0)
        async with running_engine(world, disk_bytes=1 << 30) as running:
            peer = await open_session(running)
            await store_many(running, peer)
            counts = [len(stored_pages(world.memory))]
            assert counts == [300]
            quota(world, PAGE_BYTES, version=2)
            running.engine.policies.version_seen(2)
            while counts[-1]:
                await asyncio.sleep(0)
                counts.append(running.engine.gauges().disk_pages)
            assert max(before - after for before, after in pairwise(counts)) <= 64


async def test_a_writer_gives_up_a_bounded_number_of_pages_after_its_quota_was_lowered() -> None:
    with new_world() as world:
        quota(world, 0)
        async with running_engine(world, disk_bytes=1 << 30) as running:
            peer = await open_session(running)
            await store_many(running, peer)
            running.engine.quotas.take_policy(PolicyChanged(KEYSPACE, KeyspacePolicy(quota_bytes=4 * PAGE_BYTES)))
            asking = asyncio.ensure_future(put(running, peer, KEYSPACE, 16 * 1000))
            counts = [running.engine.gauges().disk_pages]
            while not asking.done():
                await asyncio.sleep(0)
                counts.append(running.engine.gauges().disk_pages)
            # The writer gives up as many in its turn as does what brings the keyspace down to its quota.
            assert max(before - after for before, after in pairwise(counts)) <= 2 * 64
            await asking
            await eventually(lambda: used_bytes(running, KEYSPACE) <= 4 * PAGE_BYTES)
            assert await put(running, peer, KEYSPACE, 16 * 1000) is None


async def test_a_quota_is_kept_over_a_restart_without_an_index() -> None:
    with new_world() as world:
        quota(world, 3 * BOTH_BYTES)
        async with running_engine(world) as running:
            await store(running, await open_session(running), range(3))
        world.index.policies.clear()
        world.index.reachable = False
        async with running_engine(world) as running:
            peer = await open_session(running)
            for number in range(10, 20):
                assert await put(running, peer, KEYSPACE, number) is None
                await running.engine.flush(TENANT, b"")
            assert used_bytes(running, KEYSPACE) <= 3 * BOTH_BYTES


async def test_all_that_was_counted_is_given_back() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, range(5))
            await running.engine.flush(TENANT, b"")
            assert await here(running, peer, 3)
            await running.engine.clear(TENANT, b"")
            assert used_bytes(running, KEYSPACE) == 0


async def test_a_quota_holds_for_what_pages_take_on_disk_not_only_for_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with new_world() as world:
        monkeypatch.setattr(world.memory, "charged_bytes", lambda page_bytes: page_bytes + 4096)
        quota(world, BOTH_BYTES + 4095)
        async with running_engine(world) as running:
            peer = await open_session(running)
            assert await put(running, peer, KEYSPACE, 1) is None
            await running.engine.flush(TENANT, b"")
            assert used_bytes(running, KEYSPACE) <= BOTH_BYTES + 4095
            quota(world, BOTH_BYTES + 4096, version=2)
            running.engine.policies.version_seen(2)
            await eventually(lambda: used_bytes(running, KEYSPACE) == BOTH_BYTES + 4096)


async def test_staging_over_its_quota_gives_up_what_its_eviction_policy_names() -> None:
    """Not the head of a chain because it is the longest unused: without it the rest is worth nothing."""
    with new_world() as world:
        quota(world, 8 * SLOT_BYTES)
        async with running_engine(world, write_policy="staging-only") as running:
            peer = await open_session(running, keyspaces=((KEYSPACE, SPEC), (OTHER, OTHER_SPEC)))
            for number in range(8):
                assert await put(running, peer, KEYSPACE, number) is None
            assert await put(running, peer, OTHER, 1) is None
            assert await put(running, peer, KEYSPACE, 100) is None
            kept = [await here(running, peer, number) for number in range(8)]
            assert kept[:6] == [True] * 6 and not kept[7]
            assert used_bytes(running, OTHER) == SLOT_BYTES


async def test_a_quota_is_kept_by_gaps_where_every_end_of_a_chain_is_in_use() -> None:
    with new_world() as world:
        quota(world, 4 * SLOT_BYTES)
        async with running_engine(world, write_policy="staging-only") as running:
            peer = await open_session(running)
            for number in range(4):
                assert await put(running, peer, KEYSPACE, number) is None
            end = await acquire_one(running, peer, wanted(3))
            assert end.grant is not None
            assert await put(running, peer, KEYSPACE, 100) is None
            assert await here(running, peer, 3)


async def test_pages_of_a_keyspace_beyond_their_number_are_refused_until_another_has_none() -> None:
    both = ((KEYSPACE, SPEC), (OTHER, OTHER_SPEC))
    with new_world() as world:
        async with running_engine(world, max_keyspaces=1) as running:
            peer = await open_session(running, keyspaces=both)
            assert await put(running, peer, KEYSPACE, 0) is None
            assert isinstance(await put(running, peer, OTHER, 1), QuotaExceeded)
            await running.engine.flush(TENANT, b"")
        async with running_engine(world, max_keyspaces=1) as running:  # which finds the page on disk
            peer = await open_session(running, keyspaces=both)
            assert isinstance(await put(running, peer, OTHER, 1), QuotaExceeded)
            await running.engine.clear(TENANT, KEYSPACE)
            assert await put(running, peer, OTHER, 1) is None
            assert isinstance(await put(running, peer, KEYSPACE, 0), QuotaExceeded)


@pytest.mark.parametrize("case", ["nothing on disk", "the last chain on disk", "ends of chains in use"])
async def test_what_a_store_over_a_quota_looks_at_does_not_grow_with_what_is_staged(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_pagestore.engine.policies._SPARE_BYTES", 0)  # give up one page, however many there are

    async def steps(page_count: int) -> int:
        with new_world() as world:
            async with running_engine(
                world, write_policy="selective", selective_min_uses=100, **room_for(page_count)
            ) as running:
                peer, tiers = await open_session(running), running.engine.tiers
                table, disk = tiers.staging.table, tiers.disk
                assert disk is not None
                for number in range(page_count):
                    page = stage_tiny(running, peer, number).page
                    if case == "the last chain on disk" and number >= page_count - CHAIN_PAGES:
                        await disk.write([written(page)])
                    if case == "ends of chains in use" and number % CHAIN_PAGES == CHAIN_PAGES - 1:
                        table.acquire(peer.session, page.key)
                used = used_bytes(running, KEYSPACE)
                running.engine.quotas.take_policy(PolicyChanged(KEYSPACE, KeyspacePolicy(quota_bytes=used)))
                count = steps_of(lambda: reserve_tiny(running, peer, page_count))
                assert table.ready_count == page_count - 1
                return count

    assert await steps(2048) < 1.5 * await steps(256)


def written(page: PageRecord) -> PageWrite:
    return PageWrite(key=page.key, page=memoryview(sealed_page(page.key)), metadata=page.metadata)


async def test_copies_of_what_is_on_disk_go_first_and_leave_gaps_but_never_what_is_staged_alone() -> None:
    with new_world() as world:
        async with running_engine(world, write_policy="selective", selective_min_uses=100, **room_for(64)) as running:
            peer, tiers = await open_session(running), running.engine.tiers
            table, disk = tiers.staging.table, tiers.disk
            assert disk is not None
            pages = [stage_tiny(running, peer, number).page for number in range(64)]
            durable = [page for page in pages if page.metadata.chunk_index in (0, 3, CHAIN_PAGES - 1)]
            assert set((await disk.write([written(page) for page in durable])).values()) == {None}
            lost = durable.pop()
            disk.discard([lost.key])

            def go() -> list[PageKey]:
                with closing(table.space.victims([KEYSPACE], lambda slot: False, only_on_disk=True)) as victims:
                    gone = []
                    for slot in victims:
                        gone.append(slot.page.key)
                        table.give_up(slot)
                    return gone

            gone = go()
            assert sorted(gone) == sorted(page.key for page in durable)
            ends = {page.key for page in durable if page.metadata.chunk_index == CHAIN_PAGES - 1}
            assert set(gone[: len(ends)]) == ends, "gaps come last"
            assert table.find(lost.key) is not None and table.ready_count == 64 - len(durable)
            assert await here(running, peer, 3)
            assert go() == [page_key(3)], "read from the disk, it is a copy again"
