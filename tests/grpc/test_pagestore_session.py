"""Sessions over gRPC with the client library: the life of pages, and of the memory that peers map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from kvpool.client.page_items import AcquireItem, AcquireResult, PageSource, ReserveItem
from kvpool.client.pagestore import PageStoreSession
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import (
    InvalidRequest,
    KvPoolError,
    PageCorrupt,
    QuotaExceeded,
    StaleIncarnation,
    TenantDenied,
)
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool.core.outcome import Admission, Tier
from kvpool.core.page import verify
from kvpool.core.retention import PINNED_FOREVER_US
from kvpool.testing import eventually
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.v1.pagestore_pb2_grpc import PageStoreServiceStub
from tests.fixtures.pagestore import KEYSPACES, PAGE_BYTES, SPEC, TENANT, fill_page, metadata, new_world, page_key
from tests.fixtures.pagestore_server import served
from tests.fixtures.stored_pages import stored_pages

if TYPE_CHECKING:
    from kvpool.v1.pagestore_pb2_grpc import PageStoreServiceAsyncStub


def item(number: int) -> ReserveItem:
    return ReserveItem(page_key(number), PAGE_BYTES, metadata(number))


async def write(session: PageStoreSession, numbers: list[int]) -> list[KvPoolError | None]:
    results = await session.reserve([item(number) for number in numbers])
    slots = [result.slot for result in results if result.slot is not None]
    assert len(slots) == len(numbers), results
    for number, slot in zip(numbers, slots, strict=True):
        with session.slot_view(*slot.place) as view:
            fill_page(view, page_key(number))
    errors = dict(await session.commit([slot.lease_id for slot in slots]))
    return [errors.get(index) for index in range(len(slots))]


async def read(session: PageStoreSession, numbers: list[int], wait_s: float = 5.0) -> list[AcquireResult]:
    """All answers in item order; the leases are held."""
    results: list[AcquireResult] = []
    async with session.acquire([AcquireItem(page_key(number)) for number in numbers], wait_s=wait_s) as answers:
        async for answer in answers:
            results.append(answer)
    return sorted(results, key=lambda one: one.item_index)


async def test_a_page_written_by_one_session_is_read_by_another() -> None:
    with new_world() as world:
        async with served(world) as store:
            writer, reader = await store.open(), await store.open()
            assert await write(writer, [1, 2, 3]) == [None, None, None]
            results = await read(reader, [1, 2, 3, 4])
            assert [one.source for one in results] == [PageSource.STAGING] * 3 + [None]
            for number, one in zip((1, 2, 3), results, strict=False):
                assert one.slot is not None
                with reader.slot_view(*one.slot.place) as view:
                    assert verify(view, page_key(number), SPEC.codec) is None
            await reader.release([one.slot.lease_id for one in results if one.slot is not None])
            assert await writer.close() and await reader.close()
            assert store.running.engine.gauges().sessions == 0


async def test_a_malformed_request_is_refused_as_a_whole_and_the_session_goes_on() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open()
            malformed = PageMetadata(parent_hash=b"", chunk_index=0, group_head_hash=b"")
            bad = ReserveItem(page_key(2), PAGE_BYTES, malformed)
            with pytest.raises(InvalidRequest, match="item 1"):
                await session.reserve([item(1), bad])
            assert store.running.engine.gauges().arena_used_bytes == 0
            wrong_size = ReserveItem(page_key(1), PAGE_BYTES - 1, metadata(1))
            (refused,) = await session.reserve([wrong_size])
            assert refused.admission is Admission.REJECTED and isinstance(refused.error, InvalidRequest)
            assert await write(session, [1]) == [None]
            await session.close()


async def test_sums_are_checked_at_commit() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open()
            (result,) = await session.reserve([item(1)])
            assert result.slot is not None
            with session.slot_view(*result.slot.place) as view:
                fill_page(view, page_key(1))
                view[50_000] ^= 0xFF
            ((_, error),) = await session.commit([result.slot.lease_id])
            assert isinstance(error, PageCorrupt)
            (missed,) = await read(session, [1])
            assert missed.slot is None
            await session.close()


async def test_a_session_of_another_incarnation_or_tenant_is_not_opened() -> None:
    theirs = keyspace_id(encode_keyspace("another tenant", SPEC))
    with new_world() as world:
        async with served(world) as store:
            with pytest.raises(StaleIncarnation):
                await store.open(expected_incarnation=99)
            with pytest.raises(TenantDenied):
                await store.open(keyspaces=((theirs, SPEC),))
            session = await store.open(expected_incarnation=store.running.engine.incarnation)
            with pytest.raises(TenantDenied):
                await session.add_keyspace(theirs, SPEC)
            await session.close()


async def test_flush_clear_and_status_over_the_control_service() -> None:
    with new_world() as world:
        async with served(world) as store:
            session, control = await store.open(), store.control()
            await write(session, [1, 2])
            flushed = await control.flush()
            assert flushed.failed_count == 0
            status = await control.status()
            assert (status.staging_page_count, status.disk_page_count, status.dirty_page_count) == (2, 2, 0)
            assert status.session_count == 1 and status.disk_fault == ""
            assert await control.clear(KEYSPACES[0][0]) == 2
            assert (await control.status()).disk_page_count == 0
            await session.close()
            await control.close()


async def test_pins_over_the_control_service() -> None:
    with new_world() as world:
        async with served(world, disk_bytes=64 << 20, max_pinned_share=1.5 * PAGE_BYTES / (64 << 20)) as store:
            session, control = await store.open(), store.control()
            await write(session, [1, 2])
            hashes = [page_key(number).chunk_hash for number in (1, 2, 3)]
            assert await control.pin(KEYSPACES[0][0], hashes[:1], PINNED_FOREVER_US) == 1
            with pytest.raises(QuotaExceeded, match="max_pinned_share"):
                await control.pin(KEYSPACES[0][0], hashes, PINNED_FOREVER_US)
            await control.flush()
            pinned = {page.metadata.chunk_index: page.metadata.pinned_until_us for page in stored_pages(world.memory)}
            assert pinned == {1: PINNED_FOREVER_US, 2: 0}
            assert await control.pin(KEYSPACES[0][0], hashes, 0) == 2
            with pytest.raises(InvalidRequest, match="chunk hash 0"):
                await control.pin(KEYSPACES[0][0], [b"short"], 0)
            await session.close()
            await control.close()


async def test_what_is_not_served_says_so() -> None:
    with new_world() as world:
        async with served(world) as store, grpc.aio.insecure_channel(store.endpoint) as channel:
            stub: PageStoreServiceAsyncStub = PageStoreServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.Drain(pb.DrainRequest()):
                    raise AssertionError("a node without an index was drained")
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_stream_must_begin_with_open() -> None:
    with new_world() as world:
        async with served(world) as store, grpc.aio.insecure_channel(store.endpoint) as channel:
            stub: PageStoreServiceAsyncStub = PageStoreServiceStub(channel)
            call = stub.Session()
            await call.write(pb.SessionRequest(request_id=1, heartbeat=pb.SessionHeartbeat()))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_restart_serves_from_disk_and_takes_the_old_memory_back() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open()
            await write(session, [1, 2])
            await store.running.engine.flush(TENANT, b"")
            before = session.incarnation
        # The client still maps the old segments.
        async with served(world) as store:
            assert store.running.engine.gauges().arena_quarantined_bytes > 0
            assert store.running.engine.gauges().arena_segment_bytes <= store.running.config.arena_bytes
            session = await session.reopen(drained=True)
            assert session.incarnation > before
            await eventually(lambda: store.running.engine.gauges().arena_quarantined_bytes == 0)
            results = await read(session, [1, 2])
            assert [one.source for one in results] == [PageSource.DISK] * 2
            await session.release([one.slot.lease_id for one in results if one.slot is not None])
            assert await session.close()


async def test_a_page_flipped_on_disk_is_a_miss_and_the_index_is_corrected() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open()
            await write(session, [1])
            await store.running.engine.flush(TENANT, b"")
            await session.close()
        world.memory.damage(page_key(1), 1234)
        async with served(world) as store:
            session = await store.open()
            (answer,) = await read(session, [1])
            assert answer.slot is None and isinstance(answer.error, PageCorrupt)
            assert store.running.metric("verification_failures_total", place="disk") == 1
            await eventually(lambda: not world.index.shards(1, Tier.DISK))
            await session.close()
