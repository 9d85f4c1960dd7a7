"""Evicting what an operator names, and listing what a node holds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.errors import InvalidRequest, StoreFault
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import encode_keyspace
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool.core.retention import PINNED_FOREVER_US
from kvpool.testing.page_store import MemoryPageStore
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.stored_pages import StoredPages
from kvpool_pagestore.engine.arena import ArenaSpace
from kvpool_pagestore.engine.disk_tier import DiskTier
from kvpool_pagestore.engine.inventory import ListedChunk
from kvpool_pagestore.engine.removal import Evicted, EvictPreview, EvictTarget
from tests.fixtures.pagestore import (
    KEYSPACE,
    PAGE_BYTES,
    SPEC,
    TENANT,
    Running,
    World,
    metadata,
    new_world,
    page_key,
    running_engine,
)
from tests.fixtures.pagestore_calls import acquire_one, open_session, store, wanted
from tests.fixtures.stored_pages import stored_pages


def hashes(numbers: Sequence[int]) -> list[bytes]:
    return [page_key(number).chunk_hash for number in numbers]


def gone(numbers: Sequence[int], *, staging_only: bool = False, with_pinned: bool = False) -> EvictTarget:
    return EvictTarget(
        keyspace=KEYSPACE, chunk_hashes=hashes(numbers), staging_only=staging_only, with_pinned=with_pinned
    )


def durable(world: World) -> set[int]:
    return {page.metadata.chunk_index for page in stored_pages(world.memory)}


async def listed(running: Running, *, most_read: int = 0, pinned_only: bool = False) -> list[ListedChunk]:
    parts = running.engine.listing.chunks(TENANT, b"", most_read=most_read, pinned_only=pinned_only)
    return [chunk async for part in parts for chunk in part]


async def test_what_is_named_goes_from_staging_disk_and_index_and_nothing_else() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, range(6))
            await running.engine.flush(TENANT, b"")
            assert await running.engine.evicting.evict(TENANT, gone([1, 2, 99])) == Evicted(page_count=2)
            assert durable(world) == {0, 3, 4, 5}, "it is gone from the disk when the call answers"
            assert running.engine.gauges().staging_pages == 4
            assert world.index.shards(1, Tier.DISK) == world.index.shards(1, Tier.STAGING) == 0
            assert world.index.shards(3, Tier.DISK) == 1
            assert (await acquire_one(running, peer, wanted(1))).grant is None
        async with running_engine(world) as running:
            assert {chunk.metadata.chunk_index for chunk in await listed(running)} == {0, 3, 4, 5}


async def test_a_page_that_waits_for_its_write_or_is_read_goes_too() -> None:
    with new_world() as world:
        async with running_engine(world, linger_ms=60_000) as running:
            peer = await open_session(running)
            await store(running, peer, [1, 2])
            held = await acquire_one(running, peer, wanted(1))
            assert held.grant is not None
            assert await running.engine.evicting.evict(TENANT, gone([1, 2])) == Evicted(page_count=2)
            assert (await acquire_one(running, peer, wanted(1))).grant is None
            running.engine.pages.release(peer, [held.grant.lease_id])
            await running.engine.flush(TENANT, b"")
            assert durable(world) == set()
            assert running.engine.gauges().arena_used_bytes == 0


async def test_what_was_given_up_is_not_brought_back_from_the_disk_before_it_is_deleted_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, [1, 2])
            await running.engine.flush(TENANT, b"")
            delete, answers = DiskTier.delete, []

            async def asked_before(disk: DiskTier, keys: Sequence[PageKey]) -> None:
                answers.append(await acquire_one(running, peer, wanted(1)))
                await delete(disk, keys)

            monkeypatch.setattr(DiskTier, "delete", asked_before)
            assert await running.engine.evicting.evict(TENANT, gone([1, 2])) == Evicted(page_count=2)
            assert [answer.grant for answer in answers] == [None], "it is not served from the moment of the call"
            assert running.engine.gauges().staging_pages == 0
            assert (await acquire_one(running, peer, wanted(1))).grant is None


async def test_a_page_given_up_while_a_slot_is_sought_for_it_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            await running.engine.flush(TENANT, b"")
            assert await running.engine.evicting.evict(TENANT, gone([1], staging_only=True)) == Evicted(page_count=1)
            find = ArenaSpace.find

            async def find_later(*arguments: Any) -> Any:
                assert await running.engine.evicting.evict(TENANT, gone([1])) == Evicted(page_count=1)
                return await find(*arguments)

            monkeypatch.setattr(world.memory, "delete_batch", lambda keys: None)  # the bytes are still there
            monkeypatch.setattr(ArenaSpace, "find", find_later)
            assert (await acquire_one(running, peer, wanted(1))).grant is None
            assert running.engine.gauges().arena_used_bytes == 0


async def test_staging_only_gives_up_what_is_durable_and_nothing_that_is_not() -> None:
    with new_world() as world:
        async with running_engine(world, linger_ms=60_000) as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            await running.engine.flush(TENANT, b"")
            await store(running, peer, [2])
            evicted = await running.engine.evicting.evict(TENANT, gone([1, 2], staging_only=True))
            assert evicted == Evicted(page_count=1, undurable_count=1)
            assert world.index.shards(1, Tier.STAGING) == 0 and world.index.shards(1, Tier.DISK) == 1
            assert world.index.shards(2, Tier.STAGING) == 1
            assert (await acquire_one(running, peer, wanted(1))).grant is not None, "it comes back from disk"


async def test_pinned_pages_stay_unless_it_is_asked_for() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), [1, 2])
            await running.engine.flush(TENANT, b"")
            assert await running.engine.retention.pin(TENANT, KEYSPACE, hashes([1]), PINNED_FOREVER_US) == 1
            assert await running.engine.evicting.evict(TENANT, gone([1, 2])) == Evicted(page_count=1, pinned_count=1)
            assert [chunk.metadata.chunk_index for chunk in await listed(running, pinned_only=True)] == [1]
            assert await running.engine.evicting.evict(TENANT, gone([1], with_pinned=True)) == Evicted(page_count=1)
            assert durable(world) == set() and running.engine.gauges().pinned_bytes == 0


@pytest.mark.parametrize("with_pinned", [False, True])
@pytest.mark.parametrize("staging_only", [False, True])
async def test_a_preview_says_what_evicting_then_does_and_changes_nothing(
    staging_only: bool, with_pinned: bool
) -> None:
    wanted_gone = gone([0, 1, 2, 3, 99], staging_only=staging_only, with_pinned=with_pinned)
    with new_world() as world:
        async with running_engine(world, linger_ms=60_000) as running:
            peer = await open_session(running)
            await store(running, peer, [0, 1, 2])
            await running.engine.flush(TENANT, b"")
            await running.engine.evicting.evict(TENANT, gone([2], staging_only=True))
            await store(running, peer, [3])  # not durable
            assert await running.engine.retention.pin(TENANT, KEYSPACE, hashes([1]), PINNED_FOREVER_US) == 1
            before = running.engine.gauges()
            preview = await running.engine.evicting.preview(TENANT, wanted_gone)
            now = replace(running.engine.gauges(), write_back_oldest_seconds=before.write_back_oldest_seconds)
            assert now == before and durable(world) == {0, 1, 2}
            assert await running.engine.evicting.preview("another", wanted_gone) == EvictPreview(evicted=Evicted())
            assert await running.engine.evicting.evict(TENANT, wanted_gone) == preview.evicted
            after = running.engine.gauges()
            assert preview.chunk_count == preview.evicted.page_count, "chunks of one page"
            assert preview.staging_bytes == (before.staging_pages - after.staging_pages) * PAGE_BYTES > 0
            assert preview.disk_bytes == (before.disk_pages - after.disk_pages) * PAGE_BYTES


async def test_a_whole_keyspace_and_the_keyspace_of_another() -> None:
    everything = EvictTarget(keyspace=KEYSPACE, whole_keyspace=True)
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), range(5))
            await running.engine.flush(TENANT, b"")
            assert await running.engine.evicting.evict("another", everything) == Evicted()
            assert (
                await running.engine.evicting.evict(TENANT, EvictTarget(keyspace=b"x" * 16, whole_keyspace=True))
                == Evicted()
            )
            assert await running.engine.evicting.evict(TENANT, everything) == Evicted(page_count=5)
            assert durable(world) == set()


async def test_a_disk_that_fails_is_said_and_nothing_is_served() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            await running.engine.flush(TENANT, b"")
            world.memory.fault = StoreFault("the disk is gone")
            with pytest.raises(StoreFault):
                await running.engine.evicting.evict(TENANT, gone([1]))
            world.memory.fault = None
            assert (await acquire_one(running, peer, wanted(1))).grant is None


def test_what_cannot_be_meant_is_refused() -> None:
    for wrong in (
        {"chunk_hashes": ()},
        {"chunk_hashes": hashes([1]), "whole_keyspace": True},
        {"chunk_hashes": hashes(range(4097))},
    ):
        with pytest.raises(InvalidRequest):
            EvictTarget(keyspace=KEYSPACE, **wrong)


async def test_a_listing_has_tiers_and_metadata_of_the_tenants_own_chunks() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, range(20))
            await running.engine.flush(TENANT, b"")
            await running.engine.evicting.evict(TENANT, gone([3], staging_only=True))
            chunks = {chunk.metadata.chunk_index: chunk for chunk in await listed(running)}
            assert set(chunks) == set(range(20))
            assert (chunks[3].staging_shards, chunks[3].disk_shards) == (0, 1)
            assert (chunks[4].staging_shards, chunks[4].disk_shards) == (1, 1)
            assert chunks[4].chunk_hash == page_key(4).chunk_hash and chunks[4].keyspace == KEYSPACE
            assert [
                part async for part in running.engine.listing.chunks("x", b"", most_read=0, pinned_only=False)
            ] == []


async def test_a_look_at_a_whole_keyspace_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_pagestore.engine.removal._EVICTED_A_TURN", 2 * ShardGrid.of(SPEC).shard_count)
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), range(12))
            await running.engine.flush(TENANT, b"")
            evicting, turn, turns = running.engine.evicting, 0, Counter[int]()
            judge = evicting._judge

            def judged(*arguments: Any) -> bool:
                turns[turn] += 1
                return judge(*arguments)

            async def others() -> None:
                nonlocal turn
                while True:
                    turn += 1
                    await asyncio.sleep(0)

            monkeypatch.setattr(evicting, "_judge", judged)
            background = asyncio.create_task(others())
            preview = await evicting.preview(TENANT, EvictTarget(keyspace=KEYSPACE, whole_keyspace=True))
            background.cancel()
            assert preview.chunk_count == sum(turns.values()) == 12
            assert max(turns.values()) <= 2, "one page of each chunk was stored"


async def test_a_list_of_a_large_disk_looks_at_some_chunks_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, true_parts = 0, DiskMap.name_parts

    def counted(self: DiskMap, row_count: int) -> Iterator[list[bytes]]:
        nonlocal looked
        for names in true_parts(self, row_count):
            looked += len(names)
            yield names

    class ListedStore(MemoryPageStore[StoredPages]):
        """Has found pages whose bytes are never asked for."""

        def keyspaces(self) -> Sequence[bytes]:
            return [encode_keyspace(TENANT, SPEC)]

        def scan(self) -> Iterator[StoredPages]:
            yield StoredPages.of((page_key(number), PAGE_BYTES, metadata(number)) for number in range(2000))

    with new_world(store=ListedStore(StoredPages.of)) as world:
        async with running_engine(world) as running:
            assert running.engine.gauges().disk_pages == 2000
            monkeypatch.setattr(DiskMap, "name_parts", counted)
            parts = running.engine.listing.chunks(TENANT, b"", most_read=0, pinned_only=False)
            first = await anext(parts)
            assert 0 < len(first) <= looked <= 256
            rest = [chunk async for part in parts for chunk in part]
            assert len({chunk.chunk_hash for chunk in [*first, *rest]}) == len(first) + len(rest) == 2000
