"""Page streams to a keyspace under write-through: a page's answer comes when it is on disk, or with why it is not."""

from __future__ import annotations

import asyncio

from kvpool.client.transfer import PageToWrite, PageTransferClient
from kvpool.core.errors import KvPoolError, StoreFault
from kvpool.core.outcome import Admission
from tests.fixtures.pagestore import KEYSPACES, World, metadata, new_world, page_key, sealed_page
from tests.fixtures.pagestore_server import Served, served
from tests.fixtures.stored_pages import stored_pages


def write(store: Served, world: World, numbers: range) -> list[tuple[KvPoolError | None, bool]]:
    """Per page its error, and whether it was on disk when its answer came."""
    items = [
        PageToWrite(key=page_key(number), page=memoryview(sealed_page(page_key(number))), metadata=metadata(number))
        for number in numbers
    ]
    reported: dict[int, tuple[KvPoolError | None, bool]] = {}

    def on_page(index: int, admission: Admission, error: KvPoolError | None) -> None:
        reported[index] = error, page_key(numbers[index]) in {page.key for page in stored_pages(world.memory)}

    client = PageTransferClient(store.node.bulk_endpoint)
    client.write_pages(KEYSPACES, items, on_page, timeout_s=60)
    client.close()
    return [reported[index] for index in range(len(items))]


async def test_a_streamed_page_is_answered_when_it_is_durable() -> None:
    with new_world() as world:
        async with served(world, write_policy="write-through", linger_ms=60_000) as store:
            assert await asyncio.to_thread(write, store, world, range(6)) == [(None, True)] * 6


async def test_a_streamed_page_that_cannot_be_made_durable_says_so() -> None:
    with new_world() as world:
        async with served(world, write_policy="write-through") as store:
            world.memory.fault = StoreFault("the disk is gone")
            answers = await asyncio.to_thread(write, store, world, range(2))
            assert [(type(error), stored) for error, stored in answers] == [(StoreFault, False)] * 2
            world.memory.fault = None
