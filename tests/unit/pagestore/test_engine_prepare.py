"""Memory of the arena is in place before it is needed."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from kvpool.core.cluster import SESSION_FILE_NUMBER
from kvpool.core.errors import ArenaFull, InvalidRequest, SessionUnknown
from kvpool.core.keyspace import KeyspaceSpec, encode_keyspace, keyspace_id
from kvpool.testing import eventually
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.engine.sessions import PeerSession
from tests.fixtures.pagestore import (
    PAGE_BYTES,
    SLOT_BYTES,
    SPEC,
    TENANT,
    Running,
    fill_page,
    metadata,
    new_world,
    page_key,
    page_span,
    running_engine,
)
from tests.fixtures.pagestore_calls import acquire_one, open_session, reserve_item, store, store_span, wanted
from tests.fixtures.patience import PATIENCE_S

SEGMENT_BYTES = 8 * SLOT_BYTES
ARENA_BYTES = 64 * SLOT_BYTES


async def prepared(running: Running) -> None:
    running.engine.preparation.start()
    await eventually(lambda: not running.engine.preparation.goes_on)


def map_everything(running: Running, peer: PeerSession) -> int:
    """What a peer that has the whole arena got; its session file."""
    session_fd = running.engine.sessions.descriptor(peer.token, SESSION_FILE_NUMBER).fd
    for segment_id in running.engine.prepare(peer, 0)[0]:
        running.engine.sessions.descriptor(peer.token, segment_id)
    return session_fd


async def other_tenant(running: Running) -> PeerSession:
    keyspaces: Sequence[tuple[bytes, KeyspaceSpec]] = ((keyspace_id(encode_keyspace("other", SPEC)), SPEC),)
    return await open_session(running, tenant="other", keyspaces=keyspaces, wants_arena=True)


async def test_the_whole_budget_is_prepared_and_used_without_another_segment(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    with new_world() as world:
        async with running_engine(world) as running:
            await prepared(running)
            gauges = running.engine.gauges()
            assert gauges.arena_prepared_bytes == gauges.arena_segment_bytes == ARENA_BYTES
            assert gauges.arena_prepare_seconds > 0 and gauges.arena_used_bytes == 0
            assert "the arena is prepared" in caplog.text
            arena, calls = running.arena, list[str]()

            def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any) -> Any:
                    calls.append(name)
                    return method(*arguments)

                return call

            for name in ("create_segment", "prepare_segment", "destroy_segment"):
                monkeypatch.setattr(arena, name, noted(name, getattr(arena, name)))
            peer = await open_session(running)
            assert await store(running, peer, range(32)) == [None] * 32
            assert (await acquire_one(running, peer, wanted(3))).grant is not None
            assert not calls


async def test_a_segment_that_cannot_be_made_is_said_once_and_the_rest_is_made_on_demand(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            make = running.arena.prepare_segment

            def fail(segment_id: int, size_bytes: int, is_wanted: Callable[[], bool]) -> bool:
                if running.engine.preparation.prepared_bytes:
                    raise ArenaFull("no room")
                return make(segment_id, size_bytes, is_wanted)

            running.arena.prepare_segment = fail  # type: ignore[method-assign]
            await prepared(running)
            assert caplog.text.count("no room") == 1

            def all_that_was_begun_is_made() -> bool:
                gauges = running.engine.gauges()
                return 0 < gauges.arena_prepared_bytes == gauges.arena_segment_bytes < ARENA_BYTES

            await eventually(all_that_was_begun_is_made)
            peer = await open_session(running)
            assert await store(running, peer, range(32)) == [None] * 32


async def test_stopping_gives_up_what_is_being_made() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            make, begun = running.arena.prepare_segment, threading.Event()

            def slowly(segment_id: int, size_bytes: int, is_wanted: Callable[[], bool]) -> bool:
                begun.set()
                while is_wanted():
                    pass
                return make(segment_id, size_bytes, is_wanted)

            running.arena.prepare_segment = slowly  # type: ignore[method-assign]
            running.engine.preparation.start()
            await eventually(begun.is_set)
            await running.engine.preparation.stop()
            assert not running.engine.preparation.goes_on
            await eventually(lambda: running.engine.gauges().arena_segment_bytes == 0)


async def test_segments_of_an_earlier_process_count_and_their_room_is_prepared_once_they_are_gone() -> None:
    with new_world() as world:
        with pytest.raises(RuntimeError, match="crash"):
            async with running_engine(world) as running:
                peer = await open_session(running, wants_arena=True)
                await store(running, peer, [1])
                session_id = peer.session.session_id
                session_fd = running.engine.sessions.descriptor(peer.token, SESSION_FILE_NUMBER).fd
                (segment_id,) = running.engine.prepare(peer, 0)[0]
                running.engine.sessions.descriptor(peer.token, segment_id)
                raise RuntimeError("crash")
        async with running_engine(world) as running:
            running.engine.preparation.start()
            await eventually(lambda: not running.engine.preparation.goes_on)
            gauges = running.engine.gauges()
            assert (gauges.arena_quarantined_bytes, gauges.arena_segment_bytes) == (SEGMENT_BYTES, ARENA_BYTES)
            assert gauges.arena_prepared_bytes == ARENA_BYTES - SEGMENT_BYTES
            await open_session(running, previous_session_id=session_id, previous_drained=True)
            await eventually(lambda: running.engine.preparation.prepared_bytes == ARENA_BYTES)
            assert running.engine.gauges().arena_segment_bytes == ARENA_BYTES
            os.close(session_fd)


async def test_a_lone_tenant_gets_all_there_is_and_maps_it_ahead() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running, wants_arena=True)
            assert running.engine.prepare(peer, 0) == ([], False), "nothing is being prepared"
            await prepared(running)
            assert len(running.engine.prepare(peer, 2 * SEGMENT_BYTES)[0]) == 2
            segment_ids, more = running.engine.prepare(peer, 0)
            assert len(segment_ids) == 8 and not more
            running.engine.sessions.descriptor(peer.token, 0)  # the session file comes first
            for segment_id in segment_ids:
                assert running.engine.sessions.descriptor(peer.token, segment_id).size_bytes == SEGMENT_BYTES
            assert await store(running, peer, range(32)) == [None] * 32
            assert set(running.engine.prepare(peer, 0)[0]) == set(segment_ids), "all are in service, as the tenant's"
            assert running.engine.gauges().arena_segment_bytes == 8 * SEGMENT_BYTES, "and no others exist"


async def test_a_tenant_beside_another_gets_half_of_what_is_free() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await prepared(running)
            peer, other = await open_session(running, wants_arena=True), await other_tenant(running)
            assert len(running.engine.prepare(peer, 0)[0]) == 4
            assert len(running.engine.prepare(peer, 0)[0]) == 4
            assert len(running.engine.prepare(other, SEGMENT_BYTES)[0]) == 1


async def test_more_comes_while_the_arena_is_being_prepared() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running, wants_arena=True)
            make, go_on = running.arena.prepare_segment, threading.Event()

            def in_time(segment_id: int, size_bytes: int, is_wanted: Callable[[], bool]) -> bool:
                if running.engine.preparation.prepared_bytes >= 4 * SEGMENT_BYTES:
                    go_on.wait()
                return make(segment_id, size_bytes, is_wanted)

            running.arena.prepare_segment = in_time  # type: ignore[method-assign]
            running.engine.preparation.start()
            assert running.engine.prepare(peer, 0) == ([], True)
            await eventually(lambda: running.engine.preparation.prepared_bytes >= 4 * SEGMENT_BYTES)
            segment_ids, more = running.engine.prepare(peer, 4 * SEGMENT_BYTES)
            assert len(segment_ids) == 4 and not more, "the share is there"
            assert running.engine.prepare(peer, 0)[1]
            go_on.set()
            await eventually(lambda: not running.engine.prepare(peer, 0)[1])
            assert len(running.engine.prepare(peer, 0)[0]) == 8


async def test_only_a_live_session_that_maps_may_ask() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            plain = await open_session(running)
            with pytest.raises(InvalidRequest, match="wants_arena"):
                running.engine.prepare(plain, 0)
            peer = await open_session(running, wants_arena=True)
            with pytest.raises(InvalidRequest, match=">= 0"):
                running.engine.prepare(peer, -1)
            running.engine.sessions.close(peer)
            with pytest.raises(SessionUnknown):
                running.engine.prepare(peer, 0)


async def test_a_second_tenant_stores_while_nothing_prepared_is_left_and_the_first_does_not_map() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await prepared(running)
            peer = await open_session(running, wants_arena=True)
            assert peer.session.tenant == TENANT and len(running.engine.prepare(peer, 0)[0]) == 8
            other = await other_tenant(running)
            (keyspace,) = other.keyspaces
            item = PageRecord(key=page_key(1, keyspace=keyspace), page_bytes=PAGE_BYTES, metadata=metadata(1))
            (answer,) = await running.engine.pages.reserve(other, [item])
            assert isinstance(answer, Grant) and answer.slot.segment.tenant == "other"


async def test_a_store_right_after_a_crash_gets_at_once_what_no_peer_could_map() -> None:
    with new_world() as world:
        with pytest.raises(RuntimeError, match="crash"):
            async with running_engine(world) as running:
                await prepared(running)
                peer = await open_session(running, wants_arena=True)
                session_fd = running.engine.sessions.descriptor(peer.token, SESSION_FILE_NUMBER).fd
                raise RuntimeError("crash")
        async with running_engine(world) as running:
            peer = await open_session(running)
            assert await store(running, peer, range(32)) == [None] * 32
            os.close(session_fd)


async def test_a_store_right_after_a_crash_waits_for_the_memory_of_peers_that_are_gone() -> None:
    with new_world() as world:
        with pytest.raises(RuntimeError, match="crash"):
            async with running_engine(world) as running:
                await prepared(running)
                peer = await open_session(running, wants_arena=True)
                os.close(map_everything(running, peer))
                raise RuntimeError("crash")
        async with running_engine(world) as running:
            gauges = running.engine.gauges()
            assert gauges.arena_quarantined_bytes == gauges.arena_segment_bytes == ARENA_BYTES
            running.engine.preparation.start()
            peer = await open_session(running)
            assert await store(running, peer, range(32)) == [None] * 32


async def test_a_store_right_after_a_crash_is_refused_while_a_peer_lives() -> None:
    with new_world() as world:
        with pytest.raises(RuntimeError, match="crash"):
            async with running_engine(world) as running:
                await prepared(running)
                peer = await open_session(running, wants_arena=True)
                session_fd = map_everything(running, peer)
                raise RuntimeError("crash")
        async with running_engine(world) as running:
            running.engine.preparation.start()
            peer = await open_session(running)
            assert isinstance((await running.engine.pages.reserve(peer, [reserve_item(1)]))[0], ArenaFull)
            os.close(session_fd)
            await eventually(lambda: running.engine.gauges().arena_quarantined_bytes == 0)
            assert await store(running, peer, range(32)) == [None] * 32


async def store_one_by_one(running: Running, peer: PeerSession, numbers: Sequence[int]) -> None:
    for number in numbers:
        assert await store(running, peer, [number]) == [None]


async def store_spans(running: Running, peer: PeerSession, numbers: Sequence[int]) -> None:
    for first in range(numbers[0], numbers[-1] + 1, 3):
        await store_span(running, peer, page_span(first, min(3, numbers[-1] + 1 - first)))


async def test_a_store_waits_for_a_segment_that_is_being_prepared() -> None:
    with new_world() as world:
        async with running_engine(world, prepared_segment_bytes=ARENA_BYTES // 2) as running:
            make, go_on = running.arena.prepare_segment, threading.Event()

            def in_time(segment_id: int, size_bytes: int, is_wanted: Callable[[], bool]) -> bool:
                go_on.wait()
                return make(segment_id, size_bytes, is_wanted)

            running.arena.prepare_segment = in_time  # type: ignore[method-assign]
            running.engine.preparation.start()
            await eventually(lambda: running.engine.gauges().arena_segment_bytes == ARENA_BYTES)
            peer = await open_session(running)
            storing = asyncio.ensure_future(store(running, peer, range(32)))
            await asyncio.wait((storing,), timeout=0)
            go_on.set()
            assert await storing == [None] * 32


@pytest.mark.parametrize("store_all", [store_one_by_one, store_spans])
async def test_no_page_goes_for_another_while_the_last_segment_is_being_made(
    store_all: Callable[[Running, PeerSession, Sequence[int]], Awaitable[None]],
) -> None:
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            peer, engine = await open_session(running), running.engine
            slots, make, go_on = ARENA_BYTES // SLOT_BYTES, running.arena.create_segment, threading.Event()
            assert await store(running, peer, [0]) == [None]

            def in_time(segment_id: int, size_bytes: int) -> None:
                if engine.gauges().arena_segment_bytes == ARENA_BYTES:
                    assert go_on.wait(PATIENCE_S)
                make(segment_id, size_bytes)

            running.arena.create_segment = in_time  # type: ignore[method-assign]
            storing = asyncio.ensure_future(store_all(running, peer, range(1, slots)))
            others = slots - SEGMENT_BYTES // SLOT_BYTES
            await eventually(lambda: engine.gauges().arena_used_bytes >= others * SLOT_BYTES)
            await asyncio.wait((storing,), timeout=0.05)
            assert not storing.done()
            go_on.set()
            await storing
            assert engine.gauges().staging_pages == slots


async def test_a_segment_that_cannot_be_made_whatever_the_reason_leaves_the_others_to_make_room() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            peer, engine, make = await open_session(running), running.engine, running.arena.create_segment
            assert await store(running, peer, [0]) == [None]

            def fail(segment_id: int, size_bytes: int) -> None:
                if engine.gauges().arena_segment_bytes == ARENA_BYTES:
                    raise ValueError("unforeseen")
                make(segment_id, size_bytes)

            running.arena.create_segment = fail  # type: ignore[method-assign]
            await store_one_by_one(running, peer, range(1, 3 * ARENA_BYTES // SLOT_BYTES))


async def test_memory_that_one_of_two_peers_let_go_of_comes_back_while_the_other_lives() -> None:
    with new_world() as world:
        with pytest.raises(RuntimeError, match="crash"):
            async with running_engine(world) as running:
                await prepared(running)
                peers = [await open_session(running, wants_arena=True) for _ in range(2)]
                session_fds = [running.engine.sessions.descriptor(one.token, SESSION_FILE_NUMBER).fd for one in peers]
                segment_ids = running.engine.prepare(peers[0], 0)[0]
                for peer, got in zip(peers, (segment_ids[:5], segment_ids[4:6]), strict=True):
                    for segment_id in got:
                        running.engine.sessions.descriptor(peer.token, segment_id)
                raise RuntimeError("crash")
        async with running_engine(world) as running:
            assert running.engine.gauges().arena_quarantined_bytes == 6 * SEGMENT_BYTES
            running.engine.preparation.start()
            os.close(session_fds[0])
            await eventually(lambda: running.engine.gauges().arena_quarantined_bytes == 2 * SEGMENT_BYTES)
            peer = await open_session(running)
            assert await store(running, peer, range(24)) == [None] * 24
            os.close(session_fds[1])
            await eventually(lambda: running.engine.gauges().arena_quarantined_bytes == 0)
            await eventually(lambda: running.engine.gauges().arena_segment_bytes == ARENA_BYTES)


async def test_after_a_crash_only_what_peers_may_map_is_held_back_and_the_rest_is_prepared_again() -> None:
    with new_world() as world:
        crashed = running_engine(world)
        running = await crashed.__aenter__()
        await prepared(running)
        peer = await open_session(running, wants_arena=True)
        session_fd = running.engine.sessions.descriptor(peer.token, SESSION_FILE_NUMBER).fd
        (grant,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
        assert isinstance(grant, Grant)
        mapped = grant.slot.segment
        fill_page(running.engine.pages.view(grant), page_key(1))
        assert await running.engine.pages.commit(peer, [grant.lease_id]) == [None]
        await running.engine.flush(TENANT, b"")
        running.engine.sessions.descriptor(peer.token, mapped.segment_id)
        # As a kill would leave it: nothing is closed but what the kernel closes.
        running.arena.close(remove=False)
        async with running_engine(world) as again:
            await prepared(again)
            gauges = again.engine.gauges()
            assert gauges.arena_quarantined_bytes == mapped.size_bytes
            assert gauges.arena_prepared_bytes == ARENA_BYTES - mapped.size_bytes
            assert gauges.arena_segment_bytes == ARENA_BYTES
            os.close(session_fd)
            await eventually(lambda: again.engine.gauges().arena_prepared_bytes == ARENA_BYTES)
            assert again.engine.gauges().arena_quarantined_bytes == 0
        await crashed.__aexit__(None, None, None)
