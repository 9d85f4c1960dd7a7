"""How a pagestore session ends, and what its successor says of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvpool.core.errors import (
    LeaseLost,
    ServiceUnavailable,
)
from kvpool.core.liveness import LivenessMonitor
from kvpool.testing import eventually
from kvpool.v1 import pagestore_pb2
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.standstill import stood_still
from tests.unit.client.store_peer import (
    SESSION_ID,
    Response,
    acquire_items,
    granted,
    peer,
    reserve_items,
)


async def test_a_broken_session_fails_everything_at_once(tmp_path: Path) -> None:
    async with peer(tmp_path, call_timeout_s=60.0) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve(reserve_items(1)))
        await stream.next("reserve")
        stream.end()
        with pytest.raises(ServiceUnavailable):
            await asyncio.wait_for(reserving, PATIENCE_S)
        assert session.broken.is_set()
        with pytest.raises(ServiceUnavailable):
            await session.commit([1])
        with pytest.raises(ServiceUnavailable):
            async with session.acquire(acquire_items(1), wait_s=1):
                pass
        session.release_soon([1])


async def test_heartbeats_go_out_and_silence_ends_the_session(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open(interval_ms=20)
        beat = await stream.next("heartbeat")
        assert beat.request_id == 0
        await asyncio.wait_for(session.broken.wait(), PATIENCE_S)
        assert session._stream.failure is not None
        assert "nothing was heard" in session._stream.failure.message


async def test_heartbeat_answers_keep_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, beat = list[LivenessMonitor](), LivenessMonitor.beat

    def noted(monitor: LivenessMonitor) -> None:
        beat(monitor)
        heard.append(monitor)

    monkeypatch.setattr(LivenessMonitor, "beat", noted)
    async with peer(tmp_path) as one:
        session, stream = await one.open(interval_ms=10_000)
        for _ in range(20):
            heard.clear()
            stood_still(5.0)
            await stream.next("heartbeat")
            stream.send(Response(heartbeat=pagestore_pb2.SessionHeartbeat()))
            await eventually(lambda: heard)
        assert session._stream.failure is None


async def test_a_client_that_stood_still_does_not_give_up_a_pagestore_that_is_well(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        stood_still(3600.0)
        await eventually(lambda: session._stream.failure is not None or not stream.received.empty())
        assert (await stream.next("heartbeat")).request_id == 0
        assert session._stream.failure is None


async def test_close_unmaps_first_and_waits_for_the_confirmation(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        closing = asyncio.create_task(session.close())
        await stream.next("close")
        assert not one.memory.peer_alive()
        stream.send(Response(closed=pagestore_pb2.SessionClose()))
        stream.end()
        assert await closing
        assert await session.close()


async def test_close_with_living_views_ends_abnormally_and_keeps_the_lock(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve(reserve_items(1)))
        stream.send(granted(await stream.next("reserve"), 1))
        (result,) = await reserving
        assert result.slot is not None
        view = session.slot_view(*result.slot.place)
        assert not await session.close()
        await asyncio.wait_for(stream.ended.wait(), PATIENCE_S)
        assert one.memory.peer_alive()
        view[:1] = b"x"  # still mapped: a running copy does no harm
        del view
        assert not one.memory.peer_alive()
        with pytest.raises(LeaseLost):
            session.slot_view(*result.slot.place)


@pytest.mark.parametrize(("drained", "view_lives"), [(True, False), (False, False), (True, True)])
async def test_reopen_reports_how_the_session_before_ended(tmp_path: Path, drained: bool, view_lives: bool) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve(reserve_items(1)))
        stream.send(granted(await stream.next("reserve"), 1))
        (result,) = await reserving
        assert result.slot is not None
        view = session.slot_view(*result.slot.place) if view_lives else None
        stream.end()
        await session.broken.wait()
        (tmp_path / "session").rename(tmp_path / "old-session")  # each session has a file of its own
        reopening = asyncio.create_task(session.reopen(drained=drained))
        _, request = await one.greet()
        one.sessions.append(await reopening)
        assert request.open.previous_session_id == SESSION_ID
        assert request.open.previous_drained == (drained and not view_lives)
        assert view is None or bytes(view[:1]) == b"\0"


async def test_reopen_can_be_repeated_after_a_failure(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        stream.end()
        await session.broken.wait()
        reopening = asyncio.create_task(session.reopen(drained=True))
        (await one.store.streams.next()).end(ServiceUnavailable("not yet"))
        with pytest.raises(ServiceUnavailable):
            await reopening
        reopening = asyncio.create_task(session.reopen(drained=True))
        _, request = await one.greet()
        one.sessions.append(await reopening)
        assert request.open.previous_drained
