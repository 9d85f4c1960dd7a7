"""What a start makes of the pages that an earlier process left on disk."""

from __future__ import annotations

from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey
from kvpool_pagestore.ports import PageWrite
from tests.fixtures.pagestore import KEYSPACE, PAGE_BYTES, TENANT, new_world, page_key, running_engine
from tests.fixtures.pagestore import metadata as page_metadata
from tests.fixtures.pagestore_calls import open_session, store


async def test_a_smaller_budget_is_kept_from_the_start() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            for number in range(4):
                await store(running, peer, [number])
                await running.engine.flush(TENANT, b"")
        async with running_engine(world, disk_bytes=2 * PAGE_BYTES) as running:
            assert running.engine.gauges().disk_used_bytes == 2 * PAGE_BYTES
            assert running.engine.gauges().disk_pages == 2


async def test_pages_that_nobody_can_ask_for_are_dropped() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), [1])
            await running.engine.flush(TENANT, b"")
        strange = [
            page_key(2, keyspace=b"?" * 16),  # a keyspace that is not remembered
            page_key(3),  # a page of another size
            PageKey(KEYSPACE, bytes(16), 63),  # a shard that its grid does not have
        ]
        failures: list[KvPoolError | None] = []
        writes = [PageWrite(key=key, page=memoryview(b"x"), metadata=page_metadata(3)) for key in strange]
        world.memory.put_batch(writes, lambda _, failure: failures.append(failure))
        assert failures == [None] * 3
        async with running_engine(world) as running:
            assert [found.key for found in world.memory.scan()] == [page_key(1)]
            assert running.engine.gauges().disk_pages == 1
