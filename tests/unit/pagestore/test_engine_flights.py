"""Pulling pages from other nodes, and waiting together for one page."""

from __future__ import annotations

import asyncio
import threading

from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import DeadlineExceeded, KvPoolError, PageCorrupt, ServiceUnavailable, StaleIncarnation
from kvpool.core.outcome import Admission, Tier
from kvpool.testing import eventually
from kvpool_pagestore.engine.fetch import Source
from kvpool_pagestore.ports import PullItem
from tests.fixtures.pagestore import (
    PAYLOAD_BYTES,
    ScriptedPeers,
    World,
    give,
    new_world,
    page_key,
    remote_source,
    running_engine,
    sealed_page,
)
from tests.fixtures.pagestore_calls import acquire, acquire_one, open_session, reserve_item, store, wanted
from tests.fixtures.patience import PATIENCE_S


def scripted(world: World) -> ScriptedPeers:
    assert isinstance(world.peers, ScriptedPeers)
    return world.peers


async def test_a_pulled_page_is_verified_clean_and_announced() -> None:
    with new_world() as world:
        scripted(world).answer = lambda _, item: give(item)
        async with running_engine(world) as running:
            peer = await open_session(running)
            answer = await acquire_one(running, peer, wanted(1, remote_source(1)))
            assert answer.source is Source.REMOTE and answer.grant is not None
            assert running.engine.pages.view(answer.grant) == sealed_page(page_key(1))
            assert running.engine.gauges().arena_dirty_bytes == 0
            await eventually(lambda: world.index.shards(1, Tier.STAGING) == 1)
            assert await running.engine.pages.reserve(peer, [reserve_item(1)]) == [Admission.EXISTS]
            assert not world.index.stale


async def test_pages_of_one_peer_are_pulled_together() -> None:
    with new_world() as world:
        scripted(world).answer = lambda _, item: give(item)
        async with running_engine(world) as running:
            peer = await open_session(running)
            pages = [wanted(number, remote_source(1 + number % 2)) for number in range(10)]
            results = await acquire(running, peer, pages)
            assert all(one.grant is not None for one in results)
            assert sorted(len(keys) for _, keys in scripted(world).pulls) == [5, 5]


async def test_a_page_that_arrives_broken_is_never_visible_and_the_next_source_is_asked() -> None:
    with new_world() as world:

        def answer(peer: RemoteSource, item: PullItem) -> bool:
            give(item)
            if peer == remote_source(1):
                item.destination[64 + PAYLOAD_BYTES // 2] ^= 1
            return True

        scripted(world).answer = answer
        async with running_engine(world) as running:
            peer = await open_session(running)
            served = await acquire_one(running, peer, wanted(1, remote_source(1), remote_source(2)))
            assert served.source is Source.REMOTE and served.grant is not None
            assert running.engine.pages.view(served.grant) == sealed_page(page_key(1))
            assert running.metric("verification_failures_total", place="peer") == 1
            assert world.index.stale == [(page_key(1), remote_source(1))]
            alone = await acquire_one(running, peer, wanted(2, remote_source(1)))
            assert alone.grant is None and isinstance(alone.error, PageCorrupt)
            assert running.engine.gauges().staging_pages == 1


async def test_a_source_that_has_not_what_it_promised_is_reported() -> None:
    with new_world() as world:

        def answer(peer: RemoteSource, item: PullItem) -> bool | KvPoolError:
            answers: dict[int, bool | KvPoolError] = {
                1: False,
                2: StaleIncarnation("restarted"),
                3: ServiceUnavailable("down"),
            }
            return answers[peer.incarnation]

        scripted(world).answer = answer
        async with running_engine(world) as running:
            peer = await open_session(running)
            missed = await acquire_one(running, peer, wanted(1, remote_source(1), remote_source(2), remote_source(3)))
            assert missed.grant is None and isinstance(missed.error, ServiceUnavailable)
            # A node that is merely out of reach may have the page still.
            assert [one for _, one in world.index.stale] == [remote_source(1), remote_source(2)]
            assert running.engine.gauges().arena_used_bytes == 0


async def test_a_waiter_tries_its_own_source_when_the_leaders_fails() -> None:
    with new_world() as world:
        begun, go = threading.Event(), threading.Event()

        def answer(peer: RemoteSource, item: PullItem) -> bool:
            if peer == remote_source(1):
                begun.set()
                assert go.wait(PATIENCE_S)
                return False
            return give(item)

        scripted(world).answer = answer
        async with running_engine(world) as running:
            leader, waiter = await open_session(running), await open_session(running)
            leading = asyncio.ensure_future(acquire_one(running, leader, wanted(1, remote_source(1))))
            await eventually(begun.is_set)
            waiting = asyncio.ensure_future(acquire_one(running, waiter, wanted(1, remote_source(2))))
            await eventually(lambda: waiter.session.waiting == 1)
            go.set()
            assert (await waiting).source is Source.REMOTE
            # The leader had no other source; whether the waiter's page was there in time is not promised to it.
            await leading
            assert leader.session.waiting == waiter.session.waiting == 0


async def test_a_waiter_outlives_the_leaders_deadline() -> None:
    with new_world() as world:
        begun, go = threading.Event(), threading.Event()

        def answer(_: RemoteSource, item: PullItem) -> bool:
            begun.set()
            assert go.wait(PATIENCE_S)
            return give(item)

        scripted(world).answer = answer
        async with running_engine(world) as running:
            leader, waiter = await open_session(running), await open_session(running)
            leading = asyncio.ensure_future(acquire_one(running, leader, wanted(1, remote_source(1)), wait_s=0.05))
            await eventually(begun.is_set)
            waiting = asyncio.ensure_future(
                acquire_one(running, waiter, wanted(1, remote_source(1)), wait_s=PATIENCE_S)
            )
            late = await leading
            assert late.grant is None and isinstance(late.error, DeadlineExceeded)
            go.set()
            assert (await waiting).grant is not None
            assert len(scripted(world).pulls) == 1
            assert leader.session.lease_count == 0


async def test_the_end_of_a_session_ends_its_waiting_and_leaves_no_lease() -> None:
    with new_world() as world:
        begun, go = threading.Event(), threading.Event()

        def answer(_: RemoteSource, item: PullItem) -> bool:
            begun.set()
            assert go.wait(PATIENCE_S)
            return give(item)

        scripted(world).answer = answer
        async with running_engine(world) as running:
            peer, other = await open_session(running), await open_session(running)
            answers: list[object] = []
            running.engine.pages.acquire(
                peer, [wanted(1, remote_source(1))], wait_s=PATIENCE_S, on_acquired=lambda some, _: answers.extend(some)
            )
            await eventually(begun.is_set)
            running.engine.sessions.close(peer)
            go.set()
            await eventually(lambda: running.engine.gauges().staging_pages == 1)
            assert not answers and running.engine.gauges().leases == 0
            assert (await acquire_one(running, other, wanted(1))).source is Source.STAGING


async def test_a_page_committed_while_it_was_pulled_is_kept_once() -> None:
    with new_world() as world:
        begun, go = threading.Event(), threading.Event()

        def answer(_: RemoteSource, item: PullItem) -> bool:
            begun.set()
            assert go.wait(PATIENCE_S)
            return give(item)

        scripted(world).answer = answer
        async with running_engine(world) as running:
            writer, reader = await open_session(running), await open_session(running)
            (grant,) = await running.engine.pages.reserve(writer, [reserve_item(1)])
            pulling = asyncio.ensure_future(acquire_one(running, reader, wanted(1, remote_source(1))))
            await eventually(begun.is_set)
            assert not isinstance(grant, KvPoolError | Admission)
            running.engine.pages.view(grant)[:] = sealed_page(page_key(1))
            assert await running.engine.pages.commit(writer, [grant.lease_id]) == [None]
            go.set()
            assert (await pulling).grant is not None
            assert running.engine.gauges().staging_pages == 1
            await store(running, writer, [2])


async def test_a_source_of_corrupt_pages_is_asked_to_verify_them() -> None:
    with new_world() as world:

        def answer(peer: RemoteSource, item: PullItem) -> bool:
            give(item)
            if item.key == page_key(1):
                item.destination[64] ^= 1
            return True

        scripted(world).answer = answer
        async with running_engine(world) as running:
            peer = await open_session(running)
            served = await acquire(running, peer, [wanted(number, remote_source(1)) for number in range(3)])
            assert [one.grant is not None for one in served] == [True, False, True]
            await eventually(lambda: scripted(world).verified == [(remote_source(1), [page_key(1)])])
