"""Reserve, commit, acquire and release through the engine, on a real arena."""

from __future__ import annotations

import pytest

from kvpool.core.errors import (
    ArenaFull,
    InvalidRequest,
    KeyspaceUnknown,
    LeaseLost,
    PageCorrupt,
    SessionBusy,
    SessionUnknown,
    TenantDenied,
)
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool.core.outcome import Admission, Tier
from kvpool.testing import eventually
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.engine.fetch import PageRequest, Source
from kvpool_pagestore.engine.sessions import SessionRequest
from tests.fixtures.pagestore import (
    PAGE_BYTES,
    SPEC,
    TENANT,
    new_world,
    page_key,
    running_engine,
    sealed_page,
)
from tests.fixtures.pagestore_calls import acquire, acquire_one, open_session, reserve_item, store, wanted


async def test_a_committed_page_is_served_from_staging_and_announced() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            assert await store(running, peer, [1, 2]) == [None, None]
            one, missing = await acquire(running, peer, [wanted(1), wanted(9)])
            assert one.grant is not None and one.source is Source.STAGING
            assert running.engine.pages.view(one.grant) == sealed_page(page_key(1))
            assert missing.grant is None and missing.error is None
            await eventually(lambda: world.index.shards(1, Tier.STAGING) == 1)
            running.engine.pages.release(peer, [one.grant.lease_id])
            assert running.engine.gauges().leases == 0
            assert running.metric("acquired_pages_total", source="staging") == 1
            assert running.metric("missed_pages_total", reason="ABSENT") == 1


async def test_a_page_has_one_writer_and_is_invisible_until_its_commit() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            writer, other = await open_session(running), await open_session(running)
            (grant,) = await running.engine.pages.reserve(writer, [reserve_item(1)])
            assert isinstance(grant, Grant)
            assert await running.engine.pages.reserve(other, [reserve_item(1)]) == [Admission.PENDING]
            assert (await acquire_one(running, other, wanted(1))).grant is None
            running.engine.pages.view(grant)[:] = sealed_page(page_key(1))
            assert await running.engine.pages.commit(writer, [grant.lease_id]) == [None]
            assert await running.engine.pages.reserve(other, [reserve_item(1)]) == [Admission.EXISTS]
            assert (await acquire_one(running, other, wanted(1))).grant is not None


async def test_items_are_refused_one_by_one() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            stranger = await running.engine.open_session(SessionRequest(tenant=TENANT), 0)
            wrong_size, outside, good = await running.engine.pages.reserve(
                peer, [reserve_item(1, page_bytes=PAGE_BYTES + 1), reserve_item(1, shard=2), reserve_item(1)]
            )
            assert isinstance(wrong_size, InvalidRequest) and wrong_size.item_index == 0
            assert isinstance(outside, InvalidRequest) and outside.item_index == 1
            assert isinstance(good, Grant)
            (unknown,) = await running.engine.pages.reserve(stranger, [reserve_item(2)])
            assert isinstance(unknown, KeyspaceUnknown)
            assert running.engine.gauges().leases == 1


async def test_another_tenants_keyspace_is_refused() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            theirs = keyspace_id(encode_keyspace("another tenant", SPEC))
            with pytest.raises(TenantDenied):
                await open_session(running, keyspaces=((theirs, SPEC),))
            peer = await open_session(running)
            with pytest.raises(TenantDenied):
                running.engine.sessions.add_keyspace(peer, theirs, SPEC)


async def test_a_page_that_fails_its_sums_at_commit_is_never_visible() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            (grant,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
            assert isinstance(grant, Grant)
            page = bytearray(sealed_page(page_key(1)))
            page[40_000] ^= 1
            running.engine.pages.view(grant)[:] = page
            (error,) = await running.engine.pages.commit(peer, [grant.lease_id])
            assert isinstance(error, PageCorrupt)
            assert (await acquire_one(running, peer, wanted(1))).grant is None
            assert running.engine.gauges().arena_used_bytes == 0
            assert running.metric("verification_failures_total", place="commit") == 1
            (error,) = await running.engine.pages.commit(peer, [grant.lease_id])
            assert isinstance(error, LeaseLost)


async def test_a_page_of_another_key_is_not_committed() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            (grant,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
            assert isinstance(grant, Grant)
            running.engine.pages.view(grant)[:] = sealed_page(page_key(2))
            assert isinstance((await running.engine.pages.commit(peer, [grant.lease_id]))[0], PageCorrupt)


async def test_a_full_arena_with_everything_leased_is_said_per_item_and_passes() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world, arena_bytes=8 << 20, segment_bytes=1 << 20, dirty_bytes=7 << 20) as running:
            peer = await open_session(running)
            slots, held = 0, None
            while True:
                answers = await running.engine.pages.reserve(peer, [reserve_item(slots)])
                if not isinstance(answers[0], Grant):
                    break
                running.engine.pages.view(answers[0])[:] = sealed_page(page_key(slots))
                assert await running.engine.pages.commit(peer, [answers[0].lease_id]) == [None]
                held = (await acquire_one(running, peer, wanted(slots))).grant
                assert held is not None
                slots += 1
            assert isinstance(answers[0], ArenaFull)
            assert running.engine.gauges().arena_segment_bytes <= 8 << 20
            assert held is not None
            running.engine.pages.release(peer, [held.lease_id])
            assert isinstance((await running.engine.pages.reserve(peer, [reserve_item(slots)]))[0], Grant)


async def test_writers_leave_a_share_of_the_arena_to_promotion() -> None:
    with new_world() as world:
        async with running_engine(world, dirty_bytes=3 * PAGE_BYTES) as running:
            peer = await open_session(running)
            answers = await running.engine.pages.reserve(peer, [reserve_item(number) for number in range(4)])
            assert [isinstance(answer, Grant) for answer in answers] == [True, True, False, False]
            assert isinstance(answers[2], ArenaFull)


async def test_a_session_has_a_window() -> None:
    with new_world() as world:
        async with running_engine(world, max_leases=2) as running:
            peer, reader = await open_session(running), await open_session(running)
            answers = await running.engine.pages.reserve(peer, [reserve_item(number) for number in range(3)])
            assert isinstance(answers[2], SessionBusy)
            for grant in answers[:2]:
                assert isinstance(grant, Grant)
                running.engine.pages.abort(peer, [grant.lease_id])
            for number in range(3):
                await store(running, peer, [number])
            results = await acquire(running, reader, [wanted(number) for number in range(3)])
            assert [one.grant is not None for one in results] == [True, True, False]
            assert isinstance(results[2].error, SessionBusy)


async def test_a_page_that_a_reader_found_corrupt_is_dropped_after_its_last_lease() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer, other = await open_session(running), await open_session(running)
            await store(running, peer, [1])
            await running.engine.flush(TENANT, b"")
            first, second = await acquire_one(running, peer, wanted(1)), await acquire_one(running, other, wanted(1))
            assert first.grant is not None and second.grant is not None
            running.engine.pages.release(peer, [], [first.grant.lease_id])
            assert running.metric("verification_failures_total", place="reader") == 1
            assert running.engine.pages.view(second.grant) == sealed_page(page_key(1)), "its slot was reused"
            await eventually(lambda: world.index.shards(1, Tier.STAGING) == 0)
            # The copy on disk is good, so the page comes back from there.
            again = await acquire_one(running, peer, wanted(1))
            assert again.source is Source.DISK
            running.engine.pages.release(other, [second.grant.lease_id])


async def test_calls_of_an_ended_session_are_refused() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            running.engine.sessions.end(peer, "test")
            with pytest.raises(SessionUnknown):
                await running.engine.pages.reserve(peer, [reserve_item(1)])
            with pytest.raises(SessionUnknown):
                await running.engine.pages.commit(peer, [1])


async def test_no_session_reads_or_learns_of_pages_of_a_keyspace_that_it_has_not_named() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), [1])
            stranger = await running.engine.open_session(SessionRequest(tenant="another tenant"), 0)
            for number in (1, 2):  # the one that is there, and one that is not
                answer = await acquire_one(running, stranger, wanted(number))
                assert answer.grant is None and isinstance(answer.error, KeyspaceUnknown)


async def test_a_shard_that_does_not_exist_is_refused_before_anything_begins() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            with pytest.raises(InvalidRequest, match="item 1"):
                await acquire(running, peer, [wanted(1), PageRequest(key=page_key(1, shard=3))])
            assert running.engine.gauges().leases == 0


@pytest.mark.parametrize("disk", [True, False])
async def test_of_pages_said_to_be_corrupt_those_are_dropped_that_do_not_verify(disk: bool) -> None:
    with new_world() as world:
        async with running_engine(world, **({} if disk else {"disk_bytes": 0})) as running:
            peer = await open_session(running)
            await store(running, peer, range(3))
            if disk:
                await running.engine.flush(TENANT, b"")
            read = await acquire_one(running, peer, wanted(1))
            assert read.grant is not None
            running.engine.pages.view(read.grant)[64] ^= 1  # as a fault of the memory would
            keys = [page_key(0), page_key(1), page_key(9), page_key(0, shard=200), page_key(0, keyspace=b"?" * 16)]
            good, corrupt, absent, no_shard, unknown = await running.engine.pages.verify(peer, keys)
            assert good is True and absent is False and no_shard is False and isinstance(unknown, KeyspaceUnknown)
            assert corrupt is True if disk else isinstance(corrupt, PageCorrupt)
            await eventually(lambda: world.index.shards(1, Tier.STAGING) == 0)
            assert [world.index.shards(number, Tier.STAGING) for number in range(3)] == [1, 0, 1]
            assert running.metric("verification_failures_total", place="reader") == 1
