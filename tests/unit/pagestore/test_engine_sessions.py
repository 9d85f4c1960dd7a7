"""How sessions end, and when what they held comes back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

import pytest

from kvpool.core.cluster import SESSION_FILE_NUMBER
from kvpool.core.errors import (
    Draining,
    InvalidRequest,
    LeaseLost,
    Overloaded,
    SessionUnknown,
    StaleIncarnation,
    TenantDenied,
)
from kvpool.core.keyspace import KeyspaceSpec, decode_keyspace, encode_keyspace, keyspace_id
from kvpool.testing import ManualClock, eventually
from kvpool_pagestore.core import keyspaces as keyspaces_module
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.engine.sessions import PeerSession, SessionRequest
from kvpool_pagestore.ports import Workers
from tests.fixtures.pagestore import SLOT_BYTES, SPEC, TENANT, Running, new_world, running_engine
from tests.fixtures.pagestore_calls import acquire_one, open_session, reserve_item, store, wanted

P = ParamSpec("P")
T = TypeVar("T")


def take_session_file(running: Running, peer: PeerSession) -> int:
    """What a peer does first: from now on the lock is its own."""
    descriptor = running.engine.sessions.descriptor(peer.token, SESSION_FILE_NUMBER)
    assert descriptor.give_up
    return descriptor.fd


class WatchedWorkers:
    """Notes when the engine has looked which peers are gone."""

    def __init__(self, workers: Workers) -> None:
        self.threads = workers.threads
        self.looks = 0
        self.gone: list[bytes] = []
        self._workers = workers

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        found = await self._workers.run(function, *args, **kwargs)
        if getattr(function, "__name__", "") == "gone_sessions":
            self.looks += 1
            self.gone += found  # type: ignore[arg-type]  # what that function returns
        return found


async def reserved(running: Running, peer: PeerSession, numbers: Sequence[int]) -> list[Grant]:
    answers = await running.engine.pages.reserve(peer, [reserve_item(number) for number in numbers])
    assert all(isinstance(answer, Grant) for answer in answers)
    return [answer for answer in answers if isinstance(answer, Grant)]


async def test_a_close_gives_everything_back_at_once() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running, wants_arena=True)
            await store(running, peer, [1])
            await acquire_one(running, peer, wanted(1))
            await reserved(running, peer, [2, 3])
            running.engine.sessions.close(peer)
            gauges = running.engine.gauges()
            assert (gauges.leases, gauges.arena_quarantined_bytes) == (0, 0)
            assert gauges.arena_used_bytes == SLOT_BYTES


async def test_slots_of_a_vanished_peer_wait_for_its_process_and_the_grace() -> None:
    clock, workers = ManualClock(), list[WatchedWorkers]()

    def watch(name: str, made: Workers) -> Workers:
        workers.append(WatchedWorkers(made))
        return workers[-1]

    with new_world(clock=clock) as world:
        world.wrap_workers = watch
        async with running_engine(world, quarantine_grace_ms=1000) as running:
            peer, other = await open_session(running, wants_arena=True), await open_session(running)
            fd = take_session_file(running, peer)
            await reserved(running, peer, [1])
            running.engine.sessions.end(peer, "test")
            assert running.engine.gauges().arena_quarantined_bytes == SLOT_BYTES
            # The page is free for another writer, in another slot.
            (grant,) = await reserved(running, other, [1])
            assert grant.slot.index != 0 or grant.slot.segment.segment_id == 0
            clock.advance(3600)  # never by time alone
            before = sum(one.looks for one in workers)
            await eventually(lambda: sum(one.looks for one in workers) > before + 1)
            assert running.engine.gauges().arena_quarantined_bytes == SLOT_BYTES
            os.close(fd)  # the peer's process is gone
            await eventually(lambda: any(one.gone for one in workers))
            assert running.engine.gauges().arena_quarantined_bytes == SLOT_BYTES
            clock.advance(1.0)
            await eventually(lambda: running.engine.gauges().arena_quarantined_bytes == 0)
            assert running.engine.gauges().quarantined_sessions == 0


async def test_a_peer_that_has_drained_gets_its_slots_back_at_once() -> None:
    clock = ManualClock()
    with new_world(clock=clock) as world:
        async with running_engine(world) as running:
            peer = await open_session(running, wants_arena=True)
            fd = take_session_file(running, peer)
            await reserved(running, peer, [1])
            running.engine.sessions.end(peer, "test")
            previous = peer.session.session_id
            await open_session(running, previous_session_id=previous, previous_drained=False)
            assert running.engine.gauges().arena_quarantined_bytes == SLOT_BYTES
            stranger = SessionRequest(tenant="else", previous_session_id=previous, previous_drained=True)
            await running.engine.open_session(stranger, 0)
            assert running.engine.gauges().arena_quarantined_bytes == SLOT_BYTES
            await open_session(running, previous_session_id=previous, previous_drained=True)
            assert running.engine.gauges().arena_quarantined_bytes == 0
            os.close(fd)


async def test_a_peer_that_reconnects_ends_its_earlier_session() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running, wants_arena=True)
            fd = take_session_file(running, peer)
            await reserved(running, peer, [1])
            await open_session(running, previous_session_id=peer.session.session_id, previous_drained=True)
            assert isinstance(peer.ended.result(), SessionUnknown)
            assert running.engine.gauges().arena_quarantined_bytes == 0
            assert running.engine.gauges().sessions == 1
            os.close(fd)


async def test_pages_that_a_vanished_peer_was_reading_stay_visible_but_are_not_evicted() -> None:
    clock = ManualClock()
    with new_world(clock=clock, disk=False) as world:
        async with running_engine(world, arena_bytes=8 * SLOT_BYTES, segment_bytes=4 * SLOT_BYTES) as running:
            peer, other = await open_session(running, wants_arena=True), await open_session(running)
            fd = take_session_file(running, peer)
            await store(running, peer, [1])
            assert (await acquire_one(running, peer, wanted(1))).grant is not None
            running.engine.sessions.end(peer, "test")
            for number in range(100, 120):
                await store(running, other, [number])
            assert (await acquire_one(running, other, wanted(1))).grant is not None
            os.close(fd)


async def test_a_peer_that_never_mapped_anything_holds_nothing_back() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running, wants_arena=True)  # it died before it fetched its session file
            await reserved(running, peer, [1])
            running.engine.sessions.end(peer, "test")
            await eventually(lambda: running.engine.gauges().arena_quarantined_bytes == 0)


async def test_segments_go_only_to_sessions_of_their_tenant_that_hold_their_session_file() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            sessions = running.engine.sessions
            peer = await open_session(running, wants_arena=True)
            stranger = await running.engine.open_session(SessionRequest(tenant="else", wants_arena=True), 0)
            (grant,) = await reserved(running, peer, [1])
            number = grant.slot.segment.segment_id
            with pytest.raises(InvalidRequest):
                sessions.descriptor(peer.token, number)
            for one in (peer, stranger):
                os.close(take_session_file(running, one))
            assert sessions.descriptor(peer.token, number).size_bytes == grant.slot.segment.size_bytes
            with pytest.raises(LeaseLost):
                sessions.descriptor(stranger.token, number)
            with pytest.raises(LeaseLost):
                sessions.descriptor(peer.token, number + 77)
            with pytest.raises(InvalidRequest):
                sessions.descriptor(peer.token, SESSION_FILE_NUMBER)
            sessions.close(peer)
            with pytest.raises(SessionUnknown):
                sessions.descriptor(peer.token, number)


async def test_sessions_are_counted_and_incarnations_checked() -> None:
    with new_world() as world:
        async with running_engine(world, max_sessions=1) as running:
            with pytest.raises(StaleIncarnation):
                await running.engine.open_session(SessionRequest(tenant=TENANT), 99)
            await running.engine.open_session(SessionRequest(tenant=TENANT), running.engine.incarnation)
            with pytest.raises(Overloaded):
                await open_session(running)


async def test_after_a_crash_old_segments_count_until_their_peers_are_gone() -> None:
    with new_world() as world:
        crashed = running_engine(world)
        running = await crashed.__aenter__()
        peer = await open_session(running, wants_arena=True)
        fd = take_session_file(running, peer)
        await store(running, peer, [1])
        await running.engine.flush(TENANT, b"")
        for segment_id in running.engine.prepare(peer, 0)[0]:
            running.engine.sessions.descriptor(peer.token, segment_id)
        old_bytes = running.engine.gauges().arena_segment_bytes
        assert old_bytes > 0
        # As a kill would leave it: nothing is closed but what the kernel closes.
        running.arena.close(remove=False)
        async with running_engine(world) as again:
            gauges = again.engine.gauges()
            assert gauges.arena_segment_bytes == gauges.arena_quarantined_bytes == old_bytes
            other = await open_session(again)
            held = 0
            while isinstance((await again.engine.pages.reserve(other, [reserve_item(100 + held)]))[0], Grant):
                held += 1
            assert again.engine.gauges().arena_segment_bytes <= again.config.arena_bytes
            os.close(fd)
            await eventually(lambda: again.engine.gauges().arena_quarantined_bytes == 0)
            assert again.engine.gauges().arena_segment_bytes <= again.config.arena_bytes - old_bytes
        await crashed.__aexit__(None, None, None)


async def test_a_store_that_shuts_down_takes_no_new_session() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await running.engine.stop(1.0)
            with pytest.raises(Draining):
                await open_session(running)


async def test_keyspaces_of_sessions_that_have_ended_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyspaces_module, "USED_LAST_MAX", 3)
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            await store(running, peer, [1])
            running.engine.sessions.close(peer)
            held = await open_session(running, keyspaces=[_named(0)])
            for number in range(1, 21):
                other = running.engine.sessions.open_internal(TENANT, [_named(number)])
                running.engine.sessions.add_keyspace(other, *_named(-number))
                running.engine.sessions.close(other)
                del other
            known = [decode_keyspace(one)[1] for one in running.engine.inventory.keyspace_encodings()]
            assert {spec.model_revision for spec in known} == {"r", "0", "-19", "20", "-20"}
            running.engine.sessions.close(held)
            peer = await open_session(running)
            assert (await acquire_one(running, peer, wanted(1))).grant is not None


async def test_the_index_is_not_asked_of_ids_that_no_keyspace_has() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            asked = list[bytes]()

            async def learn(keyspaces: Iterable[bytes]) -> None:
                asked.extend(keyspaces)

            with pytest.MonkeyPatch.context() as patch, pytest.raises(TenantDenied):
                patch.setattr(running.engine.policies, "learn", learn)
                await open_session(running, keyspaces=[(bytes(16), SPEC)])
            assert not asked


def _named(number: int) -> tuple[bytes, KeyspaceSpec]:
    spec = replace(SPEC, model_revision=str(number))
    return keyspace_id(encode_keyspace(TENANT, spec)), spec
