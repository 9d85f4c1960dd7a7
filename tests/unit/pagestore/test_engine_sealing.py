"""Pages that a trusting writer leaves unsealed are sealed here before they go anywhere, and never trusted before."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest

from kvpool.core.cluster import SESSION_FILE_NUMBER
from kvpool.core.errors import InvalidRequest, Overloaded, PageCorrupt
from kvpool.core.outcome import Tier
from kvpool.core.page import HEADER_BYTES, PageKey, seal, verify
from kvpool.core.spans import PageSpan, SpanAnswer
from kvpool.testing import eventually
from kvpool_pagestore.bulk.gateway import EngineBulkGateway
from kvpool_pagestore.bulk.ports import ReadGrant
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.slots import Slot
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.ports import PageWrite
from kvpool_server.tasks import BoundedExecutor
from tests.fixtures.movement import cluster_of
from tests.fixtures.pagestore import (
    KEYSPACE,
    KEYSPACES,
    PAGE_BYTES,
    PAYLOAD_BYTES,
    SPEC,
    TENANT,
    Running,
    new_world,
    page_key,
    running_engine,
    sealed_page,
)
from tests.fixtures.pagestore_calls import acquire, acquire_one, open_session, reserve_item, wanted
from tests.fixtures.patience import PATIENCE_S

GARBAGE = b"\xa5"


async def trusting(running: Running) -> PeerSession:
    return await open_session(running, wants_arena=True, trusts_arena=True)


async def store_unsealed(running: Running, peer: PeerSession, numbers: Sequence[int]) -> list[Slot]:
    """Pages of the true payload with garbage for headers and sums."""
    answers = await running.engine.pages.reserve(peer, [reserve_item(number) for number in numbers])
    grants = [answer for answer in answers if isinstance(answer, Grant)]
    assert len(grants) == len(numbers), answers
    for grant in grants:
        with running.engine.pages.view(grant) as view:
            view[:] = GARBAGE * len(view)
            payload = sealed_page(grant.slot.page.key)[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
            view[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = payload
    leases = [grant.lease_id for grant in grants]
    assert await running.engine.pages.commit(peer, leases, sealed=False) == [None] * len(leases)
    return [grant.slot for grant in grants]


def page_of(running: Running, slot: Slot) -> bytes:
    with running.arena.view(slot.segment.segment_id, slot.offset, slot.page.page_bytes) as view:
        return bytes(view)


def is_whole(page: bytes | memoryview, number: int) -> bool:
    return verify(page, page_key(number), SPEC.codec, PAYLOAD_BYTES) is None and bytes(page) == sealed_page(
        page_key(number)
    )


async def test_a_commit_without_seal_is_visible_at_once_and_looks_at_no_byte() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            peer = await trusting(running)
            (slot,) = await store_unsealed(running, peer, [1])
            acquired = await acquire_one(running, await trusting(running), wanted(1))
            assert acquired.grant is not None and acquired.grant.slot is slot
            page = page_of(running, slot)
            assert page[:HEADER_BYTES] == GARBAGE * HEADER_BYTES
            assert running.metric("committed_pages_total") == 1 and running.metric("sealed_pages_total") == 0


async def test_only_a_session_that_trusts_the_arena_may_leave_pages_unsealed() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            (grant,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
            assert isinstance(grant, Grant)
            with pytest.raises(InvalidRequest, match="trusts the arena"):
                await running.engine.pages.commit(peer, [grant.lease_id], sealed=False)
            assert running.engine.gauges().staging_pages == 0
            running.engine.pages.abort(peer, [grant.lease_id])


async def test_a_page_that_a_trusting_session_says_is_sealed_is_verified_as_ever() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            peer = await trusting(running)
            (grant,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
            assert isinstance(grant, Grant)
            (error,) = await running.engine.pages.commit(peer, [grant.lease_id])
            assert isinstance(error, PageCorrupt)


async def test_a_plain_session_gets_a_page_once_it_is_sealed_and_it_verifies() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            slots = await store_unsealed(running, await trusting(running), range(5))
            reader = await open_session(running)
            answers = await acquire(running, reader, [wanted(number) for number in range(6)])
            for number, answer in enumerate(answers[:5]):
                assert answer.grant is not None and answer.grant.slot is slots[number]
                assert is_whole(page_of(running, answer.grant.slot), number)
            assert answers[5].grant is None and answers[5].error is None
            running.engine.pages.release(reader, [one.grant.lease_id for one in answers if one.grant is not None])
            assert running.metric("sealed_pages_total") == 5
            assert running.metric("sealed_bytes_total") == 5 * slots[0].page.page_bytes
            assert running.metric("seal_seconds_total") > 0
            assert running.metric("acquired_pages_total", source="staging") == 5
            again = await acquire_one(running, reader, wanted(0))
            assert again.grant is not None and running.metric("sealed_pages_total") == 5


async def test_two_readers_at_once_and_the_disk_have_a_page_sealed_once() -> None:
    with new_world() as world:
        async with running_engine(world, linger_ms=60_000) as running:
            (slot,) = await store_unsealed(running, await trusting(running), [1])
            readers = [await open_session(running) for _ in range(2)]
            flushing = asyncio.ensure_future(running.engine.flush(TENANT, KEYSPACE))
            answers = await asyncio.gather(*(acquire_one(running, reader, wanted(1)) for reader in readers))
            assert [one.grant is not None and one.grant.slot is slot for one in answers] == [True, True]
            assert await flushing == (1, 0)
            assert running.metric("sealed_pages_total") == 1
            assert is_whole(page_of(running, slot), 1)


async def test_a_page_goes_to_disk_sealed_and_verifies_when_it_comes_back() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await trusting(running)
            await store_unsealed(running, peer, range(4))
            assert await running.engine.flush(TENANT, KEYSPACE) == (4, 0)
            assert running.metric("sealed_pages_total") == 4
        async with running_engine(world) as running:
            answers = await acquire(running, await open_session(running), [wanted(number) for number in range(4)])
            for number, answer in enumerate(answers):
                assert answer.grant is not None and answer.source is not None and answer.source.value == "disk"
                assert answer.grant.slot.sealed and is_whole(page_of(running, answer.grant.slot), number)
            assert running.metric("verification_failures_total", place="disk") == 0


async def test_a_slot_that_held_an_unsealed_page_says_nothing_of_the_next_one() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            peer = await trusting(running)
            (slot,) = await store_unsealed(running, peer, [1])
            await acquire_one(running, await open_session(running), wanted(1))
            assert slot.sealed
            assert await running.engine.clear(TENANT, KEYSPACE) == 1
            await running.engine.sessions.stop()
            peer = await trusting(running)
            slots = await store_unsealed(running, peer, range(2, 10))
            assert not any(one.sealed for one in slots)


async def test_a_page_is_streamed_to_a_peer_sealed() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            await store_unsealed(running, await trusting(running), [1, 2])
            gateway = EngineBulkGateway(running.engine, asyncio.get_running_loop())

            def stream() -> list[bytes]:
                session = gateway.open_bulk(TENANT, KEYSPACES, 0)
                answers = session.acquire([page_key(1), page_key(2)], 10.0).result(PATIENCE_S)
                grants = [answer for answer in answers if isinstance(answer, ReadGrant)]
                pages = [bytes(grant.page) for grant in grants]
                for grant in grants:
                    grant.page.release()
                session.release(grants)
                session.close()
                return pages

            first, second = await asyncio.to_thread(stream)
            assert is_whole(first, 1) and is_whole(second, 2)


async def test_a_page_is_pushed_to_another_node_sealed() -> None:
    pushed: dict[int, bytes] = {}

    def take(item: PageWrite) -> None:
        pushed[item.metadata.chunk_index] = bytes(item.page)

    async with cluster_of(2, disk=False, replication_factor=2) as cluster:
        cluster.members[1].refuse = take
        running = cluster.members[0].run
        await store_unsealed(running, await trusting(running), [1, 2])
        await eventually(lambda: all(cluster.holders_of(number, Tier.STAGING) == [0, 1] for number in (1, 2)))
        assert is_whole(pushed[1], 1) and is_whole(pushed[2], 2)


async def test_a_reader_that_finds_a_page_corrupt_has_it_dropped_sealed_or_not() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            writer = await trusting(running)
            await store_unsealed(running, writer, [1, 2])
            for reader, number in ((await open_session(running), 1), (writer, 2)):
                answer = await acquire_one(running, reader, wanted(number))
                assert answer.grant is not None
                running.engine.pages.release(reader, [], [answer.grant.lease_id])
            assert running.engine.gauges().staging_pages == 0
            assert running.metric("verification_failures_total", place="reader") == 2
            assert running.engine.gauges().arena_used_bytes == 0


async def test_a_page_that_cannot_be_sealed_now_is_a_miss_for_a_plain_reader_and_stays() -> None:
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            await store_unsealed(running, await trusting(running), [1])

            async def refuse(*args: object) -> object:
                raise Overloaded("no room in the queue")

            with mock.patch.object(BoundedExecutor, "run", refuse):
                answer = await acquire_one(running, await open_session(running), wanted(1))
            assert answer.grant is None and isinstance(answer.error, Overloaded)
            answer = await acquire_one(running, await open_session(running), wanted(1))
            assert answer.grant is not None and is_whole(page_of(running, answer.grant.slot), 1)


async def test_a_page_that_is_dropped_while_it_is_sealed_is_a_miss_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(buffer: memoryview, key: PageKey, codec: int, payload_len: int) -> None:
        begun.set()
        go_on.wait()
        seal(buffer, key, codec, payload_len)

    monkeypatch.setattr("kvpool_pagestore.engine.commits.seal", slowly)
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            await store_unsealed(running, await trusting(running), [1])
            reading = asyncio.ensure_future(acquire_one(running, await open_session(running), wanted(1)))
            await eventually(begun.is_set)
            assert await running.engine.clear(TENANT, KEYSPACE) == 1
            assert running.engine.gauges().arena_used_bytes > 0, "its slot is not handed on meanwhile"
            go_on.set()
            assert (await reading).grant is None
            await eventually(lambda: running.engine.gauges().arena_used_bytes == 0)


async def test_what_was_not_sealed_when_the_process_died_is_not_served_by_the_next_one() -> None:
    with new_world() as world:
        with pytest.raises(RuntimeError, match="crash"):
            async with running_engine(world, linger_ms=60_000) as running:
                peer = await open_session(running, trusts_arena=True, wants_arena=True)
                session_fd = running.engine.sessions.descriptor(peer.token, SESSION_FILE_NUMBER).fd
                (slot,) = await store_unsealed(running, peer, [1])
                running.engine.sessions.descriptor(peer.token, slot.segment.segment_id)
                assert not slot.sealed
                raise RuntimeError("crash")
        async with running_engine(world) as running:
            assert running.engine.gauges().arena_segment_bytes > 0, "the earlier process's memory is there"
            for reader in (await trusting(running), await open_session(running)):
                assert (await acquire_one(running, reader, wanted(1))).grant is None
            assert running.engine.gauges().disk_pages == running.engine.gauges().staging_pages == 0
        os.close(session_fd)


@pytest.mark.parametrize("trusts", [False, True])
async def test_a_span_names_unsealed_pages_at_once_to_a_session_that_trusts_and_sealed_to_any_other(
    trusts: bool,
) -> None:
    span = PageSpan(
        keyspace=KEYSPACE,
        chunk_hashes=b"".join(page_key(number).chunk_hash for number in range(4)),
        first_chunk_index=0,
        parent_hash=bytes(16),
        group_heads=page_key(0).chunk_hash,
        positions=np.arange(4, dtype=np.int32),
        shards=np.zeros(4, np.uint8),
    )
    with new_world(disk=False) as world:
        async with running_engine(world) as running:
            writer = await trusting(running)
            await store_unsealed(running, writer, range(4))
            reader = writer if trusts else await open_session(running)
            answers: list[SpanAnswer] = []
            done = asyncio.Event()

            def on_answer(answer: SpanAnswer, final: bool) -> None:
                answers.append(answer)
                if final:
                    done.set()

            running.engine.spans.acquire(reader, span, wait_s=PATIENCE_S, on_answer=on_answer)
            assert done.is_set() is trusts, "nothing stands between a trusting session and its pages"
            await done.wait()
            granted = [answer.granted for answer in answers]
            assert sorted(page for one in granted for page in one.pages.tolist()) == [0, 1, 2, 3]
            assert {source for one in granted for source in one.sources.tolist()} == {1}
            for one in granted:
                for page, segment_id, offset in zip(one.pages, one.segment_ids, one.offsets, strict=True):
                    with running.arena.view(int(segment_id), int(offset), PAGE_BYTES) as view:
                        assert is_whole(view, int(page)) is not trusts
