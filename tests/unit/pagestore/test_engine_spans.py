"""Spans at the engine: room is made where there is none, retention is durable, what is refused is named by page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest import mock

import pytest

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import ArenaFull, Draining, InvalidRequest, QuotaExceeded, SessionUnknown, StoreFault
from kvpool.core.page import PageKey
from kvpool.core.retention import Retention
from kvpool.core.spans import PageSpan, SpanAnswer
from kvpool.testing import ManualClock
from kvpool.v1 import pagestore_pb2 as pb
from kvpool_pagestore.engine.drain import Drain
from kvpool_pagestore.engine.fetch import Source
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.engine.spans import SOURCE_NUMBERS
from tests.fixtures.pagestore import (
    PAGE_BYTES,
    SLOT_BYTES,
    TENANT,
    Running,
    new_world,
    page_span,
    running_engine,
)
from tests.fixtures.pagestore_calls import acquire, evict_all, open_session, store_span, wanted
from tests.fixtures.pagestore_calls import store as store_items
from tests.fixtures.patience import PATIENCE_S


async def load(running: Running, peer: PeerSession, span: PageSpan) -> list[SpanAnswer]:
    done = asyncio.get_running_loop().create_future()
    answers: list[SpanAnswer] = []

    def on_answer(answer: SpanAnswer, final: bool) -> None:
        answers.append(answer)
        if final:
            done.set_result(None)

    running.engine.spans.acquire(peer, span, wait_s=PATIENCE_S, on_answer=on_answer)
    await done
    return answers


def test_sources_have_the_numbers_of_the_wire() -> None:
    assert SOURCE_NUMBERS == {
        Source.STAGING: pb.SOURCE_STAGING,
        Source.DISK: pb.SOURCE_DISK,
        Source.REMOTE: pb.SOURCE_REMOTE,
    }


async def test_segments_are_made_while_a_span_is_reserved() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            answer = await store_span(running, peer, page_span(0, 30))
            granted = answer.granted
            assert granted.pages.tolist() == list(range(30))
            assert len(set(granted.segment_ids.tolist())) == 4
            assert len(set(zip(granted.segment_ids.tolist(), granted.offsets.tolist(), strict=True))) == 30
            assert running.engine.gauges().arena_segment_bytes <= running.config.arena_bytes


async def test_what_finds_no_room_says_so_and_the_rest_is_granted() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world, arena_bytes=16 * SLOT_BYTES) as running:
            peer, other = await open_session(running), await open_session(running)
            answer = await running.engine.spans.reserve(peer, page_span(0, 20))
            assert answer.granted.count + len(answer.failed) == 20
            assert 0 < answer.granted.count <= 16
            assert {type(error) for _, error in answer.failed} == {ArenaFull}
            again = await running.engine.spans.reserve(other, page_span(0, answer.granted.count))
            assert again.pending.tolist() == answer.granted.pages.tolist()


async def test_pages_on_disk_are_promoted_and_leased_beside_staged_ones() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store_span(running, peer, page_span(0, 4))
            await evict_all(running, peer)
            first = await load(running, peer, page_span(0, 2))
            both = await load(running, peer, page_span(0, 5))
            found = {
                page: source
                for one in both
                for page, source in zip(one.granted.pages.tolist(), one.granted.sources.tolist(), strict=True)
            }
            assert found == {0: 1, 1: 1, 2: 2, 3: 2}
            assert [page for one in both for page, _ in one.failed] == [4]
            leases = [lease_id for one in (*first, *both) for lease_id in one.granted.lease_ids.tolist()]
            assert sorted(leases) == sorted(peer.session.reads)
            running.engine.pages.release(peer, leases)
            assert running.engine.gauges().leases == 0 and peer.session.waiting == 0


async def test_storing_a_span_again_extends_its_retention_by_one_sync_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    with new_world(clock=clock) as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            span = page_span(0, 6, retention=((6, Retention(ttl_ms=1000)),))
            await store_span(running, peer, span)
            await running.engine.flush(TENANT, b"")
            set_metadata, calls = world.memory.set_metadata, list[int]()

            def counted(changes: Sequence[tuple[PageKey, PageMetadata]]) -> None:
                calls.append(len(changes))
                set_metadata(changes)

            monkeypatch.setattr(world.memory, "set_metadata", counted)
            clock.advance(0.5)
            assert (await running.engine.spans.reserve(peer, span)).exists.tolist() == list(range(6))
            assert calls == [6]
            world.memory.fault = StoreFault("the disk is gone")
            clock.advance(0.1)
            answer = await running.engine.spans.reserve(peer, span)
            assert answer.exists.size == 0
            assert [(page, type(error)) for page, error in answer.failed] == [(page, StoreFault) for page in range(6)]
            world.memory.fault = None


async def test_pins_beyond_the_bound_are_refused_page_by_page() -> None:
    with new_world() as world:
        share = 2.5 * PAGE_BYTES / (64 << 20)
        async with running_engine(world, disk_bytes=64 << 20, max_pinned_share=share) as running:
            peer = await open_session(running)
            pinned = Retention(pinned_until_us=1 << 60)
            span = page_span(0, 4, retention=((3, pinned), (1, Retention())))
            answer = await running.engine.spans.reserve(peer, span)
            assert answer.granted.pages.tolist() == [0, 1, 3]
            ((page, error),) = answer.failed
            assert page == 2 and isinstance(error, QuotaExceeded)
            running.engine.pages.abort(peer, answer.granted.lease_ids.tolist())
            assert running.engine.retention.pinned_bytes == 0


async def test_a_node_that_takes_no_pages_names_what_it_has() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store_span(running, peer, page_span(0, 2))
            await running.engine.flush(TENANT, b"")
            with mock.patch.object(Drain, "refuses_pages", True):
                answer = await running.engine.spans.reserve(peer, page_span(0, 3))
            assert answer.exists.tolist() == [0, 1]
            assert [type(error) for _, error in answer.failed] == [Draining]


async def test_a_node_that_takes_no_pages_names_what_is_staged_and_not_yet_on_disk() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store_span(running, peer, page_span(0, 2))
            with mock.patch.object(Drain, "refuses_pages", True):
                answer = await running.engine.spans.reserve(peer, page_span(0, 3))
            assert answer.exists.tolist() == [0, 1]
            assert [type(error) for _, error in answer.failed] == [Draining]


async def test_a_session_that_has_ended_is_granted_nothing() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            running.engine.sessions.end(peer, "the test says so")
            with pytest.raises(SessionUnknown):
                await running.engine.spans.reserve(peer, page_span(0, 1))
            with pytest.raises(SessionUnknown):
                running.engine.spans.acquire(peer, page_span(0, 1), wait_s=1.0, on_answer=lambda answer, final: None)
            assert running.engine.gauges().arena_used_bytes == 0


async def test_a_session_that_ends_while_room_is_made_leaves_no_grant_behind() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            reserving = asyncio.create_task(running.engine.spans.reserve(peer, page_span(0, 3)))
            await asyncio.sleep(0)
            running.engine.sessions.close(peer)
            with pytest.raises(SessionUnknown):
                await reserving
            assert running.engine.gauges().arena_used_bytes == 0


async def test_spans_and_items_name_the_same_pages() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store_items(running, peer, [3, 4])
            await store_span(running, peer, page_span(5, 2))
            (answer,) = await load(running, peer, page_span(3, 4))
            assert answer.granted.count == 4
            assert all(one.grant is not None for one in await acquire(running, peer, [wanted(3), wanted(6)]))
            with pytest.raises(InvalidRequest, match="shards"):
                await running.engine.spans.reserve(peer, page_span(0, 1, shards=page_span(0, 1).shards + 3))
            (still_there,) = await acquire(running, peer, [wanted(5)])
            assert still_there.source is Source.STAGING
