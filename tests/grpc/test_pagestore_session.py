"""Sessions over gRPC with the client library: the life of pages, and of the memory that peers map."""

from __future__ import annotations

from kvpool.client.page_items import AcquireItem, AcquireResult, PageSource, ReserveItem
from kvpool.client.pagestore import PageStoreSession
from kvpool.core.errors import KvPoolError
from kvpool.core.page import verify
from tests.fixtures.pagestore import (
    PAGE_BYTES,
    SPEC,
    fill_page,
    metadata,
    new_world,
    page_key,
)
from tests.fixtures.pagestore_server import served


def item(number: int) -> ReserveItem:
    return ReserveItem(page_key(number), PAGE_BYTES, metadata(number))


async def write(session: PageStoreSession, numbers: list[int]) -> list[KvPoolError | None]:
    results = await session.reserve([item(number) for number in numbers])
    slots = [result.slot for result in results if result.slot is not None]
    assert len(slots) == len(numbers), results
    for number, slot in zip(numbers, slots, strict=True):
        with session.slot_view(slot) as view:
            fill_page(view, page_key(number))
    return await session.commit([slot.lease_id for slot in slots])


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
                with reader.slot_view(one.slot) as view:
                    assert verify(view, page_key(number), SPEC.codec) is None
            await reader.release([one.slot.lease_id for one in results if one.slot is not None])
            assert await writer.close() and await reader.close()
            assert store.running.engine.gauges().sessions == 0
