"""The client library against the real index: what a node announces is what others match, whatever goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from kvpool.client.hashing import Prompt
from kvpool.client.index import IndexClient
from kvpool.core.cluster import (
    ChainQuery,
    ChunkEvent,
    LocationChange,
    NodeEvent,
    NodeInfo,
    NodeKind,
    NodeLoad,
    RemoteSource,
)
from kvpool.core.errors import InvalidRequest, KeyspaceMismatch, KeyspaceUnknown, StaleIncarnation
from kvpool.core.keyspace import encode_keyspace
from kvpool.core.location_digest import ChunkPlaces, HeldChunk
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool.testing import ManualClock, eventually
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_server.node.node_link import NodeLink, NodeLinkConfig
from tests.fixtures.index_server import RunningIndex, running_index
from tests.fixtures.patience import patient
from tests.unit.client.servers import SPEC

NODE = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, host_id="host", endpoint="127.0.0.1:9", capacity_bytes=1)


def client_of(index: RunningIndex) -> IndexClient:
    return IndexClient(patient(index_endpoints=(index.endpoint,), backoff_initial_s=0.005, backoff_max_s=0.02))


class Node:
    """A node whose truth is a set of chunk indexes of one chain."""

    def __init__(self, client: IndexClient, keyspace: bytes, chain: Prompt, shards: int, **bounds: int) -> None:
        self.keyspace, self.chain, self.shards = keyspace, chain, shards
        self.held: set[int] = set()
        self.superseded: list[StaleIncarnation] = []
        self.link = NodeLink(
            client,
            NODE,
            load=NodeLoad,
            truth=self,
            on_superseded=self.superseded.append,
            config=NodeLinkConfig(**bounds),
        )

    def change(self, index: int, *, present: bool) -> LocationChange:
        return LocationChange(
            keyspace=self.keyspace,
            chunk_hash=self.chain.hashes[index],
            group_head_hash=self.chain.group_head_hashes(index, 1)[0],
            tier=Tier.STAGING,
            added_shards=self.shards if present else 0,
            removed_shards=0 if present else self.shards,
        )

    def _head(self, index: int) -> bytes:
        return self.chain.group_head_hashes(index, 1)[0]

    def chunks(self) -> list[ChunkPlaces]:
        return ChunkPlaces.of((self.keyspace, self.chain.hashes[index], self._head(index)) for index in self.held)

    def locate(self, keyspace: bytes, chunk_hashes: Collection[bytes]) -> list[tuple[bytes, HeldChunk]]:
        indexes = map(self.chain.hashes.index, chunk_hashes)
        return [
            (self.chain.hashes[index], HeldChunk(self._head(index), (0, self.shards, 0), self.shards))
            for index in indexes
            if index in self.held
        ]

    def keyspace_encodings(self) -> list[bytes]:
        return [encode_keyspace("default", SPEC)]

    def put(self, *indexes: int) -> None:
        self.held.update(indexes)
        self.link.announce([self.change(index, present=True) for index in indexes])

    def drop(self, *indexes: int) -> None:
        self.held.difference_update(indexes)
        self.link.announce([self.change(index, present=False) for index in indexes])


@asynccontextmanager
async def world(store: MemoryIndexStore | None = None, **bounds: int) -> AsyncGenerator[tuple[IndexClient, Node]]:
    async with running_index(store, config=IndexConfig(max_batch_items=8, lease_ttl_ms=600_000)) as index:
        client = client_of(index)
        opened = await client.open_keyspace("chat", SPEC)
        chain = Prompt.of(opened.hash_key, list(range(16 * 40)), 16)
        node = Node(client, opened.keyspace, chain, opened.grid.all_shards, **bounds)
        try:
            yield client, node
        finally:
            await node.link.close()
            await client.close()


async def matched(client: IndexClient, node: Node, first: int = 0) -> int:
    chain = node.chain
    query = ChainQuery(
        keyspace=node.keyspace,
        chunk_hashes=b"".join(chain.hashes[first:]),
        first_chunk_index=first,
        group_head_hash=chain.group_head_hashes(first, 1)[0],
    )
    found = await client.match_stream.match(query)
    assert found == await client.match(query)
    return found.matched_chunks


async def test_what_is_announced_is_matched() -> None:
    async with world() as (client, node):
        lease = await node.link.start()
        node.put(*range(20))
        await node.link.wait_announced()
        assert await matched(client, node) == 20
        assert await matched(client, node, first=17) == 3
        node.drop(5)
        await node.link.wait_announced()
        assert await matched(client, node) == 5
        found = await client.match(ChainQuery(keyspace=node.keyspace, chunk_hashes=node.chain.hashes[0]))
        (location,) = found.runs[0].locations
        assert (location.node_id, location.incarnation, location.tier) == (
            NODE.node_id,
            lease.incarnation,
            Tier.STAGING,
        )
        assert found.nodes[NODE.node_id] == replace(NODE, incarnation=lease.incarnation)
        await node.link.close()
        assert await matched(client, node) == 0


async def test_many_changes_of_few_chunks_end_in_the_truth() -> None:
    async with world(pending_max=4) as (client, node):
        await node.link.start()
        for round_number in range(50):
            node.put(*range(12))
            node.drop(*range(round_number % 12, 12))
        await eventually(lambda: node.link.pending_count == 0)
        await node.link.wait_announced()
        assert await matched(client, node) == len(node.held) == 1


async def test_a_wiped_store_is_filled_again() -> None:
    clock = ManualClock()
    store = MemoryIndexStore(clock)
    async with running_index(store, clock=clock, config=IndexConfig(lease_ttl_ms=1000)) as index:
        client = client_of(index)
        opened = await client.open_keyspace("chat", SPEC)
        node = Node(client, opened.keyspace, Prompt.of(opened.hash_key, list(range(640)), 16), opened.grid.all_shards)
        first = await node.link.start()
        node.put(*range(10))
        await node.link.wait_announced()
        clock.advance(10)  # the lease ran out: nothing of the node counts any more

        async def back() -> bool:
            return await matched(client, node) == 10

        await eventually(back)
        assert node.link.incarnation == first.incarnation
        await node.link.close()
        await client.close()


async def test_a_newer_process_of_the_node_ends_the_older_one() -> None:
    async with world() as (client, node):
        await node.link.start()
        newer = await client.register_node(NODE)
        assert newer.incarnation > node.link.incarnation
        node.put(1)
        await eventually(lambda: node.superseded)


async def test_a_wrong_location_is_reported_away() -> None:
    async with world() as (client, node):
        lease = await node.link.start()
        node.put(0, 1)
        await node.link.wait_announced()
        source = RemoteSource(node_id=NODE.node_id, incarnation=lease.incarnation, bulk_endpoint="")
        key = PageKey(node.keyspace, node.chain.hashes[1], 0)
        node.link.report_stale(key, node.chain.hashes[0], source)

        async def gone() -> bool:
            return await matched(client, node) == 1

        await eventually(gone)


async def test_a_dropped_keyspace_is_gone_and_unknown_ones_are_named() -> None:
    async with world() as (client, node):
        await node.link.start()
        node.put(*range(5))
        await node.link.drop_keyspace(node.keyspace)
        assert await matched(client, node) == 0
        await node.link.drop_keyspace(b"u" * 16)  # nothing to drop is fine
        with pytest.raises(KeyspaceUnknown):
            await client.match(ChainQuery(keyspace=b"u" * 16, chunk_hashes=bytes(16)))
        with pytest.raises(InvalidRequest):
            await client.match_stream.match(ChainQuery(keyspace=node.keyspace, chunk_hashes=b"short"))
        assert await matched(client, node) == 0, "the stream survives a refused match"


async def test_watch_reports_nodes_and_chunks() -> None:
    async with world() as (client, node):
        await node.link.start()
        seen: list[object] = []

        async def watch() -> None:
            async with aclosing(client.watch(keyspace=node.keyspace)) as events:
                async for event in events:
                    seen.append(event.event)

        def reported() -> bool:
            node.put(3)  # again and again: only what happens after the watch began is reported
            node.drop(3)
            return any(isinstance(event, ChunkEvent) for event in seen)

        watching = asyncio.create_task(watch())
        await eventually(reported)
        await node.link.close()
        await eventually(lambda: any(isinstance(event, NodeEvent) and not event.alive for event in seen))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        chunk = next(event for event in seen if isinstance(event, ChunkEvent))
        assert node.chain.hashes[3].startswith(chunk.chunk_hash)
        assert {place.node_id for place in chunk.locations} <= {NODE.node_id}


async def test_nodes_keyspaces_and_placement() -> None:
    async with world() as (client, node):
        assert await client.place(node.keyspace, node.chain.head_hash) == []
        lease = await node.link.start()
        (live,) = await client.list_nodes(NodeKind.PAGESTORE)
        assert live.info == replace(NODE, incarnation=lease.incarnation)
        assert await client.list_nodes(NodeKind.AGENT) == []
        assert [item.info for item in await client.list_nodes()] == [live.info]
        assert await client.place(node.keyspace, node.chain.head_hash, host_id="host") == [live.info]
        assert [(item.name, item.spec) for item in await client.list_keyspaces()] == [("chat", SPEC)]
        with pytest.raises(KeyspaceMismatch):
            await client.open_keyspace("chat", replace(SPEC, model_revision="2"))
        assert (await client.get_info()).max_batch_items == 8
