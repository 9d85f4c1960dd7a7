"""Memory that is in place before it is needed, and pages that are not summed before they leave, over gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from kvpool.client.page_items import AcquireItem, ReserveItem
from kvpool.client.pagestore import PageStoreSession
from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.page import HEADER_BYTES, verify
from kvpool.testing import eventually
from kvpool_pagestore.core.slots import Segment
from tests.fixtures.pagestore import PAGE_BYTES, PAYLOAD_BYTES, SPEC, metadata, new_world, page_key, sealed_page
from tests.fixtures.pagestore_server import Served, served
from tests.fixtures.patience import PATIENCE_S


async def test_a_session_has_its_share_mapped_as_it_comes() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open()

            def segments() -> list[Segment]:
                return list(store.running.engine.tiers.staging.table.space.segments)

            assert await session.prepare(0) == ()
            go_on, make = threading.Event(), store.running.arena.prepare_segment

            def in_time(segment_id: int, size_bytes: int, is_wanted: Callable[[], bool]) -> bool:
                if store.running.engine.preparation.prepared_bytes:
                    go_on.wait()
                return make(segment_id, size_bytes, is_wanted)

            store.running.arena.prepare_segment = in_time  # type: ignore[method-assign]
            store.running.engine.preparation.start()
            preparing = asyncio.ensure_future(session.prepare(0))
            await eventually(lambda: any(one.mappers for one in segments()))
            assert not preparing.done()
            go_on.set()
            segment_ids = await preparing
            assert sorted(segment_ids) == sorted(one.segment_id for one in segments())
            for segment_id in segment_ids:
                with session.slot_view(segment_id, 0, 8) as view:
                    assert bytes(view) == bytes(8)
            assert sorted(await session.prepare(1)) == sorted(segment_ids), "a tenant keeps what it has"
            await session.close()


async def test_a_session_that_maps_nothing_prepares_nothing() -> None:
    with new_world() as world:
        async with served(world) as store:
            session = await store.open(wants_arena=False)
            with pytest.raises(InvalidRequest, match="wants_arena"):
                await session.prepare(0)
            await session.close()


async def write_unsealed(session: PageStoreSession, number: int) -> list[tuple[int, KvPoolError]]:
    (result,) = await session.reserve([ReserveItem(page_key(number), PAGE_BYTES, metadata(number))])
    assert result.slot is not None
    payload = slice(HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES)
    with session.slot_view(result.slot.segment_id, result.slot.offset, PAGE_BYTES) as view:
        view[payload] = sealed_page(page_key(number))[payload]
    return await session.commit([result.slot.lease_id], sealed=False)


async def verifies(store: Served, number: int) -> bool:
    """What a session that does not trust the arena reads."""
    reader = await store.open()
    async with reader.acquire([AcquireItem(page_key(number))], wait_s=PATIENCE_S) as answers:
        (answer,) = [one async for one in answers]
    assert answer.slot is not None
    with reader.slot_view(answer.slot.segment_id, answer.slot.offset, PAGE_BYTES) as view:
        fault = verify(view, page_key(number), SPEC.codec)
    await reader.release([answer.slot.lease_id])
    await reader.close()
    return fault is None


async def test_a_page_of_a_trusting_session_is_sealed_for_one_that_is_not() -> None:
    with new_world(disk=False) as world:
        async with served(world) as store:
            session = await store.open(trusts_arena=True)
            assert await write_unsealed(session, 1) == []
            assert await verifies(store, 1)
            await session.close()


async def test_a_session_that_did_not_say_that_it_trusts_may_leave_nothing_unsealed_and_goes_on() -> None:
    with new_world(disk=False) as world:
        async with served(world) as store:
            session = await store.open()
            with pytest.raises(InvalidRequest, match="trusts the arena"):
                await write_unsealed(session, 1)
            (result,) = await session.reserve([ReserveItem(page_key(2), PAGE_BYTES, metadata(2))])
            assert result.slot is not None
            session.abort_soon([1, 2])
            assert await session.close()
