"""Leases of spans: none is lost, whatever is cancelled, comes too late, and whatever an answer says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.core.cluster import SESSION_FILE_NUMBER
from kvpool.core.errors import (
    ArenaFull,
    DeadlineExceeded,
    InvalidRequest,
    KvPoolError,
    LeaseLost,
    PageCorrupt,
    ServiceUnavailable,
)
from kvpool.core.spans import PageSpan
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert import item_error_to_proto
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.store_peer import KEYSPACE, SEGMENT_BYTES, Response, peer


def span(page_count: int) -> PageSpan:
    """Pages of one chunk."""
    return PageSpan(
        keyspace=KEYSPACE,
        chunk_hashes=b"c" * 16,
        first_chunk_index=0,
        parent_hash=bytes(16),
        group_heads=b"c" * 16,
        positions=np.zeros(page_count, np.int32),
        shards=np.arange(page_count, dtype=np.uint8),
    )


def answer(request: Any, leases: dict[int, int], *, final: bool = True, **parts: Any) -> Response:
    """leases: lease id by page; a lease's slot is at 4096 times its id in segment 3."""
    values: dict[str, Any] = {
        "pages": list(leases),
        "lease_ids": list(leases.values()),
        "segment_ids": [3] * len(leases),
        "offsets": [4096 * lease_id for lease_id in leases.values()],
        "sources": b"\2" * len(leases),
        "final": final,
    }
    return Response(request_id=request.request_id, span_answer=pb.SpanAnswer(**(values | parts)))


async def test_reserved_slots_are_mapped_once_and_have_addresses(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve_span(span(5)))
        request = await stream.next("reserve_span")
        failure = pb.SpanFailure(page=4, error=item_error_to_proto(ArenaFull("full")))
        stream.send(answer(request, {0: 1, 3: 2}, exists=[1], pending=[2], failed=[failure]))
        got = await reserving
        assert (got.granted.pages.tolist(), got.exists.tolist(), got.pending.tolist()) == ([0, 3], [1], [2])
        assert [(page, type(error)) for page, error in got.failed] == [(4, ArenaFull)]
        assert one.memory.fetched == [SESSION_FILE_NUMBER, 3]
        first, second = session.addresses(got.granted).tolist()
        assert second - first == 4096
        with session.slot_view(3, 4096, 100) as view:
            assert first == np.frombuffer(view, np.uint8).ctypes.data
            del view
        session.abort_soon(got.granted.lease_ids)
        assert list((await stream.next("abort")).abort.lease_ids) == [1, 2]
        closing = asyncio.create_task(session.close())
        await stream.next("close")
        stream.end()
        assert await closing
        with pytest.raises(LeaseLost):
            session.addresses(got.granted)


async def test_commits_say_whether_pages_are_sealed_and_name_what_failed(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        committing = asyncio.create_task(session.commit(np.array([7, 8]), sealed=False))
        request = await stream.next("commit")
        assert request.commit.unsealed and list(request.commit.lease_ids) == [7, 8]
        failed = pb.LeaseResult(error=item_error_to_proto(PageCorrupt("sums")))
        results = pb.CommitResponse(results=[failed, pb.LeaseResult()])
        stream.send(Response(request_id=request.request_id, commit=results))
        ((index, error),) = await committing
        assert index == 0 and isinstance(error, PageCorrupt)
        assert await session.commit(np.zeros(0, np.int64)) == []


@pytest.mark.parametrize("how", ["cancelled", "too late"])
async def test_a_reserve_that_nothing_waits_for_gives_its_leases_back(tmp_path: Path, how: str) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        limit_s = 0.02 if how == "too late" else PATIENCE_S
        reserving = asyncio.create_task(session.reserve_span(span(2), timeout_s=limit_s))
        request = await stream.next("reserve_span")
        if how == "cancelled":
            reserving.cancel()
        with pytest.raises((asyncio.CancelledError, DeadlineExceeded)):
            await reserving
        stream.send(answer(request, {0: 8, 1: 9}))
        assert list((await stream.next("abort")).abort.lease_ids) == [8, 9]


async def test_slots_that_cannot_be_mapped_are_given_back(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        one.memory.error = ServiceUnavailable("no socket")
        reserving = asyncio.create_task(session.reserve_span(span(1)))
        stream.send(answer(await stream.next("reserve_span"), {0: 4}))
        with pytest.raises(ServiceUnavailable):
            await reserving
        assert list((await stream.next("abort")).abort.lease_ids) == [4]
        async with session.acquire_span(span(1), wait_s=PATIENCE_S) as answers:
            stream.send(answer(await stream.next("acquire_span"), {0: 5}))
            with pytest.raises(ServiceUnavailable):
                await anext(answers)
        assert list((await stream.next("release")).release.lease_ids) == [5]


async def test_pages_come_as_they_settle_and_what_is_not_taken_is_released(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        async with session.acquire_span(span(5), wait_s=25.0) as answers:
            request = await stream.next("acquire_span")
            assert request.acquire_span.wait_ms == 25_000
            stream.send(answer(request, {1: 11, 2: 12}, final=False))
            first = await anext(answers)
            assert (first.granted.lease_ids.tolist(), first.granted.sources.tolist()) == ([11, 12], [2, 2])
            stream.send(answer(request, {0: 13}, final=False))
            committing = asyncio.create_task(session.commit([77]))  # its answer comes behind that one
            commit = await stream.next("commit")
            results = pb.CommitResponse(results=[pb.LeaseResult()])
            stream.send(Response(request_id=commit.request_id, commit=results))
            assert await committing == []
        assert list((await stream.next("release")).release.lease_ids) == [13], "the others are the caller's"
        stream.send(answer(request, {4: 14}, failed=[pb.SpanFailure(page=3)]))
        assert list((await stream.next("release")).release.lease_ids) == [14]


CONTRADICTIONS: list[tuple[str, dict[int, int], dict[str, Any]]] = [
    ("one length", {0: 5, 1: 6}, {"offsets": [4096]}),
    ("one length", {0: 5, 1: 6}, {"sources": b"\1"}),
    ("names page 2", {0: 5, 2: 6}, {}),
    ("one of 2", {0: 5}, {"failed": [pb.SpanFailure(page=9)]}),
    ("lease id", {0: 5, 1: 0}, {}),
    ("twice", {0: 5}, {"exists": [0, 1]}),
    ("not answered", {1: 5}, {}),
]


@pytest.mark.parametrize(("says", "leases", "parts"), CONTRADICTIONS)
async def test_an_answer_that_contradicts_itself_is_an_error_and_its_leases_go_back(
    tmp_path: Path, says: str, leases: dict[int, int], parts: dict[str, Any]
) -> None:
    named = list(leases.values())
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve_span(span(2)))
        stream.send(answer(await stream.next("reserve_span"), leases, **parts))
        with pytest.raises(InvalidRequest, match=says):
            await reserving
        assert list((await stream.next("abort")).abort.lease_ids) == named
        async with session.acquire_span(span(2), wait_s=PATIENCE_S) as answers:
            stream.send(answer(await stream.next("acquire_span"), leases, **parts))
            with pytest.raises(InvalidRequest, match=says):
                await anext(answers)
        assert list((await stream.next("release")).release.lease_ids) == named


async def test_an_offset_outside_of_its_segment_has_no_address(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        reserving = asyncio.create_task(session.reserve_span(span(1)))
        stream.send(answer(await stream.next("reserve_span"), {0: 1}, offsets=[SEGMENT_BYTES]))
        granted = (await reserving).granted
        with pytest.raises(InvalidRequest, match="outside"):
            session.addresses(granted)


async def test_a_broken_session_ends_what_waits(tmp_path: Path) -> None:
    async with peer(tmp_path) as one:
        session, stream = await one.open()
        async with session.acquire_span(span(2), wait_s=PATIENCE_S) as answers:
            request = await stream.next("acquire_span")
            stream.send(answer(request, {0: 3}, final=False))
            assert (await anext(answers)).granted.count == 1
            stream.end()
            with pytest.raises(KvPoolError):
                await anext(answers)
