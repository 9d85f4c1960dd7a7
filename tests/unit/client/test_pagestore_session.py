"""A pagestore session against a scripted pagestore, with real segments passed over a real descriptor socket."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.fds import FetchedFd
from kvpool.client.page_items import AcquireItem, PageSource, ReserveItem, Slot
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.core.cluster import SESSION_FILE_NUMBER, PageMetadata
from kvpool.core.errors import (
    ArenaFull,
    DeadlineExceeded,
    KeyspaceUnknown,
    KvPoolError,
    LeaseLost,
    PageCorrupt,
    ServiceUnavailable,
    StaleIncarnation,
)
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from kvpool.v1 import pagestore_pb2, pagestore_pb2_grpc
from kvpool.wire.convert import item_error_to_proto
from tests.unit.client.servers import SPEC, Script, Streams, serve, test_config

KEYSPACE = b"k" * 16
SESSION_ID = b"s" * 16
SEGMENT_BYTES = 1 << 16
Response = pagestore_pb2.SessionResponse


class ScriptedStore(pagestore_pb2_grpc.PageStoreServiceServicer):
    def __init__(self) -> None:
        self.streams = Streams()

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self.streams.run(request_iterator, context):
            yield message


class Memory:
    """What hands out descriptors: a session file with its lock, and segments."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fetched: list[int] = []
        self.error: KvPoolError | None = None
        (directory / "segment").write_bytes(bytes(SEGMENT_BYTES))

    def fetch(self, path: str, token: bytes, number: int, *, timeout_s: float) -> FetchedFd:
        assert (path, token) == ("/descriptors", b"t" * 32)
        self.fetched.append(number)
        if self.error is not None:
            raise self.error
        if number != SESSION_FILE_NUMBER:
            return FetchedFd(os.open(self.directory / "segment", os.O_RDWR), SEGMENT_BYTES, 1)
        fd = os.open(self.directory / "session", os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return FetchedFd(fd, 0, 1)

    def peer_alive(self) -> bool:
        fd = os.open(self.directory / "session", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


class Peer:
    """The session under test and the scripted other side of it."""

    def __init__(self, store: ScriptedStore, memory: Memory, endpoint: str, settings: dict[str, Any]) -> None:
        self.store, self.memory = store, memory
        self.plan = SessionPlan(endpoint=endpoint, peer_name="test", keyspaces=((KEYSPACE, SPEC),))
        self.config = test_config(**settings)
        self.sessions: list[PageStoreSession] = []

    async def greet(self, interval_ms: int = 10_000) -> tuple[Script, Any]:
        """Answer the `open` of the next stream."""
        stream = await self.store.streams.next()
        request = await stream.next("open")
        opened = pagestore_pb2.SessionOpened(
            session_id=SESSION_ID,
            incarnation=5,
            descriptor_socket="/descriptors",
            descriptor_token=b"t" * 32,
            heartbeat_interval_ms=interval_ms,
            max_leases=64,
            node_id=b"n" * 16,
        )
        stream.send(Response(request_id=request.request_id, opened=opened))
        return stream, request

    async def open(self, interval_ms: int = 10_000) -> tuple[PageStoreSession, Script]:
        opening = asyncio.create_task(PageStoreSession.open(self.plan, self.config, fetch=self.memory.fetch))
        stream, _ = await self.greet(interval_ms)
        self.sessions.append(await opening)
        return self.sessions[-1], stream


@asynccontextmanager
async def peer(directory: Path, **settings: Any) -> AsyncGenerator[Peer]:
    store = ScriptedStore()  # type: ignore[abstract]
    async with serve(pagestore_pb2_grpc.add_PageStoreServiceServicer_to_server, store) as (_, endpoint):
        one = Peer(store, Memory(directory), endpoint, {"call_timeout_s": 5.0, **settings})
        try:
            yield one
        finally:
            for session in one.sessions:
                await session._stream.abort("the test is over")


def reserve_items(count: int) -> list[ReserveItem]:
    metadata = PageMetadata(parent_hash=bytes(16), chunk_index=0, group_head_hash=bytes(16))
    return [ReserveItem(PageKey(KEYSPACE, bytes(16), number), 100, metadata) for number in range(count)]


def acquire_items(count: int) -> list[AcquireItem]:
    return [AcquireItem(PageKey(KEYSPACE, bytes(16), number)) for number in range(count)]


def slot(lease_id: int) -> pagestore_pb2.Slot:
    return pagestore_pb2.Slot(lease_id=lease_id, segment_id=3, offset=4096 * lease_id, page_bytes=100)


def granted(request: Any, *lease_ids: int) -> Response:
    results = [
        pagestore_pb2.ReserveResult(admission=pagestore_pb2.ADMISSION_RESERVED, slot=slot(lease)) for lease in lease_ids
    ]
    return Response(request_id=request.request_id, reserve=pagestore_pb2.ReserveResponse(results=results))


def hits(request: Any, first_item: int, *lease_ids: int, final: bool = False) -> Response:
    results = [
        pagestore_pb2.AcquireResult(
            item_index=first_item + at,
            outcome=pagestore_pb2.OUTCOME_HIT,
            slot=slot(lease),
            source=pagestore_pb2.SOURCE_DISK,
        )
        for at, lease in enumerate(lease_ids)
    ]
    return Response(request_id=request.request_id, acquire=pagestore_pb2.AcquireResponse(results=results, final=final))


async def test_open_names_the_peer_and_takes_the_session_file(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        opening = asyncio.create_task(PageStoreSession.open(one.plan, one.config, fetch=one.memory.fetch))
        _, request = await one.greet()
        session = await opening
        one.sessions.append(session)
        assert (request.open.peer_name, request.open.wants_arena) == ("test", True)
        assert request.open.keyspaces[0].keyspace_id == KEYSPACE
        assert (session.session_id, session.incarnation, session.max_leases) == (SESSION_ID, 5, 64)
        assert one.memory.fetched == [SESSION_FILE_NUMBER]
        assert one.memory.peer_alive()


async def test_a_refused_open_raises_and_leaves_nothing(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        opening = asyncio.create_task(PageStoreSession.open(one.plan, one.config, fetch=one.memory.fetch))
        stream = await one.store.streams.next()
        stream.end(StaleIncarnation("restarted"))
        with pytest.raises(StaleIncarnation):
            await opening
        await eventually(lambda: not any("pagestore session" in task.get_name() for task in asyncio.all_tasks()))


async def test_reserved_slots_are_mapped_and_written_bytes_are_seen_by_all(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve(reserve_items(3)))
        request = await stream.next("reserve")
        results = [
            pagestore_pb2.ReserveResult(admission=pagestore_pb2.ADMISSION_RESERVED, slot=slot(1)),
            pagestore_pb2.ReserveResult(admission=pagestore_pb2.ADMISSION_PENDING),
            pagestore_pb2.ReserveResult(
                admission=pagestore_pb2.ADMISSION_REJECTED, error=item_error_to_proto(ArenaFull("full"))
            ),
        ]
        stream.send(Response(request_id=request.request_id, reserve=pagestore_pb2.ReserveResponse(results=results)))
        first, second, third = await reserving
        assert (first.admission, second.admission, third.admission) == (
            Admission.RESERVED,
            Admission.PENDING,
            Admission.REJECTED,
        )
        assert isinstance(third.error, ArenaFull)
        assert first.slot is not None
        session.slot_view(first.slot)[:5] = b"hello"
        assert (tmp_path / "segment").read_bytes()[4096:4101] == b"hello"
        assert one.memory.fetched == [SESSION_FILE_NUMBER, 3]


async def test_commit_answers_per_lease(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        committing = asyncio.create_task(session.commit([1, 2]))
        request = await stream.next("commit")
        results = [
            pagestore_pb2.LeaseResult(),
            pagestore_pb2.LeaseResult(error=item_error_to_proto(PageCorrupt("sums"))),
        ]
        stream.send(Response(request_id=request.request_id, commit=pagestore_pb2.CommitResponse(results=results)))
        good, bad = await committing
        assert good is None
        assert isinstance(bad, PageCorrupt)
        assert await session.commit([]) == []


async def test_a_refused_request_leaves_the_session_open(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve(reserve_items(1)))
        request = await stream.next("reserve")
        stream.send(Response(request_id=request.request_id, error=item_error_to_proto(KeyspaceUnknown("k"))))
        with pytest.raises(KeyspaceUnknown):
            await reserving
        assert session.failure is None


@pytest.mark.parametrize("how", ["cancelled", "too late"])
async def test_an_answer_nobody_waits_for_gives_its_leases_back(tmp_path: Path, how: str) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve(reserve_items(2), timeout_s=0.02 if how == "too late" else 5.0))
        request = await stream.next("reserve")
        if how == "cancelled":
            reserving.cancel()
        with pytest.raises((asyncio.CancelledError, DeadlineExceeded)):
            await reserving
        stream.send(granted(request, 8, 9))
        assert list((await stream.next("abort")).abort.lease_ids) == [8, 9]


async def test_a_caller_cancelled_in_the_instant_of_the_answer_gives_its_leases_back(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve(reserve_items(1)))
        request = await stream.next("reserve")
        (reply, _), *_ = session._stream._stream._pending.values()
        reply.deliver(granted(request, 4))
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving
        assert list((await stream.next("abort")).abort.lease_ids) == [4]


async def test_slots_that_cannot_be_mapped_are_given_back(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        one.memory.error = ServiceUnavailable("no socket")
        reserving = asyncio.create_task(session.reserve(reserve_items(1)))
        stream.send(granted(await stream.next("reserve"), 4))
        with pytest.raises(ServiceUnavailable):
            await reserving
        assert list((await stream.next("abort")).abort.lease_ids) == [4]


async def test_acquired_pages_come_as_they_settle(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        async with session.acquire(acquire_items(3), wait_s=2.5) as results:
            request = await stream.next("acquire")
            assert request.acquire.wait_ms == 2500
            stream.send(hits(request, 1, 11))
            first = await anext(results)
            assert (first.item_index, first.source) == (1, PageSource.DISK)
            assert first.slot == Slot(11, 3, 4096 * 11, 100)
            miss = pagestore_pb2.AcquireResult(
                item_index=0, outcome=pagestore_pb2.OUTCOME_MISS, error=item_error_to_proto(PageCorrupt("flipped"))
            )
            stream.send(Response(request_id=request.request_id, acquire=pagestore_pb2.AcquireResponse(results=[miss])))
            stream.send(hits(request, 2, 12, final=True))
            rest = [result async for result in results]
        assert [(result.item_index, result.slot is not None) for result in rest] == [(0, False), (2, True)]
        assert isinstance(rest[0].error, PageCorrupt)
        releasing = asyncio.create_task(session.release([11], corrupt_lease_ids=[12]))
        request = await stream.next("release")
        assert (list(request.release.lease_ids), list(request.release.corrupt_lease_ids)) == ([11], [12])
        stream.send(Response(request_id=request.request_id, release=pagestore_pb2.ReleaseResponse()))
        await releasing


async def test_leaving_an_acquisition_releases_what_was_not_taken_also_later(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        async with session.acquire(acquire_items(4), wait_s=5) as results:
            request = await stream.next("acquire")
            stream.send(hits(request, 0, 1, 2))
            first = await anext(results)
            assert first.slot is not None
        assert list((await stream.next("release")).release.lease_ids) == [2], "lease 1 is the caller's"
        stream.send(hits(request, 2, 3, 4, final=True))
        assert list((await stream.next("release")).release.lease_ids) == [3, 4]


async def test_a_cancelled_iteration_loses_no_lease(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()

        async def take() -> None:
            async with session.acquire(acquire_items(1), wait_s=5) as results:
                async for _ in results:
                    pass

        taking = asyncio.create_task(take())
        request = await stream.next("acquire")
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        stream.send(hits(request, 0, 6, final=True))
        assert list((await stream.next("release")).release.lease_ids) == [6]


async def test_acquisition_ends_with_the_deadline_when_the_pagestore_does_not_answer(tmp_path: Path) -> None:
    async with peer(tmp_path, call_timeout_s=0.02) as one:
        session, _ = await one.open()
        with pytest.raises(DeadlineExceeded):
            async with session.acquire(acquire_items(1), wait_s=0.01) as results:
                await anext(results)


async def test_a_broken_session_fails_everything_at_once(tmp_path: Path) -> None:
    async with peer(tmp_path, call_timeout_s=60.0) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve(reserve_items(1)))
        await stream.next("reserve")
        stream.end()
        with pytest.raises(ServiceUnavailable):
            await asyncio.wait_for(reserving, 5)
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
        await asyncio.wait_for(session.broken.wait(), 5)
        assert session.failure is not None
        assert "nothing was heard" in session.failure.message


async def test_heartbeat_answers_keep_the_session(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open(interval_ms=20)
        for _ in range(20):
            await stream.next("heartbeat")
            stream.send(Response(heartbeat=pagestore_pb2.SessionHeartbeat()))
        assert session.failure is None


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
        view = session.slot_view(result.slot)
        assert not await session.close()
        await asyncio.wait_for(stream.ended.wait(), 5)
        assert one.memory.peer_alive()
        view[:1] = b"x"  # still mapped: a running copy does no harm
        del view
        assert not one.memory.peer_alive()
        with pytest.raises(LeaseLost):
            session.slot_view(result.slot)


@pytest.mark.parametrize(("drained", "view_lives"), [(True, False), (False, False), (True, True)])
async def test_reopen_tells_the_truth_about_the_session_before(tmp_path: Path, drained: bool, view_lives: bool) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve(reserve_items(1)))
        stream.send(granted(await stream.next("reserve"), 1))
        (result,) = await reserving
        assert result.slot is not None
        view = session.slot_view(result.slot) if view_lives else None
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
