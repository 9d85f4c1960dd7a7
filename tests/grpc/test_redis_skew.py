"""Index replicas of two releases side by side over one Redis, as a rolling update has them."""

from __future__ import annotations

from typing import cast

import pytest

from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainQuery, NodeInfo, NodeKind, ResyncEvent
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.entries import EVERY_SHARD, Operation
from kvpool_index.core.groups import ChunkOperation
from tests.fixtures.index_server import running_index
from tests.fixtures.pagestore import SPEC, TENANT
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.redis_server import redis_server as redis_server

pytestmark = pytest.mark.e2e

NEWER = cast(NodeKind, 9)  # of a release that has agents' successors, say
CHAIN = bytes(range(16))


async def test_a_node_of_a_kind_that_only_newer_replicas_know_harms_nobody(redis_server: RedisServer) -> None:
    """It registered through one of them; ours read it from Redis at every look, and must not bury it either."""
    theirs, ours = (RedisIndexStore(redis_server.url, timeout_s=20.0, key_prefix="kind-skew") for _ in range(2))
    info = NodeInfo(node_id=b"n" * 16, kind=NEWER, endpoint="h:1")
    grant = await theirs.nodes.register(info, last_incarnation=0, lease_ttl_ms=3_600_000)
    fence = await theirs.nodes.open_stream(info.node_id, grant.incarnation, grant.announce_epoch)
    async with running_index(ours, config=IndexConfig(tenant=TENANT)) as index:
        client = IndexClient(ClientConfig(index_endpoints=(index.endpoint,)))
        keyspace = (await client.open_keyspace("chat", SPEC)).keyspace
        held = Operation(ordinal=fence.ordinal, full_shards=1, added=EVERY_SHARD)
        change = ChunkOperation(keyspace=keyspace, chunk_hash=CHAIN, group_head=CHAIN, operation=held)
        await theirs.locations.apply(fence, [change])
        found = await client.match(ChainQuery(keyspace=keyspace, chunk_hashes=CHAIN, shards=1))
        assert found.nodes == {}, "this client knows no such node"
        assert await client.list_nodes() == []
        events = client.watch(for_replica=True)
        resync = (await anext(events)).event
        assert isinstance(resync, ResyncEvent) and resync.nodes == ()
        await events.aclose()
        await client.close()
    (record,) = await theirs.nodes.snapshot()
    assert (record.alive, record.info.kind) == (True, 9)
    await theirs.close()
    await ours.close()
