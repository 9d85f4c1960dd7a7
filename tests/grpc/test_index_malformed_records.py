"""Records in Redis that no index wrote: passed over and counted, whatever else is asked."""

from __future__ import annotations

import contextlib
import json
import struct

from kvpool.core.errors import StoreUnavailable
from kvpool.testing import eventually
from kvpool.v1 import common_pb2, index_pb2
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.config import IndexConfig
from tests.fixtures.index_node import TIMEOUT_S, Chain, FakeNode, open_keyspace
from tests.fixtures.index_server import RunningIndex, running_index
from tests.fixtures.redis_server import running_redis
from tests.grpc.test_index_watch import watching

RECORD = struct.pack("<QIQIQBB", 1 << 50, 77, 1, 1, 1 << 52, 1, 0)
MALFORMED_INFOS = [
    b"no json",
    b"[1]",
    b"null",
    b"\xff",
    b"[" * 100_000,
    json.dumps({"node_id": "00" * 16, "kind": "x"}).encode(),
    json.dumps({"node_id": "00" * 16, "kind": 1, "endpoint": 5}).encode(),
    json.dumps({"node_id": "00" * 16, "kind": 1, "endpoint": "unix:/run/a.sock"}).encode(),
    json.dumps({"node_id": "00" * 16, "kind": 1, "capacity_bytes": 1 << 70}).encode(),
    json.dumps({"node_id": "11" * 16, "kind": 1, "endpoint": "h:1"}).encode(),  # of another node
]


async def put(store: RedisIndexStore, *words: bytes) -> None:
    connections = store.deployment.connection_group()
    await connections.call(words[1], *words)


def malformed(index: RunningIndex, kind: str) -> float:
    return index.metric("kvpool_index_redis_malformed_records_total", kind=kind)


async def test_a_malformed_record_is_passed_over_and_counted() -> None:
    with running_redis() as redis:
        store = RedisIndexStore(redis.url, timeout_s=TIMEOUT_S)
        async with running_index(store, config=IndexConfig(lease_ttl_ms=600_000)) as index:
            chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
            await node.announce(chain.added(range(3)))
            await _spoil(store, chain)
            nodes = (await index.stub.ListNodes(index_pb2.ListNodesRequest())).nodes
            assert [each.info.node_id for each in nodes] == [node.node_id]
            assert malformed(index, "node") >= len(MALFORMED_INFOS) + 1
            listed = (await index.stub.ListKeyspaces(index_pb2.ListKeyspacesRequest())).keyspaces
            assert [each.keyspace_id for each in listed] == [chain.keyspace] and not listed[0].HasField("policy")
            assert malformed(index, "keyspace") == 2 and malformed(index, "policy") == 1
            assert (await node.renewed()).policy_version == 0
            assert (await index.stub.Match(chain.query())).matched_chunks == 1, "the second chunk's value is no value"
            assert malformed(index, "location") == 1
            assert (await index.stub.Match(chain.query())).matched_chunks == 1
            assert malformed(index, "location") == 2, "each read counts, also of a value that was met before"
            # The victim of a forged record can still register, and policies can still be set.
            assert (await FakeNode(index.stub, bytes(15) + b"\x01").register()).incarnation < 1 << 53
            policy = common_pb2.KeyspacePolicy(replication_factor=1)
            await index.stub.SetKeyspacePolicy(index_pb2.SetKeyspacePolicyRequest(name="chat", policy=policy))
        await store.close()


async def _spoil(store: RedisIndexStore, chain: Chain) -> None:
    for number, info in enumerate(MALFORMED_INFOS):
        node_id = bytes(15) + bytes([number])
        await put(store, b"HSET", b"kvpool:{n}:records", node_id, RECORD)
        await put(store, b"HSET", b"kvpool:{n}:infos", node_id, info)
    good_info = json.dumps({"node_id": "22" * 16, "kind": 1, "endpoint": "h:1"}).encode()
    await put(store, b"HSET", b"kvpool:{n}:records", b"\x22" * 16, b"short")
    await put(store, b"HSET", b"kvpool:{n}:infos", b"\x22" * 16, good_info)
    await put(store, b"HSET", b"kvpool:{k}:names:default", b"odd", b"short")
    await put(store, b"HSET", b"kvpool:{k}:names:default", b"\xff", bytes(40))
    await put(store, b"HSET", b"kvpool:{k}:policies", chain.keyspace, b"x")
    await put(store, b"SET", b"kvpool:{k}:policy-version", b"none")
    connections, field = store.deployment.connection_group(), chain.hashes[1][:8]
    for key in await connections.call(b"*", b"KEYS", b"kvpool:*"):
        with contextlib.suppress(StoreUnavailable):  # not a hash
            if await connections.call(key, b"HEXISTS", key, field):
                await connections.call(key, b"HSET", key, field, b"abc")


async def test_a_record_that_is_spoiled_later_is_passed_over() -> None:
    """What was read of a node before does not vouch for its record now."""
    info = json.dumps({"node_id": "22" * 16, "kind": 1, "endpoint": "h:1"}).encode()
    with running_redis() as redis:
        store = RedisIndexStore(redis.url, timeout_s=TIMEOUT_S)
        async with running_index(store, config=IndexConfig(lease_ttl_ms=600_000)) as index:
            node = await FakeNode(index.stub).register()
            await put(store, b"HSET", b"kvpool:{n}:infos", b"\x22" * 16, info)
            endless = struct.pack("<QIQIQBB", (1 << 64) - 1, 77, 1, 1, 1 << 52, 1, 0)
            for record, is_there in ((RECORD, True), (RECORD[:25], False), (RECORD, True), (endless, False)):
                await put(store, b"HSET", b"kvpool:{n}:records", b"\x22" * 16, record)
                nodes = (await index.stub.ListNodes(index_pb2.ListNodesRequest())).nodes
                expected = {node.node_id, b"\x22" * 16} if is_there else {node.node_id}
                assert {each.info.node_id for each in nodes} == expected
        await store.close()


async def test_a_chunk_value_that_no_index_wrote_is_replaced_by_the_next_change() -> None:
    with running_redis() as redis:
        store = RedisIndexStore(redis.url, timeout_s=TIMEOUT_S)
        async with running_index(store, config=IndexConfig(lease_ttl_ms=600_000)) as index:
            chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
            await node.announce(chain.added(range(3)))
            await _spoil(store, chain)
            await node.announce(chain.added(range(3)))
            assert (await index.stub.Match(chain.query())).matched_chunks == 3
        await store.close()


async def test_a_malformed_entry_of_the_event_log_is_skipped_and_only_one_of_nodes_resynchronizes_watchers() -> None:
    with running_redis() as redis:
        store = RedisIndexStore(redis.url, timeout_s=TIMEOUT_S)
        async with running_index(store, config=IndexConfig(lease_ttl_ms=600_000)) as index:
            chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
            async with watching(index) as watch:
                chunk_streams = store.events.stream_count - 1
                for stream in range(chunk_streams):
                    await put(store, b"XADD", b"kvpool:{e%d}:events" % stream, b"*", b"e", b"no chunk")
                await node.announce(chain.added(range(1)))
                assert (await watch.next()).WhichOneof("event") == "chunk"
                await eventually(lambda: malformed(index, "event") == chunk_streams)
                await put(store, b"XADD", b"kvpool:{n}:events", b"*", b"e", b"no node")
                assert (await watch.next()).WhichOneof("event") == "resync"
                assert malformed(index, "event") == chunk_streams + 1
        await store.close()
