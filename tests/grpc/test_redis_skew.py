"""Index replicas of two releases side by side over one Redis, as a rolling update has them."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainQuery, NodeInfo, NodeKind, RegistrationAttempt, ResyncEvent
from kvpool.core.errors import StartupFailed, StoreUnavailable
from kvpool.testing import eventually
from kvpool_index.adapters import redis_store
from kvpool_index.adapters.redis_link import LAYOUT, RedisLayout
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.entries import EVERY_SHARD, ChunkOperation, Entry, GroupRead, Operation, decode_value
from kvpool_index.core.events import ORIGIN, unpack_chunks, unpack_node
from tests.fixtures import recorded_redis
from tests.fixtures.index_server import running_index
from tests.fixtures.pagestore import SPEC, TENANT
from tests.fixtures.patience import patient
from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.redis_server import redis_server as redis_server
from tests.fixtures.redis_topologies import redis_cluster as redis_cluster
from tests.fixtures.redis_topologies import redis_sentinels as redis_sentinels

pytestmark = pytest.mark.e2e

UPGRADES = Path(__file__).resolve().parents[2] / "docs/upgrades.md"
NEWER = cast(NodeKind, 9)  # of a release that has agents' successors, say
CHAIN = bytes(range(16))
OURS, ANOTHER = str(LAYOUT), str(LAYOUT + 1)


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
    written, record = recorded_redis, recorded_redis.recorded(release)
    with running_redis() as server:
        await written.restore(server.url, record)
        store = written.open_store(server.url)
        (node,) = await store.nodes.snapshot()
        assert (replace(node.info, incarnation=0), node.load, node.alive) == (written.NODE, written.LOAD, True)
        assert await store.keyspaces.by_id(written.KEYSPACE) == written.BOUND
        assert await store.keyspaces.of_tenant(TENANT) == [written.BOUND]
        assert await store.policies.get([written.KEYSPACE]) == [written.POLICY]
        (value,) = await store.locations.read(written.KEYSPACE, [GroupRead(written.CHUNK, [written.CHUNK[:8]])])
        assert decode_value(value, written.GRID) == (Entry(node.ordinal, (0, 0b01, written.GRID)),)
        (chunk,) = await store.events.read(0, ORIGIN, limit=9, wait_s=0)
        assert [(each.chunk_hash, each.value) for each in unpack_chunks(chunk.payload)] == [(written.CHUNK, value)]
        (came,) = await store.events.read(store.events.stream_count - 1, ORIGIN, limit=9, wait_s=0)
        assert unpack_node(came.payload).info == node.info

        attempt = RegistrationAttempt(process_id=b"p" * 16, number=1)  # that of the record: it changes nothing
        grant = await store.nodes.register(written.NODE, last_incarnation=0, lease_ttl_ms=1000, attempt=attempt)
        assert (grant.incarnation, grant.ordinal, grant.is_repeat) == (node.info.incarnation, node.ordinal, True)
        fence = await store.nodes.open_stream(
            written.NODE.node_id, grant.incarnation, grant.announce_epoch, attempt.process_id
        )
        gone = Operation(ordinal=fence.ordinal, full_shards=written.GRID, removed=EVERY_SHARD)
        change = ChunkOperation(
            keyspace=written.KEYSPACE, chunk_hash=written.CHUNK, group_head=written.CHUNK, operation=gone
        )
        await store.locations.apply(fence, [change])
        await store.close()
        left = await written.dump(server.url)
    assert [key for key in left if key.startswith(("kvpool:d:", "kvpool:g:"))] == [], "the digest is that of nothing"


def mark(server: RedisServer, layout: str, prefix: str = "kvpool") -> None:
    assert server.command("SET", f"{prefix}:{{n}}:layout", layout).startswith(b"+OK")


def marked(server: RedisServer) -> str:
    return server.command("GET", "kvpool:{n}:layout").decode().split("\r\n")[1]


async def test_keys_of_another_layout_are_refused_on_every_connection() -> None:
    with running_redis() as server:
        mark(server, ANOTHER)
        store = recorded_redis.open_store(server.url)
        with pytest.raises(
            StartupFailed, match=rf"kvpool:\* in Redis have layout '{ANOTHER}', and this release has layout '{OURS}'"
        ):
            await store.check_layout()
        with pytest.raises(StoreUnavailable, match=f"have layout '{ANOTHER}'"):
            await store.nodes.snapshot()
        server.flush()
        await store.check_layout()
        assert await store.nodes.snapshot() == []
        mark(server, ANOTHER)  # as if it had failed over to a Redis of others: new connections find out
        server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(StoreUnavailable, match=f"have layout '{ANOTHER}'"):
            await eventually_raises(store)
        with pytest.raises(StartupFailed):
            await store.check_layout()
        await store.close()


async def eventually_raises(store: RedisIndexStore) -> None:
    """Whatever a call says once the connection that was killed is known to be."""
    while True:
        try:
            await store.nodes.snapshot()
        except StoreUnavailable as error:
            if "layout" in str(error):
                raise
        await asyncio.sleep(0)


async def test_a_mark_that_is_flushed_comes_back_while_the_index_runs() -> None:
    with running_redis() as server:
        store = recorded_redis.open_store(server.url)
        await store.check_layout()
        looking = asyncio.ensure_future(store.run())
        server.flush()
        await eventually(lambda: marked(server) == OURS, 60)
        mark(server, ANOTHER)  # somebody was faster after a flush: who runs ends and says so, and does not take it back
        with pytest.raises(StartupFailed, match=f"have layout '{ANOTHER}'"):
            await looking
        assert marked(server) == ANOTHER
        await store.close()


@pytest.mark.parametrize("topology", ["redis_server", "redis_cluster", "redis_sentinels"])
async def test_of_two_that_start_at_once_one_is_first(
    topology: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, prefix = request.getfixturevalue(topology).url, "at-once"
    stores = [RedisIndexStore(url, timeout_s=20.0, key_prefix=prefix) for _ in range(2)]
    monkeypatch.setattr(redis_store, "RedisLayout", partial(RedisLayout, layout=int(ANOTHER)))
    stores += [RedisIndexStore(url, timeout_s=20.0, key_prefix=prefix) for _ in range(2)]
    ends = await asyncio.gather(*(store.check_layout() for store in stores), return_exceptions=True)
    ours, theirs = ends[:2], ends[2:]
    refused = theirs if ours == [None, None] else ours
    assert [type(end) for end in refused] == [StartupFailed] * 2 and [*ours, *theirs].count(None) == 2
    for store in stores:
        await store.close()


def test_the_command_that_deletes_the_keys_of_a_prefix_deletes_all_of_them_and_no_others() -> None:
    """Keys end with raw hashes: with quotes, blanks and line ends among their bytes."""
    (line,) = [line for line in UPGRADES.read_text().splitlines() if line.startswith("redis-cli -u")]
    *_, command, script, key_count, pattern = shlex.split(line)
    assert (command, key_count, pattern) == ("EVAL", "0", "kvpool:*")
    names = ("kvpool:{1}:it's", 'kvpool:{2}:"', "kvpool:{3}: \n \\", "kvpool:{n}:layout", "kvpool2:{1}:", "other")
    with running_redis() as server:
        for name in names:
            assert server.command("SET", name, "1").startswith(b"+OK")
        assert server.command(command, script, key_count, pattern).startswith(b"$-1")
        assert server.command("DBSIZE") == b":2\r\n"


async def test_a_redis_that_is_out_of_reach_is_looked_at_later() -> None:
    with running_redis() as server:
        store = RedisIndexStore(server.url, timeout_s=0.05)
        server.kill()
        await store.check_layout()
        await store.close()


async def test_ours_keep_what_the_last_record_says() -> None:
    """Another layout needs other names of keys, or replicas that run beside ours take it for their own."""
    with running_redis() as server:
        store = recorded_redis.open_store(server.url)
        await recorded_redis.fill(store)
        await store.close()
        kept = await recorded_redis.dump(server.url)
    last = recorded_redis.recorded(recorded_redis.releases()[-1])
    assert recorded_redis.shape(kept) == recorded_redis.shape(last)
