"""What announced chunks weigh in Redis, and that the benches' shortcut leaves the same behind."""

from __future__ import annotations

import secrets

import pytest

from bench.index_fill import MadeChains, announce_all, fill_redis
from kvpool.core.cluster import ChainQuery, NodeInfo, NodeKind
from kvpool_index.adapters.redis_reads import group_key
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.core.entries import group_reads
from kvpool_index.ports import StreamFence
from tests.fixtures.redis_server import running_redis
from tests.fixtures.redis_topologies import RedisCluster, ask, facts
from tests.fixtures.redis_topologies import redis_cluster as redis_cluster

pytestmark = pytest.mark.e2e

MOST_BYTES = 48.0  # a chunk


async def opened(url: str, prefix: str) -> tuple[RedisIndexStore, StreamFence]:
    """A store, and an announce stream of a node."""
    store = RedisIndexStore(url, timeout_s=60, key_prefix=prefix)
    info = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, endpoint="h:1", incarnation=0)
    granted = await store.nodes.register(info, last_incarnation=0, lease_ttl_ms=60_000)
    return store, await store.nodes.open_stream(info.node_id, granted.incarnation, granted.announce_epoch)


async def test_a_chunk_weighs_no_more_than_it_may() -> None:
    """Of a few: what there is once is there already. bench.index_memory weighs a million."""
    with running_redis() as server:
        store, fence = await opened(server.url, "kvpool")
        used_bytes: list[int] = []
        for seed in range(2):
            await announce_all(store, fence, MadeChains(keyspace=b"k" * 16, chunk_count=8_192, seed=seed))
            used_bytes.append(int(facts(server.port, "memory")["used_memory"]))
        assert (used_bytes[1] - used_bytes[0]) / 8_192 < MOST_BYTES
        await store.close()


async def test_filling_is_as_announcing(redis_cluster: RedisCluster) -> None:
    prefixes = [f"t{secrets.token_hex(6)}" for _ in range(2)]
    announced, fence = await opened(redis_cluster.url, prefixes[0])
    filled = RedisIndexStore(redis_cluster.url, timeout_s=60, key_prefix=prefixes[1])
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
            fences = [str(meta).encode("utf-8", "surrogateescape")[8:] for meta in metas]
            assert fences[0] == fences[1]
    await announced.close()
    await filled.close()
