"""Reading pages for an export from page streams: another node is asked for what one does not have whole."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

from kvpool.client.pagestore_control import ListedChunk
from kvpool.client.transfer import PageToWrite, PageTransferClient
from kvpool.core.chunks import ROOT_HASH
from kvpool.core.errors import KvPoolError
from kvpool.core.export_format import Manifest
from kvpool.core.outcome import Admission
from kvpool_cli.export_source import ListedPlan, PageFetcher, PlannedChunk, batches
from tests.fixtures.pagestore import (
    GRID,
    KEYSPACES,
    SPEC,
    TENANT,
    World,
    metadata,
    new_world,
    page_key,
    sealed_page,
)
from tests.fixtures.pagestore_server import Served, served

MANIFEST = Manifest(name="k", tenant=TENANT, spec=SPEC, key_check=bytes(16))


async def put(node: Served, numbers: list[int]) -> None:
    """Both halves of these chunks."""
    client = PageTransferClient(node.node.bulk_endpoint)
    items = [
        PageToWrite(
            key=page_key(number, shard),
            page=memoryview(sealed_page(page_key(number, shard))),
            metadata=metadata(number),
        )
        for number in numbers
        for shard in (1, 2)
    ]
    wrong: list[KvPoolError] = []

    def settled(item: int, admission: Admission, error: KvPoolError | None) -> None:
        if error is not None:
            wrong.append(error)

    try:
        await asyncio.to_thread(client.write_pages, KEYSPACES, items, settled, timeout_s=60, require_durable=True)
    finally:
        client.close()
    assert not wrong


async def only_on_disk(stack: AsyncExitStack, world: World, numbers: list[int]) -> Served:
    """A node whose staging is empty, so that what is on its disk counts."""
    async with served(world) as before:
        await put(before, numbers)
    return await stack.enter_async_context(served(world))


async def test_a_page_that_one_node_has_spoilt_or_not_comes_from_another() -> None:
    with new_world() as first_world, new_world() as second_world:
        async with AsyncExitStack() as stack:
            second = await stack.enter_async_context(served(second_world))
            await put(second, [1, 2])
            first = await only_on_disk(stack, first_world, [1, 3])
            first_world.memory.damage(page_key(1, 1), 100)
            both = ((first.node, 0b110), (replace(second.node, node_id=b"2" * 16), 0b110))  # fixtures have one id
            planned = [
                PlannedChunk.of(page_key(number).chunk_hash, sources, GRID)
                for number, sources in ((1, both), (2, both), (3, both), (4, both), (5, ((first.node, 0b010),)))
            ]
            with PageFetcher(MANIFEST, PageTransferClient) as fetcher:
                fetched = await asyncio.to_thread(fetcher.fetch, planned)
                failures = fetcher.failures
    assert [chunk is not None for chunk in fetched] == [True, True, True, False, False], failures
    for number, chunk in zip((1, 2, 3), fetched, strict=False):
        assert chunk is not None and (chunk.metadata, chunk.shards) == (metadata(number), 0b110)
        assert [bytes(page) for page in chunk.pages] == [sealed_page(page_key(number, shard)) for shard in (1, 2)]
    assert failures["PAGE_CORRUPT"] == 1 and failures["no longer there"] > 0


async def test_a_node_that_is_gone_is_reported() -> None:
    with new_world() as world:
        async with served(world) as node:
            gone = node.node
    planned = [PlannedChunk.of(page_key(1).chunk_hash, ((gone, 0b110),), GRID)]
    with PageFetcher(MANIFEST, PageTransferClient) as fetcher:
        assert await asyncio.to_thread(fetcher.fetch, planned) == [None]
        assert fetcher.failures == {"SERVICE_UNAVAILABLE": 2}


async def test_listings_of_several_nodes_are_one_plan_in_chain_order() -> None:
    with new_world() as world:
        async with served(world) as node:
            info = node.node

    def listed(number: int, shards: int) -> ListedChunk:
        kept = metadata(number)
        parent = ROOT_HASH if number == 0 else page_key(number - 1).chunk_hash
        return ListedChunk(
            keyspace=page_key(0).keyspace,
            chunk_hash=page_key(number).chunk_hash,
            metadata=type(kept)(parent_hash=parent, chunk_index=number, group_head_hash=kept.group_head_hash),
            staging_shards=shards & 0b011,
            disk_shards=shards & 0b100,
            page_reads_per_minute=0.0,
        )

    plan = ListedPlan()
    for number, shards in ((2, 0b111), (0, 0b110), (1, 0b010), (5, 0b110), (0, 0b100)):
        plan.add(info, listed(number, shards))
    planned = plan.planned(GRID)
    assert [chunk.chunk_hash for chunk in planned] == [page_key(number).chunk_hash for number in (0, 1, 2)]
    assert planned[0].sources == ((info, 0b110), (info, 0b100))
    assert [chunk.shards for chunk in planned] == [0b110, 0, 0b001], "half of one is none"
    assert [len(part) for part in batches(planned, 32 << 20)] == [2, 1]
