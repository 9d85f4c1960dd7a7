"""Index replicas of two releases side by side over one Redis, as a rolling update has them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainQuery, NodeInfo, NodeKind, RegistrationAttempt, ResyncEvent
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.entries import EVERY_SHARD, Entry, Operation, decode_value
from kvpool_index.core.events import ORIGIN, unpack_chunks, unpack_node
from kvpool_index.core.groups import ChunkOperation, GroupRead
from tests.fixtures import recorded_redis
from tests.fixtures.index_server import running_index
from tests.fixtures.pagestore import SPEC, TENANT
from tests.fixtures.patience import patient
from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.redis_server import redis_server as redis_server

pytestmark = pytest.mark.e2e

NEWER = cast(NodeKind, 9)  # of a release that has agents' successors, say
CHAIN = bytes(range(16))


async def test_a_node_of_a_kind_that_only_newer_replicas_know_harms_nobody(redis_server: RedisServer) -> None:
    """It registered through one of them; ours read it from Redis at every look, and must not bury it either."""
    theirs, ours = (RedisIndexStore(redis_server.url, timeout_s=60, key_prefix="kind-skew") for _ in range(2))
    info = NodeInfo(node_id=b"n" * 16, kind=NEWER, endpoint="h:1")
    grant = await theirs.nodes.register(info, last_incarnation=0, lease_ttl_ms=3_600_000)
    fence = await theirs.nodes.open_stream(info.node_id, grant.incarnation, grant.announce_epoch)
    async with running_index(ours, config=IndexConfig(tenant=TENANT)) as index:
        client = IndexClient(patient(index_endpoints=(index.endpoint,)))
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


@pytest.mark.parametrize("release", recorded_redis.releases())
async def test_what_replicas_of_a_release_kept_is_read_and_changed_by_ours(release: str) -> None:
    told, record = recorded_redis, recorded_redis.recorded(release)
    with running_redis() as server:
        await told.restore(server.url, record)
        store = told.open_store(server.url)
        (node,) = await store.nodes.snapshot()
        assert (replace(node.info, incarnation=0), node.load, node.alive) == (told.NODE, told.LOAD, True)
        assert await store.keyspaces.by_id(told.KEYSPACE) == told.BOUND
        assert await store.keyspaces.of_tenant(TENANT) == [told.BOUND]
        assert await store.policies.get([told.KEYSPACE]) == [told.POLICY]
        (value,) = await store.locations.read(told.KEYSPACE, [GroupRead(told.CHUNK, [told.CHUNK[:8]])])
        assert decode_value(value) == (Entry(node.ordinal, (0, 0b01, EVERY_SHARD[2])),)
        (chunk,) = await store.events.read(0, ORIGIN, limit=9, wait_s=0)
        assert [(each.chunk_hash, each.value) for each in unpack_chunks(chunk.payload)] == [(told.CHUNK, value)]
        (came,) = await store.events.read(store.events.stream_count - 1, ORIGIN, limit=9, wait_s=0)
        assert unpack_node(came.payload).info == node.info

        attempt = RegistrationAttempt(process_id=b"p" * 16, number=1)  # that of the record: it changes nothing
        grant = await store.nodes.register(told.NODE, last_incarnation=0, lease_ttl_ms=1000, attempt=attempt)
        assert (grant.incarnation, grant.ordinal, grant.is_repeat) == (node.info.incarnation, node.ordinal, True)
        fence = await store.nodes.open_stream(told.NODE.node_id, grant.incarnation, grant.announce_epoch)
        gone = Operation(ordinal=fence.ordinal, full_shards=told.GRID, removed=EVERY_SHARD)
        change = ChunkOperation(keyspace=told.KEYSPACE, chunk_hash=told.CHUNK, group_head=told.CHUNK, operation=gone)
        await store.locations.apply(fence, [change])
        await store.close()
        left = await told.dump(server.url)
    assert [key for key in left if key.startswith(("kvpool:d:", "kvpool:g:"))] == [], "the digest is that of nothing"


async def test_ours_keep_what_the_last_record_says() -> None:
    """Another layout needs other names of keys, or replicas that run beside ours take it for their own."""
    with running_redis() as server:
        store = recorded_redis.open_store(server.url)
        await recorded_redis.fill(store)
        await store.close()
        kept = await recorded_redis.dump(server.url)
    last = recorded_redis.recorded(recorded_redis.releases()[-1])
    assert recorded_redis.shape(kept) == recorded_redis.shape(last)
