"""Pins of pages that are copied or moved: a pin is the owner's, and no reason to lose a page."""

from __future__ import annotations

from contextlib import AsyncExitStack

from kvpool.core.retention import PINNED_FOREVER_US
from kvpool.testing import eventually
from tests.fixtures.movement import Cluster, cluster_of, join
from tests.fixtures.pagestore import KEYSPACE, TENANT, page_key
from tests.fixtures.pagestore_calls import open_session, store

PAGES = range(4)


async def fill_pinned(cluster: Cluster) -> None:
    running = cluster.members[0].run
    assert await store(running, await open_session(running), PAGES) == [None] * len(PAGES)
    hashes = [page_key(number).chunk_hash for number in PAGES]
    assert await running.engine.retention.pin(TENANT, KEYSPACE, hashes, PINNED_FOREVER_US) == len(PAGES)
    await running.engine.flush(TENANT, b"")


async def test_replicas_of_pinned_pages_are_not_pinned() -> None:
    async with cluster_of(2, replication_factor=2, replica_linger_ms=200) as cluster:
        await fill_pinned(cluster)
        await eventually(lambda: all(cluster.holders_of(number) == [0, 1] for number in PAGES))
        assert cluster.members[1].run.engine.retention.pinned_bytes == 0


async def test_pinned_pages_of_a_drained_node_go_to_one_that_may_pin_no_more() -> None:
    async with cluster_of(1) as cluster, AsyncExitStack() as stack:
        disk_bytes = 1 << 30
        member = await join(
            cluster, stack, 1, host="host-1", disk_bytes=disk_bytes, max_pinned_share=2 * 66_000 / disk_bytes
        )
        await fill_pinned(cluster)
        target = member.run.engine
        async for progress in cluster.members[0].run.engine.drain.watch():
            last = progress
        assert last.done and all(cluster.holders_of(number)[-1] == 1 for number in PAGES)
        assert 0 < target.retention.pinned_bytes <= 2 * 66_000
