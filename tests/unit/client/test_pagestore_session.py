"""Leases of a pagestore session: none is lost, whatever is cancelled or comes too late."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.channel import open_channel
from kvpool.client.page_items import PageSource, Slot
from kvpool.client.pagestore import PageStoreSession
from kvpool.client.session_stream import SessionStream, SingleReply
from kvpool.core.cluster import SESSION_FILE_NUMBER
from kvpool.core.errors import (
    ArenaFull,
    DeadlineExceeded,
    KeyspaceUnknown,
    PageCorrupt,
    ServiceUnavailable,
    StaleIncarnation,
)
from kvpool.core.outcome import Admission
from kvpool.testing import eventually
from kvpool.v1 import pagestore_pb2
from kvpool.v1.pagestore_pb2_grpc import PageStoreServiceStub
from kvpool.wire.convert import item_error_to_proto
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.store_peer import (
    KEYSPACE,
    SESSION_ID,
    Response,
    acquire_items,
    granted,
    hits,
    peer,
    reserve_items,
    slot,
)


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
        session.slot_view(*first.slot.place)[:5] = b"hello"
        assert os.pread(one.memory.segment_fd, 5, 4096) == b"hello"
        assert one.memory.fetched == [SESSION_FILE_NUMBER, 3]


async def test_commit_names_the_leases_that_failed(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        committing = asyncio.create_task(session.commit([1, 2]))
        request = await stream.next("commit")
        results = [
            pagestore_pb2.LeaseResult(),
            pagestore_pb2.LeaseResult(error=item_error_to_proto(PageCorrupt("sums"))),
        ]
        stream.send(Response(request_id=request.request_id, commit=pagestore_pb2.CommitResponse(results=results)))
        ((index, error),) = await committing
        assert index == 1 and isinstance(error, PageCorrupt)
        assert await session.commit([]) == []


async def test_a_refused_request_leaves_the_session_open(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve(reserve_items(1)))
        request = await stream.next("reserve")
        stream.send(Response(request_id=request.request_id, error=item_error_to_proto(KeyspaceUnknown("k"))))
        with pytest.raises(KeyspaceUnknown):
            await reserving
        assert session._stream.failure is None


@pytest.mark.parametrize("how", ["cancelled", "too late"])
async def test_an_answer_without_a_waiter_returns_its_leases(tmp_path: Path, how: str) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        limit_s = 0.02 if how == "too late" else PATIENCE_S
        reserving = asyncio.create_task(session.reserve(reserve_items(2), timeout_s=limit_s))
        request = await stream.next("reserve")
        if how == "cancelled":
            reserving.cancel()
        with pytest.raises((asyncio.CancelledError, DeadlineExceeded)):
            await reserving
        stream.send(granted(request, 8, 9))
        assert list((await stream.next("abort")).abort.lease_ids) == [8, 9]


async def test_a_caller_cancelled_in_the_instant_of_the_answer_gives_its_leases_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve(reserve_items(1)))
        request = await stream.next("reserve")
        deliver = SingleReply.deliver

        def deliver_and_cancel(reply: SingleReply[Any], response: Any) -> bool:
            delivered = deliver(reply, response)
            reserving.cancel()
            return delivered

        monkeypatch.setattr(SingleReply, "deliver", deliver_and_cancel)
        stream.send(granted(request, 4))
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
        async with session.acquire(acquire_items(3), wait_s=25.0) as results:
            request = await stream.next("acquire")
            assert request.acquire.wait_ms == 25_000
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
        async with session.acquire(acquire_items(4), wait_s=PATIENCE_S) as results:
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
            async with session.acquire(acquire_items(1), wait_s=PATIENCE_S) as results:
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


async def test_reads_that_end_go_with_the_next_request(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        session.release_soon([4])
        session.release_soon([5, 6])
        asked = [asyncio.create_task(session.reserve(reserve_items(1))) for _ in range(2)]
        assert list((await stream.next("reserve")).released_lease_ids) == [4, 5, 6]
        assert list((await stream.next("reserve")).released_lease_ids) == []
        for one_of_them in asked:
            one_of_them.cancel()


async def test_reads_that_end_go_alone_where_no_request_follows(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        session.release_soon([4])
        ended = await stream.next("release")
        assert (ended.request_id, list(ended.release.lease_ids)) == (0, [4])  # 0: not to be answered
        session.release_soon([5])
        closing = asyncio.create_task(session.close())
        assert list((await stream.next("release")).release.lease_ids) == [5]
        await stream.next("close")
        stream.send(Response(closed=pagestore_pb2.SessionClose()))
        stream.end()
        assert await closing


async def test_reads_that_end_go_before_a_request_that_waits_to_be_written(tmp_path: Path) -> None:
    """It may need their slots: the pagestore refuses what is over the session's window."""
    async with peer(tmp_path) as one:
        stream = SessionStream(
            PageStoreServiceStub(open_channel(one.plan.endpoint, one.config)).Session(), one.config, name="s"
        )
        release = pagestore_pb2.ReleaseRequest(lease_ids=[4])
        stream.send(pagestore_pb2.SessionRequest(request_id=1, acquire=pagestore_pb2.AcquireRequest()))
        stream.send_soon(pagestore_pb2.SessionRequest(release=release), first=True)
        other_side = await one.store.streams.next()
        assert list((await other_side.next("release")).release.lease_ids) == [4]
        await other_side.next("acquire")
        await stream.abort("the test is over")
