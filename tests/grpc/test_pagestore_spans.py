"""Spans over gRPC with the client library: many pages of a chain in one message, whatever becomes of each of them."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvpool.client.pagestore import PageStoreSession
from kvpool.core.cluster import PageMetadata, RemoteSource
from kvpool.core.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KeyspaceUnknown,
    KvPoolError,
    LeaseLost,
    PageCorrupt,
    ServiceUnavailable,
    SessionBusy,
    SessionUnknown,
)
from kvpool.core.grid import ShardGrid
from kvpool.core.page import page_bytes, verify
from kvpool.core.payload import payload_bytes
from kvpool.core.retention import Retention
from kvpool.core.spans import Bytes, PageSpan, SpanAnswer
from kvpool.testing import ManualClock, eventually
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert import item_error_from_proto
from kvpool_pagestore.ports import PullItem
from tests.fixtures.pagestore import (
    PAGE_BYTES,
    SPEC,
    TENANT,
    ScriptedPeers,
    World,
    fill_page,
    give,
    metadata,
    new_world,
    page_key,
    page_span,
    remote_source,
)
from tests.fixtures.pagestore_server import served
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.raw_peer import raw_peer
from tests.fixtures.stored_pages import stored_pages

STAGING, DISK, REMOTE = 1, 2, 3


def fill(session: PageStoreSession, span: PageSpan, answer: SpanAnswer) -> None:
    granted = answer.granted
    for page, segment_id, offset in zip(granted.pages, granted.segment_ids, granted.offsets, strict=True):
        with session.slot_view(int(segment_id), int(offset), PAGE_BYTES) as view:
            fill_page(view, span.page_key(int(page)))


async def write(session: PageStoreSession, first: int, count: int, **changes: object) -> SpanAnswer:
    span = page_span(first, count, **changes)
    answer = await session.reserve_span(span)
    fill(session, span, answer)
    assert await session.commit(answer.granted.lease_ids) == []
    return answer


async def read(session: PageStoreSession, span: PageSpan, wait_s: float = PATIENCE_S) -> list[SpanAnswer]:
    """All answers; the leases are held."""
    async with session.acquire_span(span, wait_s=wait_s) as answers:
        return [answer async for answer in answers]


def sources(answers: Sequence[SpanAnswer], page_count: int) -> list[int]:
    """By page; 0: not granted."""
    found = [0] * page_count
    for answer in answers:
        for page, source in zip(answer.granted.pages, answer.granted.sources, strict=True):
            found[int(page)] = int(source)
    return found


async def release(session: PageStoreSession, answers: Sequence[SpanAnswer]) -> None:
    for answer in answers:
        await session.release(answer.granted.lease_ids)


def refusals(answers: Sequence[SpanAnswer]) -> dict[int, KvPoolError | None]:
    return {page: error for answer in answers for page, error in answer.failed}


async def test_pages_written_as_a_span_are_read_as_one_in_a_single_answer() -> None:
    with new_world() as world:
        async with served(world) as store:
            writer, reader = await store.open(), await store.open()
            written = await write(writer, 3, 20)
            assert written.granted.pages.tolist() == list(range(20))
            assert not written.granted.sources.any()
            span = page_span(3, 20)
            (answer,) = await read(reader, span)
            assert sources([answer], 20) == [STAGING] * 20
            addresses = reader.addresses(answer.granted)
            for page, address in zip(answer.granted.pages.tolist(), addresses.tolist(), strict=True):
                assert verify(ctypes.string_at(address, PAGE_BYTES), span.page_key(page), SPEC.codec) is None
            assert store.running.engine.gauges().leases == 20
            assert store.running.metric("acquired_pages_total", source="staging") == 20
            assert store.running.metric("acquired_bytes_total", source="staging") == 20 * PAGE_BYTES
            assert store.running.metric("reserved_pages_total", admission="RESERVED") == 20
            await reader.release(answer.granted.lease_ids)
            await eventually(lambda: store.running.engine.gauges().leases == 0)
            assert await writer.close() and await reader.close()


async def test_items_and_spans_mean_the_same_pages_and_metadata() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open()
            await write(session, 14, 4, retention=((1, Retention()), (3, Retention(priority=7))), prompt_tokens=99)
            await store.running.engine.flush(TENANT, b"")
            kept: dict[int, PageMetadata] = {
                one.metadata.chunk_index: one.metadata for one in stored_pages(world.memory)
            }
            assert sorted(kept) == [14, 15, 16, 17]
            for number, one in kept.items():
                assert (one.parent_hash, one.group_head_hash) == (
                    metadata(number).parent_hash,
                    metadata(number).group_head_hash,
                )
                assert (one.priority, one.prompt_tokens) == (0 if number == 14 else 7, 99)
            assert {one.key for one in stored_pages(world.memory)} == {page_key(number) for number in kept}
            await session.close()


async def test_pages_of_several_shards_have_their_own_sizes() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open()
            shards: Bytes = np.array([0, 1, 2, 1], np.uint8)
            span = page_span(0, 2, positions=np.array([0, 0, 0, 1], np.int32), shards=shards)
            answer = await session.reserve_span(span)
            assert answer.granted.count == 4
            held = store.running.engine.gauges().arena_used_bytes
            payloads = [payload_bytes(SPEC, ShardGrid.of(SPEC), int(shard)) for shard in shards]
            assert held == sum(-(-page_bytes(one) // 4096) * 4096 for one in payloads)
            session.abort_soon(answer.granted.lease_ids)
            await eventually(lambda: store.running.engine.gauges().arena_used_bytes == 0)
            await session.close()


async def test_what_is_there_or_being_written_is_not_written_again() -> None:
    with new_world() as world:
        async with served(world) as store:
            one, other = await store.open(), await store.open()
            await write(one, 0, 2)
            pending = await one.reserve_span(page_span(2, 2))
            answer = await other.reserve_span(page_span(0, 6))
            assert answer.exists.tolist() == [0, 1]
            assert answer.pending.tolist() == [2, 3]
            assert answer.granted.pages.tolist() == [4, 5]
            one.abort_soon(pending.granted.lease_ids)
            other.abort_soon(answer.granted.lease_ids)
            assert await one.close() and await other.close()


async def test_a_page_that_fails_verification_is_named_by_its_commit() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open()
            span = page_span(0, 3)
            granted = (await session.reserve_span(span)).granted
            fill(session, span, SpanAnswer(granted=granted))
            with session.slot_view(int(granted.segment_ids[1]), int(granted.offsets[1]), PAGE_BYTES) as view:
                view[5000] ^= 1
            ((index, error),) = await session.commit(granted.lease_ids)
            assert index == 1 and isinstance(error, PageCorrupt)
            answers = await read(session, span)
            assert sources(answers, 3) == [STAGING, 0, STAGING]
            assert refusals(answers) == {1: None}
            await release(session, answers)
            await session.close()


async def test_misses_and_pages_on_disk_come_beside_what_is_staged() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open()
            await write(session, 0, 4)
            await store.running.engine.flush(TENANT, b"")
            await session.close()
        async with served(world) as store:
            session = await store.open()
            first = await read(session, page_span(1, 1))
            assert sources(first, 1) == [DISK]
            answers = await read(session, page_span(0, 6))
            assert sources(answers, 6) == [DISK, STAGING, DISK, DISK, 0, 0]
            assert refusals(answers) == {4: None, 5: None}
            assert answers[0].granted.pages.tolist() == [1], "what is staged waits for nothing"
            await release(session, [*first, *answers])
            assert await session.close()


def peers_with(world: World, served_pages: Callable[[RemoteSource, PullItem], bool]) -> ScriptedPeers:
    world.peers = ScriptedPeers(lambda source, item: served_pages(source, item) and give(item))
    return world.peers


async def test_pages_are_pulled_from_the_sources_of_their_chunks() -> None:
    with new_world() as world:
        peers = peers_with(world, lambda source, item: source == remote_source(1) or item.key != page_key(3))
        async with served(world) as store:
            session = await store.open()
            runs = ((1, ()), (1, (remote_source(1),)), (2, (remote_source(2), remote_source(1))))
            answers = await read(session, page_span(0, 4, sources=runs))
            assert sources(answers, 4) == [0, REMOTE, REMOTE, REMOTE]
            asked = {(source.incarnation, key) for source, keys in peers.pulls for key in keys}
            assert {(1, page_key(1)), (2, page_key(2)), (2, page_key(3)), (1, page_key(3))} == asked
            await release(session, answers)
            await store.running.engine.flush(TENANT, b"")
            assert {one.metadata.chunk_index for one in stored_pages(world.memory)} <= {1, 2, 3}
            assert await session.close()


async def test_pages_that_do_not_come_in_time_say_so() -> None:
    with new_world() as world:
        go = threading.Event()
        peers_with(world, lambda source, item: go.wait(PATIENCE_S))
        async with served(world) as store:
            session = await store.open()
            await write(session, 0, 1)
            answers = await read(session, page_span(0, 2, sources=((2, (remote_source(1),)),)), wait_s=0.02)
            assert sources(answers, 2) == [STAGING, 0]
            assert isinstance(refusals(answers)[1], DeadlineExceeded)
            go.set()
            await release(session, answers)
            await session.close()


async def test_a_reader_that_leaves_or_is_cancelled_holds_nothing() -> None:
    with new_world() as world:
        go = threading.Event()
        peers_with(world, lambda source, item: go.wait(PATIENCE_S))
        async with served(world) as store:
            session = await store.open()
            await write(session, 0, 2)
            span = page_span(0, 4, sources=((4, (remote_source(1),)),))
            async with session.acquire_span(span, wait_s=PATIENCE_S):
                pass
            taken = asyncio.Event()

            async def take() -> None:
                async with session.acquire_span(span, wait_s=PATIENCE_S) as answers:
                    async for answer in answers:
                        session.release_soon(answer.granted.lease_ids)
                        taken.set()

            taking = asyncio.create_task(take())
            await taken.wait()
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            go.set()
            await eventually(lambda: store.running.engine.gauges().leases == 0)
            await read(session, page_span(9, 1))  # what was left of both requests has come and gone back
            await eventually(lambda: store.running.engine.gauges().leases == 0)
            assert await session.close()


async def test_a_session_that_breaks_ends_what_waits_and_quarantines_what_was_granted() -> None:
    with new_world() as world:
        go = threading.Event()
        peers_with(world, lambda source, item: go.wait(PATIENCE_S))
        async with served(world) as store:
            session = await store.open()
            await write(session, 0, 1)
            span = page_span(0, 2, sources=((2, (remote_source(1),)),))
            async with session.acquire_span(span, wait_s=PATIENCE_S) as answers:
                held = await anext(answers)
                await store.running.engine.sessions.stop()
                with pytest.raises((Draining, SessionUnknown, ServiceUnavailable)):
                    await anext(answers)
            assert held.granted.count == 1
            assert store.running.engine.gauges().arena_quarantined_bytes > 0
            with pytest.raises((Draining, SessionUnknown, ServiceUnavailable)):
                await session.reserve_span(page_span(5, 1))
            go.set()
            session = await session.reopen(drained=True)
            await eventually(lambda: store.running.engine.gauges().arena_quarantined_bytes == 0)
            with pytest.raises(LeaseLost):
                session.addresses(held.granted)
            await session.close()


async def test_the_window_bounds_leases_page_by_page() -> None:
    with new_world() as world:
        async with served(world, max_leases=4) as store:
            session = await store.open()
            await write(session, 0, 4)
            held = await read(session, page_span(0, 3))
            answers = await read(session, page_span(0, 4))
            assert sources(answers, 4) == [STAGING, 0, 0, 0]
            assert [type(error) for error in refusals(answers).values()] == [SessionBusy] * 3
            reserved = await session.reserve_span(page_span(20, 3))
            more = await session.reserve_span(page_span(30, 3))
            assert more.granted.pages.tolist() == [0]
            assert [type(error) for _, error in more.failed] == [SessionBusy] * 2
            session.abort_soon(np.concatenate((reserved.granted.lease_ids, more.granted.lease_ids)))
            await release(session, [*held, *answers])
            many: dict[str, Any] = {"positions": np.zeros(5, np.int32), "shards": np.zeros(5, np.uint8)}
            with pytest.raises(InvalidRequest, match="positions"):
                await session.reserve_span(page_span(0, 2, **many))
            few = {name: values[:1] for name, values in many.items()}
            with pytest.raises(InvalidRequest, match="chunk_hashes"):
                await read(session, page_span(0, 5, **few))
            assert await session.close()


async def test_expired_pages_are_not_granted() -> None:
    clock = ManualClock()
    with new_world(clock=clock) as world:
        async with served(world) as store:
            session = await store.open()
            await write(session, 0, 2, retention=((1, Retention(ttl_ms=1000)), (1, Retention())))
            clock.advance(2.0)
            answers = await read(session, page_span(0, 2))
            assert sources(answers, 2) == [0, STAGING]
            await release(session, answers)
            await session.close()


async def test_a_span_of_no_pages_is_answered() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open()
            empty = page_span(0, 1, positions=np.zeros(0, np.int32), shards=np.zeros(0, np.uint8))
            assert (await session.reserve_span(empty)).granted.count == 0
            assert await read(session, empty) == []
            assert await session.close()


def _good() -> pb.PageSpan:
    span = page_span(15, 2)
    return pb.PageSpan(
        keyspace_id=span.keyspace,
        chunk_hashes=span.chunk_hashes,
        first_chunk_index=15,
        parent_hash=span.parent_hash,
        group_head_hashes=span.group_heads,
        positions=[0, 1],
        shards=b"\0\0",
    )


HOSTILE: list[tuple[str, dict[str, object]]] = [
    ("keyspace", {"keyspace_id": b"short"}),
    ("chunk_hashes", {"chunk_hashes": b""}),
    ("chunk_hashes", {"chunk_hashes": b"x" * 33}),
    ("first_chunk_index", {"first_chunk_index": -1}),
    ("first_chunk_index", {"first_chunk_index": (1 << 63) - 1}),
    ("parent_hash", {"parent_hash": b"p"}),
    ("group_heads", {"group_head_hashes": b"h" * 16}),
    ("positions", {"positions": [0, 2]}),
    ("positions", {"positions": [0, (1 << 32) - 1]}),
    ("shards", {"shards": b"\0"}),
    ("shards", {"shards": b"\0\3"}),
    ("shards", {"shards": b"\0\xff"}),
    ("retention", {"retention": [pb.RetentionRun(chunk_count=3)]}),
    ("chunk_count", {"retention": [pb.RetentionRun(chunk_count=-1), pb.RetentionRun(chunk_count=3)]}),
    ("retention", {"retention": [pb.RetentionRun(chunk_count=1)] * 3}),
    ("prompt_tokens", {"prompt_tokens": -5}),
    ("sources", {"sources": [pb.SourceRun(chunk_count=1)]}),
    ("chunk_count", {"sources": [pb.SourceRun(chunk_count=0)]}),
    ("bulk_endpoint", {"sources": [pb.SourceRun(chunk_count=2, sources=[pb.RemoteSource(node_id=b"n" * 16)])]}),
    ("source", {"sources": [pb.SourceRun(chunk_count=2, sources=[pb.RemoteSource()] * 17)]}),
]


@pytest.mark.parametrize(("named", "changes"), HOSTILE)
async def test_a_span_that_means_nothing_is_refused_by_name_and_the_session_goes_on(
    named: str, changes: dict[str, object]
) -> None:
    message = _good()
    for name, value in changes.items():
        message.ClearField(name)  # type: ignore[arg-type]
        bad = pb.PageSpan(**{name: value})  # type: ignore[arg-type]
        message.MergeFrom(bad)
    with new_world() as world:
        async with served(world) as store:
            async with raw_peer(store.endpoint) as peer:
                await peer.open()
                await peer.send(2, reserve_span=pb.ReserveSpanRequest(span=message))
                await peer.send(3, acquire_span=pb.AcquireSpanRequest(span=message))
                answers = [await peer.next_of("error") for _ in range(2)]
                assert sorted(answer.request_id for answer in answers) == [2, 3]
                for error in (item_error_from_proto(answer.error) for answer in answers):
                    assert isinstance(error, InvalidRequest) and named in error.message
                gauges = store.running.engine.gauges()
                assert (gauges.leases, gauges.arena_used_bytes) == (0, 0)
                await peer.send(4, reserve_span=pb.ReserveSpanRequest(span=_good()))
                assert list((await peer.next_of("span_answer")).span_answer.pages) == [0, 1]
                await peer.send(5, close=pb.SessionClose())
                await peer.next_of("closed")


async def test_a_keyspace_that_the_session_has_not_named_is_refused() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open(keyspaces=())
            with pytest.raises(KeyspaceUnknown):
                await session.reserve_span(page_span(0, 1))
            with pytest.raises(KeyspaceUnknown):
                await read(session, page_span(0, 1))
            assert await session.close()
