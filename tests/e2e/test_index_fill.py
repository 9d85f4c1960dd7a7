"""The benches' shortcut leaves behind what announcements would."""

from __future__ import annotations

import secrets

import pytest

from bench.index_fill import MadeChains, announce_all, fill_redis
from kvpool.core.cluster import ChainQuery, NodeInfo, NodeKind
from kvpool_index.adapters.redis_reads import group_key
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.core.groups import group_reads
from tests.fixtures.redis_topologies import RedisCluster, ask
from tests.fixtures.redis_topologies import redis_cluster as redis_cluster

pytestmark = pytest.mark.e2e


async def test_filling_is_as_announcing(redis_cluster: RedisCluster) -> None:
    prefixes = [f"t{secrets.token_hex(6)}" for _ in range(2)]
    announced, filled = (RedisIndexStore(redis_cluster.url, timeout_s=10.0, key_prefix=each) for each in prefixes)
    info = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, endpoint="h:1", incarnation=0)
    granted = await announced.nodes.register(info, last_incarnation=0, lease_ttl_ms=60_000)
    fence = await announced.nodes.open_stream(info.node_id, granted.incarnation, granted.announce_epoch)
    chains = MadeChains(keyspace=b"k" * 16, chunk_count=150, chain_chunks=40)
    assert chains.chain_count == 4 and len(chains.hashes(3)) == 30 * 16
    await announce_all(announced, fence, chains, batch_chunks=50)
    ordinal, number = fence.ordinal, fence.number
    await fill_redis(redis_cluster.url, chains, ordinal=ordinal, fence=number, key_prefix=prefixes[1])
    for chain in range(chains.chain_count):
        reads = group_reads(ChainQuery(keyspace=chains.keyspace, chunk_hashes=chains.hashes(chain)))
        values = [await store.locations.read(chains.keyspace, reads) for store in (announced, filled)]
        assert values[0] == values[1] and None not in values[0]
        for read in reads:
            keys = [group_key(prefix.encode(), chains.keyspace, read.head) for prefix in prefixes]
            metas = [ask(redis_cluster.owner(key).port, "HGET", key, "") for key in keys]
            fences = [str(meta)[8:] for meta in metas]
            assert fences[0] == fences[1]
    await announced.close()
    await filled.close()
