"""Draining: what no other node has is moved, counted once durable there, and nothing is lost however it goes."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvpool.core.errors import ArenaFull, DrainBlocked, Draining, StoreUnavailable
from kvpool.core.outcome import Admission, Tier
from kvpool.testing import eventually
from kvpool_pagestore.engine.drain import DrainProgress, DrainState
from kvpool_pagestore.engine.local_pages import LocalPages
from kvpool_pagestore.engine.removal import EvictTarget
from kvpool_pagestore.ports import PageWrite
from tests.fixtures.movement import Cluster, MemberPlacement, cluster_of, join
from tests.fixtures.pagestore import KEYSPACE, PAGE_BYTES, SLOT_BYTES, TENANT, new_world, page_key, running_engine
from tests.fixtures.pagestore_calls import acquire_one, open_session, reserve_item, store, wanted
from tests.fixtures.patience import PATIENCE_S

PAGES = range(40)
OTHERS = range(1600, 1600 + len(PAGES))


async def fill(cluster: Cluster, at: int = 0, numbers: range = PAGES) -> None:
    running = cluster.members[at].run
    peer = await open_session(running)
    for start in range(numbers.start, numbers.stop, 16):
        part = range(start, min(numbers.stop, start + 16))
        assert await store(running, peer, part) == [None] * len(part)
        await running.engine.flush(TENANT, b"")


async def drained(cluster: Cluster, at: int = 0) -> list[DrainProgress]:
    return [progress async for progress in cluster.members[at].run.engine.drain.watch()]


async def test_a_drained_node_leaves_every_page_durable_elsewhere() -> None:
    pages = range(128)  # eight groups, so that each of the others gets some
    async with cluster_of(3) as cluster:
        await fill(cluster, numbers=pages)
        reported = await drained(cluster)
        assert reported[-1].done and reported[-1].moved_pages == len(pages) and reported[-1].remaining == 0
        assert reported[-1].moved_bytes == cluster.members[1].pushed_bytes + cluster.members[2].pushed_bytes
        assert all(cluster.holders_of(number) in ([1], [2]) for number in pages)
        assert {cluster.holders_of(number)[0] for number in pages} == {1, 2}
        assert not cluster.members[0].alive, "the lease ended"
        # It still serves what it has, takes nothing new, and draining it again finds it done.
        running = cluster.members[0].run
        peer = await open_session(running)
        assert (await acquire_one(running, peer, wanted(3))).grant is not None
        (refused,) = await running.engine.pages.reserve(peer, [reserve_item(1000)])
        assert isinstance(refused, Draining)
        assert [one.done for one in await drained(cluster)] == [True]
        with pytest.raises(DrainBlocked, match="restart"):
            await running.engine.drain.cancel()


async def test_pages_with_another_live_copy_stay_where_they_are() -> None:
    async with cluster_of(3, replication_factor=2) as cluster:
        await fill(cluster)
        await eventually(lambda: all(len(cluster.holders_of(number)) == 2 for number in PAGES))
        reported = await drained(cluster)
        assert reported[-1].moved_pages == 0 and reported[-1].kept_pages == len(PAGES)
        assert all(cluster.holders_of(number) for number in PAGES)


async def test_a_copy_on_a_node_that_is_drained_too_does_not_count() -> None:
    async with cluster_of(3) as cluster:
        await fill(cluster, 0)
        await fill(cluster, 1)
        first, second = (cluster.members[at].run.engine.drain for at in (0, 1))
        both = [aiter(one.watch()) for one in (first, second)]
        for progresses in both:
            await anext(progresses)
        for progresses in both:
            async for _ in progresses:
                pass
        assert all(cluster.holders_of(number) == [2] for number in PAGES)


async def test_what_is_written_while_it_begins_is_moved_too() -> None:
    async with cluster_of(2) as cluster:
        await fill(cluster)
        running = cluster.members[0].run
        peer = await open_session(running)
        assert await store(running, peer, range(100, 116)) == [None] * 16  # dirty yet
        reported = await drained(cluster)
        assert reported[-1].moved_pages == len(PAGES) + 16
        assert all(cluster.holders_of(number) == [1] for number in (*PAGES, *range(100, 116)))


async def test_a_drain_of_the_only_pagestore_says_that_it_is_the_only_one() -> None:
    async with cluster_of(1) as cluster:
        await fill(cluster)
        with pytest.raises(DrainBlocked, match=r"no other pagestore has room .*: there is no other;"):
            await drained(cluster)


async def test_a_drain_without_a_node_with_room_says_so_and_loses_nothing() -> None:
    async with cluster_of(2) as cluster:
        await fill(cluster)
        cluster.members[1].refuse = lambda item: ArenaFull("full")
        with pytest.raises(DrainBlocked, match="no other pagestore has room"):
            await drained(cluster)
        assert cluster.members[0].alive and all(cluster.holders_of(number) == [0] for number in PAGES)
        cluster.members[1].refuse = lambda item: None
        assert (await drained(cluster))[-1].moved_pages == len(PAGES)


async def test_a_node_whose_disk_is_full_is_not_asked_to_give_up_its_own_pages() -> None:
    async with cluster_of(1, disk_bytes=1 << 30) as cluster:
        async with AsyncExitStack() as stack:
            small = await join(cluster, stack, 1, host="small", disk_bytes=64 << 10)
            await fill(cluster)
            with pytest.raises(DrainBlocked, match="room"):
                await drained(cluster)
            assert small.pushed_bytes == 0


async def test_a_node_that_refuses_is_passed_over() -> None:
    async with cluster_of(3) as cluster:
        await fill(cluster)
        cluster.members[1].refuse = lambda item: ArenaFull("full")
        assert (await drained(cluster))[-1].moved_pages == len(PAGES)
        assert all(cluster.holders_of(number) == [2] for number in PAGES)


async def test_leaving_in_the_middle_stops_the_moving_and_the_next_call_goes_on() -> None:
    async with cluster_of(2) as cluster:
        await fill(cluster)
        drain = cluster.members[0].run.engine.drain
        watching = drain.watch()
        async for progress in watching:
            if progress.moved_pages:
                break
        await watching.aclose()
        moved = drain.progress.moved_pages
        assert 0 < moved < len(PAGES) and drain.state is DrainState.DRAINING
        assert cluster.members[0].node.draining and cluster.members[0].alive
        assert (await drained(cluster))[-1].done
        assert all(1 in cluster.holders_of(number) for number in PAGES)


async def test_a_cancelled_drain_takes_the_node_back_into_service() -> None:
    async with cluster_of(2) as cluster:
        await fill(cluster)
        running = cluster.members[0].run
        drain = running.engine.drain
        watching = asyncio.ensure_future(drained(cluster))
        await eventually(lambda: drain.progress.moved_pages > 0)
        await drain.cancel()
        with pytest.raises(DrainBlocked, match="cancelled"):
            await watching
        assert not cluster.members[0].node.draining and cluster.members[0].alive
        peer = await open_session(running)
        assert await store(running, peer, [500]) == [None]
        assert all(cluster.holders_of(number) for number in PAGES)


async def test_a_drain_that_is_leaving_the_index_cannot_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster_of(2) as cluster:
        await fill(cluster)
        member, answered = cluster.members[0], asyncio.Event()
        drain = member.run.engine.drain
        leave = MemberPlacement.leave

        async def leave_late(placement: MemberPlacement) -> None:
            await answered.wait()
            await leave(placement)

        monkeypatch.setattr(MemberPlacement, "leave", leave_late)
        watching = asyncio.create_task(drained(cluster))
        await eventually(lambda: drain.state is DrainState.DRAINED)
        with pytest.raises(DrainBlocked, match="restart"):
            await drain.cancel()
        answered.set()
        await watching
        assert drain.progress.done and not member.alive


async def test_a_drain_that_is_reported_as_done_does_not_go_on_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster_of(2) as cluster:
        drain, saved = cluster.members[0].run.engine.drain, list[bool]()
        memory = cluster.members[0].world.memory
        save_value = memory.save_value  # what a process that was killed now would find

        def save_late(name: str, value: bytes) -> None:
            time.sleep(0.01)  # on a thread: a caller that does not wait for it goes on
            save_value(name, value)
            if name == "draining":
                saved.append(not value)

        monkeypatch.setattr(memory, "save_value", save_late)
        async for progress in drain.watch():
            if progress.done:
                assert saved[-1]
        assert saved == [False, True]


async def test_two_callers_share_one_drain() -> None:
    async with cluster_of(2) as cluster:
        await fill(cluster)
        first, second = await asyncio.gather(drained(cluster), drained(cluster))
        assert first[-1] == second[-1] and first[-1].done
        assert cluster.members[0].run.metric("moved_pages_total", purpose="drain") == len(PAGES)


async def test_an_index_that_is_away_fails_the_drain_and_loses_nothing() -> None:
    async with cluster_of(2) as cluster:
        await fill(cluster)
        cluster.reachable = False
        with pytest.raises(StoreUnavailable):
            await drained(cluster)
        cluster.reachable = True
        assert (await drained(cluster))[-1].done


async def test_pages_that_are_evicted_or_cleared_meanwhile_do_not_matter() -> None:
    async with cluster_of(2) as cluster:
        await fill(cluster)
        running = cluster.members[0].run
        watching = asyncio.ensure_future(drained(cluster))
        await eventually(lambda: running.engine.drain.progress.moved_pages > 0)
        await running.engine.clear(TENANT, KEYSPACE)
        assert (await watching)[-1].done
        assert running.engine.gauges().disk_pages == 0


async def test_pages_that_are_evicted_between_the_question_and_the_copy_are_no_failure() -> None:
    async with cluster_of(2) as cluster:
        await fill(cluster)
        engine, evicted = cluster.members[0].run.engine, list(range(0, len(PAGES), 3))

        def evict(item: PageWrite) -> None:
            """With the first page that arrives, others go: from disk and staging, some of them in the same window."""
            hashes = [page_key(number).chunk_hash for number in evicted if page_key(number) != item.key]
            evicting = engine.evicting.evict(TENANT, EvictTarget(keyspace=KEYSPACE, chunk_hashes=hashes))
            went.append(asyncio.run_coroutine_threadsafe(evicting, loop).result(PATIENCE_S).page_count)
            cluster.members[1].refuse = lambda item: None

        loop, went = asyncio.get_running_loop(), list[int]()
        cluster.members[1].refuse = evict
        assert (await drained(cluster))[-1].done
        assert sum(went) >= len(evicted) - 1
        assert all(cluster.holders_of(number) == [1] for number in PAGES if number not in evicted)
        assert engine.gauges().arena_used_bytes <= len(PAGES) * SLOT_BYTES, "no slot stays pinned"


async def test_a_page_that_is_here_already_but_not_durable_is_made_durable_before_it_counts() -> None:
    async with cluster_of(1) as cluster, AsyncExitStack() as stack:
        await fill(cluster)
        room: dict[str, Any] = {"disk_bytes": len(PAGES) * PAGE_BYTES, "arena_bytes": 128 * SLOT_BYTES}
        second = await join(cluster, stack, 1, host="host-1", **room)
        await fill(cluster, 1)
        await fill(cluster, 1, OTHERS)  # the disk has no room for both, memory has
        await eventually(lambda: all(cluster.holders_of(number) == [0] for number in PAGES))
        others = [page_key(number).chunk_hash for number in OTHERS]
        await second.run.engine.evicting.evict(TENANT, EvictTarget(keyspace=KEYSPACE, chunk_hashes=others))
        assert all(second.has(number, Tier.STAGING) for number in PAGES)
        assert (await drained(cluster))[-1].moved_pages == len(PAGES)
        assert all(cluster.holders_of(number) == [1] for number in PAGES)


async def test_without_an_index_there_is_no_drain() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            with pytest.raises(DrainBlocked, match="no index"):
                async for _ in running.engine.drain.watch():
                    pass
            peer = await open_session(running)
            (grant,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
            assert not isinstance(grant, Draining | Admission)


async def test_a_node_that_stops_in_the_middle_reports_it_to_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster_of(2) as cluster:
        await fill(cluster, numbers=range(4))
        reached, go = asyncio.Event(), asyncio.Event()
        drain = cluster.members[0].run.engine.drain

        async def slow() -> None:
            reached.set()
            await go.wait()

        monkeypatch.setattr(LocalPages, "flush", lambda self: slow())
        watching = asyncio.ensure_future(drained(cluster))
        await asyncio.wait_for(reached.wait(), PATIENCE_S)
        await drain.stop()
        with pytest.raises(Draining, match="shutting down"):
            await asyncio.wait_for(watching, PATIENCE_S)
