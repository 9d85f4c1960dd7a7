"""What becomes of pages under each write policy and staging mode, in a running engine."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

import kvpool_pagestore.core.keyspaces as keyspaces_module
import kvpool_pagestore.engine.policies
from kvpool.core.cluster import LocationChange, RemoteSource
from kvpool.core.errors import StoreFault
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool.core.outcome import Tier
from kvpool.core.policy import KeyspacePolicy, StagingMode, VersionedPolicy, WritePolicy
from kvpool.testing.waiting import eventually
from kvpool_pagestore.core.admission import QuotaBook, Shortfall
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.slots import PageRecord, Slot, SlotState
from kvpool_pagestore.engine.fetch import Source
from kvpool_pagestore.engine.policies import Policies
from kvpool_pagestore.ports import PullItem
from tests.fixtures.pagestore import (
    KEYSPACE,
    PAGE_BYTES,
    SPEC,
    TENANT,
    Running,
    ScriptedPeers,
    World,
    fill_page,
    metadata,
    new_world,
    page_key,
    running_engine,
)
from tests.fixtures.pagestore_calls import acquire_one, open_session, store, wanted
from tests.fixtures.stored_pages import stored_pages

LONG_LINGER = {"linger_ms": 60_000}


def versioned(version: int = 1, **fields: object) -> VersionedPolicy:
    return VersionedPolicy(keyspace=KEYSPACE, policy=replace(KeyspacePolicy(), **fields), version=version)  # type: ignore[arg-type]


def stored(world: World) -> set[int]:
    return {int.from_bytes(page.key.chunk_hash[:8], "big") for page in stored_pages(world.memory)}


def used_slots(running: Running) -> int:
    return int(running.engine.gauges().arena_used_bytes)


async def test_write_through_answers_when_the_page_is_on_disk() -> None:
    with new_world() as world:
        async with running_engine(world, write_policy="write-through", **LONG_LINGER) as running:
            peer = await open_session(running)
            gate = world.memory.gate = threading.Event()
            commit = asyncio.ensure_future(store(running, peer, range(3)))
            await eventually(lambda: running.engine.gauges().staging_pages == 3)
            await asyncio.sleep(0)
            assert not commit.done()
            gate.set()
            assert await commit == [None] * 3
            assert stored(world) == {0, 1, 2}


async def test_a_write_through_that_fails_says_so_and_the_page_is_served_and_tried_again() -> None:
    with new_world() as world:
        async with running_engine(world, write_policy="write-through") as running:
            peer = await open_session(running)
            world.memory.fault = StoreFault("the disk is gone")
            assert [type(error) for error in await store(running, peer, range(2))] == [StoreFault] * 2
            found = await acquire_one(running, peer, wanted(1))
            assert (found.source, found.error) == (Source.STAGING, None)
            world.memory.fault = None
            await eventually(lambda: stored(world) == {0, 1})


async def test_a_commit_that_asks_for_durability_waits_whatever_the_policy() -> None:
    with new_world() as world:
        async with running_engine(world, write_policy="staging-only", **LONG_LINGER) as running:
            peer = await open_session(running)
            (answer,) = await running.engine.pages.reserve(
                peer, [PageRecord(key=page_key(1), page_bytes=PAGE_BYTES, metadata=metadata(1))]
            )
            assert isinstance(answer, Grant)
            fill_page(running.engine.pages.view(answer), page_key(1))
            assert await running.engine.pages.commit(peer, [answer.lease_id], durable=True) == [None]
            assert stored(world) == {1}


async def test_a_node_without_disk_cannot_keep_the_word_of_a_write_through_keyspace() -> None:
    with new_world(disk=False) as world:
        world.index.policies[KEYSPACE] = versioned(write_policy=WritePolicy.WRITE_THROUGH)
        async with running_engine(world, disk_bytes=0) as running:
            peer = await open_session(running)
            (error,) = await store(running, peer, [1])
            assert isinstance(error, StoreFault)
            assert (await acquire_one(running, peer, wanted(1))).source is Source.STAGING


async def test_staging_only_leaves_nothing_on_disk_and_serves_what_is_there() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), [7])
            await running.engine.flush(TENANT, b"")
        async with running_engine(world, write_policy="staging-only") as running:
            peer = await open_session(running)
            assert await store(running, peer, range(3)) == [None] * 3
            assert running.engine.dirty_page_count == 0
            assert (await acquire_one(running, peer, wanted(7))).source is Source.DISK
            assert running.metric("committed_pages_total") == 3
        assert stored(world) == {7}


async def test_selective_writes_a_page_at_its_nth_use() -> None:
    with new_world() as world:
        async with running_engine(world, write_policy="selective", selective_min_uses=2) as running:
            peer = await open_session(running)
            await store(running, peer, [1, 2])
            await acquire_one(running, peer, wanted(1))
            assert running.engine.dirty_page_count == 0
            await acquire_one(running, peer, wanted(1))
            await running.engine.flush(TENANT, b"")
            assert stored(world) == {1}
            await acquire_one(running, peer, wanted(1))
            assert running.engine.dirty_page_count == 0, "a durable page is not written again"


async def test_selective_counts_stores_that_found_the_page() -> None:
    with new_world() as world:
        async with running_engine(world, write_policy="selective", selective_min_uses=1) as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            await running.engine.pages.reserve(
                peer, [PageRecord(key=page_key(1), page_bytes=PAGE_BYTES, metadata=metadata(1))]
            )
            await running.engine.flush(TENANT, b"")
            assert stored(world) == {1}


async def test_selective_writes_pages_of_long_prompts_at_once() -> None:
    with new_world() as world:
        async with running_engine(world, write_policy="selective", selective_min_tokens=1000) as running:
            peer = await open_session(running)
            for number, tokens in ((1, 999), (2, 1000)):
                kept = replace(metadata(number), prompt_tokens=tokens)
                (answer,) = await running.engine.pages.reserve(
                    peer, [PageRecord(key=page_key(number), page_bytes=PAGE_BYTES, metadata=kept)]
                )
                assert isinstance(answer, Grant)
                fill_page(running.engine.pages.view(answer), page_key(number))
                await running.engine.pages.commit(peer, [answer.lease_id])
            await running.engine.flush(TENANT, b"")
            assert stored(world) == {2}


async def test_a_selective_page_may_leave_staging_without_ever_being_durable() -> None:
    with new_world() as world:
        async with running_engine(world, write_policy="selective") as running:
            peer = await open_session(running)
            await store(running, peer, [0])
            for start in range(100, 164, 16):
                await store(running, peer, range(start, start + 16))
            assert (await acquire_one(running, peer, wanted(0))).grant is None
            assert stored(world) == set()


@pytest.mark.parametrize("write_policy", ["write-back", "write-through"])
async def test_transit_staging_is_never_announced_and_its_slots_come_back_with_the_disk_write(
    write_policy: str,
) -> None:
    with new_world() as world:
        async with running_engine(world, write_policy=write_policy, staging="transit") as running:
            peer = await open_session(running)
            announced: list[Tier] = []
            known = world.index.announce

            def announce(changes: Sequence[LocationChange]) -> None:
                announced.extend(one.tier for one in changes)
                known(changes)

            world.index.announce = announce  # type: ignore[method-assign]
            await store(running, peer, range(8))
            await running.engine.flush(TENANT, b"")
            assert stored(world) == set(range(8))
            assert set(announced) == {Tier.DISK}
            assert used_slots(running) == 0


async def test_a_transit_slot_waits_for_its_readers_only() -> None:
    with new_world() as world:
        async with running_engine(world, staging="transit") as running:
            peer = await open_session(running)
            gate = world.memory.gate = threading.Event()
            await store(running, peer, [1])
            first = await acquire_one(running, peer, wanted(1))
            assert first.source is Source.STAGING and first.grant is not None
            gate.set()
            await running.engine.flush(TENANT, b"")
            assert first.grant.slot.state is SlotState.READY, "a reader holds it"
            running.engine.pages.release(peer, [first.grant.lease_id])
            assert used_slots(running) == 0


async def test_a_page_read_from_disk_in_transit_is_gone_after_its_last_reader() -> None:
    with new_world() as world:
        async with running_engine(world, staging="transit") as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            await running.engine.flush(TENANT, b"")
            both = [await acquire_one(running, peer, wanted(1)) for _ in range(2)]
            assert [one.source for one in both] == [Source.DISK, Source.STAGING]
            assert world.index.shards(1, Tier.STAGING) == 0
            for one in both:
                assert one.grant is not None and used_slots(running) > 0
                running.engine.pages.release(peer, [one.grant.lease_id])
            assert used_slots(running) == 0
            assert (await acquire_one(running, peer, wanted(1))).source is Source.DISK


async def test_a_transit_page_whose_write_failed_is_kept_until_it_is_durable() -> None:
    with new_world() as world:
        async with running_engine(world, staging="transit") as running:
            peer = await open_session(running)
            world.memory.fault = StoreFault("the disk is gone")
            await store(running, peer, [1])
            await eventually(lambda: running.metric("written_pages_total", outcome="failed") > 0)
            assert (await acquire_one(running, peer, wanted(1))).source is Source.STAGING
            assert used_slots(running) > 0
            world.memory.fault = None
            await eventually(lambda: stored(world) == {1})


async def test_uses_of_a_page_that_the_disk_refuses_do_not_pile_up_in_the_queue() -> None:
    with new_world() as world:
        changes = {"write_policy": "selective", "selective_min_uses": 1, "write_retry_ms": 60_000}
        async with running_engine(world, **changes, write_retry_max_ms=60_000) as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            world.memory.fault = StoreFault("the disk is gone")
            for _ in range(5):
                await acquire_one(running, peer, wanted(1))
                await eventually(lambda: not running.engine.gauges().arena_dirty_bytes)
            assert running.engine.dirty_page_count == 1
            world.memory.fault = None


async def test_a_write_through_page_that_a_peer_brought_first_is_durable_at_its_commit_all_the_same() -> None:
    def answer(source: RemoteSource, item: PullItem) -> bool:
        fill_page(item.destination, item.key)
        return True

    with new_world() as world:
        world.peers = ScriptedPeers(answer)
        async with running_engine(world, write_policy="write-through") as running:
            peer = await open_session(running)
            kept = replace(metadata(1), priority=9)
            (grant,) = await running.engine.pages.reserve(
                peer, [PageRecord(key=page_key(1), page_bytes=PAGE_BYTES, metadata=kept)]
            )
            assert isinstance(grant, Grant)
            fill_page(running.engine.pages.view(grant), page_key(1))
            source = RemoteSource(node_id=b"o" * 16, incarnation=7, bulk_endpoint="owner:1")
            assert (await acquire_one(running, peer, wanted(1, source))).source is Source.REMOTE
            assert await running.engine.pages.commit(peer, [grant.lease_id]) == [None]
            assert [page.metadata.priority for page in stored_pages(world.memory)] == [9]


async def test_a_changed_policy_is_applied_in_bounded_steps_and_announces_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvpool_pagestore.engine.policies, "_PAGES_A_TURN", 4)
    turns: list[int] = []
    looks: list[int] = []  # turns in which a page was looked at
    true_reconsider = Policies._reconsider

    def counted(self: Policies, slot: Slot) -> None:
        looks.append(len(turns))
        true_reconsider(self, slot)

    async def count_turns() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    monkeypatch.setattr(Policies, "_reconsider", counted)
    with new_world() as world:
        async with running_engine(world, write_policy="staging-only") as running:
            peer = await open_session(running)
            await store(running, peer, range(32))
            await eventually(lambda: world.index.shards(31, Tier.STAGING) == 1)
            read = (await acquire_one(running, peer, wanted(31))).grant
            assert read is not None
            world.index.policies[KEYSPACE] = versioned(write_policy=WritePolicy.WRITE_BACK, staging=StagingMode.TRANSIT)
            counting = asyncio.ensure_future(count_turns())
            running.engine.policies.version_seen(1)
            # A page that leaves while the change is applied is taken back, too.
            await eventually(lambda: looks)
            running.engine.pages.release(peer, [], corrupt_ids=[read.lease_id])
            await eventually(lambda: len(looks) >= 31)
            counting.cancel()
            assert max(Counter(looks).values()) <= 4
            await eventually(lambda: not any(world.index.shards(number, Tier.STAGING) for number in range(32)))
            await eventually(lambda: stored(world) >= set(range(31)))


async def test_a_policy_that_changes_nothing_for_pages_looks_at_none(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Slot] = []
    monkeypatch.setattr(Policies, "_reconsider", lambda self, slot: looks.append(slot))
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), range(8))
            world.index.policies[KEYSPACE] = versioned(quota_bytes=1 << 30)
            running.engine.policies.version_seen(1)
            await eventually(lambda: running.engine.policies._version_learnt == 1)
            assert not looks


async def test_policies_of_many_keyspaces_are_loaded_without_looking_at_all_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, looks = 100, 0
    true_shortfalls = QuotaBook.shortfalls

    def counted(self: QuotaBook, keyspace: bytes, more_bytes: int) -> list[Shortfall]:
        nonlocal looks
        looks += 1
        return true_shortfalls(self, keyspace, more_bytes)

    specs = [replace(SPEC, model_id=f"m-{number}") for number in range(count)]
    keyspaces = [(keyspace_id(encode_keyspace(TENANT, spec)), spec) for spec in specs]
    with new_world() as world:
        async with running_engine(world) as running:
            for keyspace, _ in keyspaces:
                world.index.policies[keyspace] = replace(versioned(quota_bytes=1 << 30), keyspace=keyspace)
            for start in range(0, count, 10):
                await open_session(running, keyspaces=keyspaces[start : start + 10])
            monkeypatch.setattr(QuotaBook, "shortfalls", counted)
            running.engine.policies.repeat()
            await running.engine.quotas.enforce()
            assert looks <= 4 * count


async def test_a_keyspace_that_was_forgotten_is_asked_of_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyspaces_module, "USED_LAST_MAX", 4)
    with new_world() as world:
        async with running_engine(world) as running:
            engine = running.engine
            engine.sessions.close(await open_session(running))
            for number in range(10):
                spec = replace(SPEC, model_revision=str(number))
                other = keyspace_id(encode_keyspace(TENANT, spec))
                engine.sessions.close(await open_session(running, keyspaces=((other, spec),)))
            gc.collect()  # sessions that have ended still name them
            world.index.policies[KEYSPACE] = versioned(5, write_policy=WritePolicy.STAGING_ONLY)
            fetch, asked = world.index.fetch_policies, list[Sequence[bytes]]()

            async def fetch_noted(
                keyspaces: Sequence[bytes], known: Sequence[VersionedPolicy]
            ) -> list[VersionedPolicy]:
                found = await fetch(keyspaces, known)
                asked.append(keyspaces)
                return list(found)

            monkeypatch.setattr(world.index, "fetch_policies", fetch_noted)
            engine.policies.version_seen(5)
            await eventually(lambda: asked)
            assert KEYSPACE not in asked[0]
            peer = await open_session(running)
            await store(running, peer, [1])
            await engine.flush(TENANT, b"")
            assert not stored(world)
