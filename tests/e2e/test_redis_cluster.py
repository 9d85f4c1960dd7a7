"""The index over a real Redis Cluster: a member that is lost, and slots that move while they are used."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Iterator

import pytest

from kvpool.core.cluster import NodeInfo, NodeKind
from kvpool.core.errors import StoreUnavailable
from kvpool.core.location_digest import fingerprint, holding, range_of
from kvpool.testing import eventually
from kvpool_index.adapters.redis_cluster import slot_of
from kvpool_index.adapters.redis_reads import group_key
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.adapters.redis_wire import Connection
from kvpool_index.core.entries import ChunkOperation, GroupRead, Operation
from kvpool_index.ports import StreamFence
from tests.fixtures.index_node import Chain, FakeNode, open_keyspace
from tests.fixtures.index_server import running_index
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.redis_topologies import RedisCluster, ask, facts, running_cluster

pytestmark = pytest.mark.e2e

KEYSPACE = b"k" * 16
PREFIX = "kvpool"
TIMEOUT_S = PATIENCE_S
NEVER_S = 3600.0  # a store call that took its time would not end in that of a test


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """A Cluster of these tests' own: they may break it, and leave it whole."""
    with running_cluster() as running:
        yield running


async def opened(
    url: str, prefix: str, timeout_s: float = TIMEOUT_S, **options: int
) -> tuple[RedisIndexStore, StreamFence]:
    """A store, and an announce stream of a node."""
    store = RedisIndexStore(url, timeout_s=timeout_s, key_prefix=prefix, **options)
    info = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, endpoint="h:1", incarnation=0)
    granted = await store.nodes.register(info, last_incarnation=0, lease_ttl_ms=600_000)
    return store, await store.nodes.open_stream(info.node_id, granted.incarnation, granted.announce_epoch)


def key_of(head: bytes, prefix: str = PREFIX) -> bytes:
    return group_key(prefix.encode(), KEYSPACE, head)


def heads_at(cluster: RedisCluster, server: RedisServer, count: int, prefix: str = PREFIX) -> list[bytes]:
    """Heads of groups that a member has."""
    owners = cluster.owners()
    made = (number.to_bytes(16, "big") for number in itertools.count())
    return list(itertools.islice((head for head in made if owners[slot_of(key_of(head, prefix))] is server), count))


def stored(fence: StreamFence, head: bytes, shards: int = 0xFF) -> ChunkOperation:
    operation = Operation(ordinal=fence.ordinal, full_shards=0xFF, added=(0, shards, 0))
    return ChunkOperation(keyspace=KEYSPACE, chunk_hash=head, group_head=head, operation=operation)


async def found(store: RedisIndexStore, heads: list[bytes]) -> int:
    values = await store.locations.read(KEYSPACE, [GroupRead(head, [head[:8]]) for head in heads])
    return sum(value is not None for value in values)


async def test_a_match_is_one_pipelined_round_to_each_master(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = f"t{secrets.token_hex(6)}"
    store, _ = await opened(cluster.url, prefix)
    groups = [GroupRead(secrets.token_bytes(16), [bytes(8)] * 16) for _ in range(32)]
    await store.locations.read(KEYSPACE, groups)
    ports = {server.port for server in cluster.servers}

    def commands() -> Counter[str]:
        return Counter(
            {
                name: int(value.split(",")[0].removeprefix("calls="))
                for port in ports
                for name, value in ((f"{port} {name}", value) for name, value in facts(port, "commandstats").items())
                if value and name.split("_")[-1] not in ("info", "ping", "slots")
            }
        )

    before = commands()
    sends: list[tuple[Connection, int]] = []
    send = Connection.send

    def counted(
        self: Connection, packed: bytes | bytearray, reply_count: int, timeout_s: float
    ) -> asyncio.Future[list[object]]:
        sends.append((self, reply_count))
        return send(self, packed, reply_count, timeout_s)

    monkeypatch.setattr(Connection, "send", counted)
    await store.locations.read(KEYSPACE, groups)
    assert len(sends) == len({connection for connection, _ in sends}) == 3, "one round to each master"
    assert sum(count for _, count in sends) == 32, "one command a group"
    run = commands() - before
    assert {name.split(" ")[1]: 0 for name in run} == {"cmdstat_hmget": 0} and sum(run.values()) == 32
    await store.close()


async def test_a_lost_master_takes_only_its_own_slots_with_it(cluster: RedisCluster) -> None:
    nodes_at = cluster.owner(f"{PREFIX}:{{n}}:records".encode())
    lost = next(server for server in cluster.servers if server is not nodes_at)
    store, fence = await opened(cluster.url, PREFIX, NEVER_S)
    gone, kept = heads_at(cluster, lost, 4), heads_at(cluster, nodes_at, 4)
    await store.locations.apply(fence, [stored(fence, head) for head in (*gone, *kept)])
    assert await found(store, gone + kept) == 8
    lost.kill()
    for heads in (gone, gone + kept):
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{lost.port}"):
            await found(store, heads)
    with pytest.raises(StoreUnavailable):
        await store.locations.apply(fence, [stored(fence, gone[0])])
    assert await found(store, kept) == 4
    await store.locations.apply(fence, [stored(fence, kept[0], 0b11)])
    lost.start()

    async def back() -> bool:
        try:
            await store.locations.apply(fence, [stored(fence, head) for head in gone])
        except StoreUnavailable:
            return False
        return await found(store, gone + kept) == 8

    await eventually(back)
    await store.close()


async def test_slots_move_while_they_are_used(cluster: RedisCluster) -> None:
    source, target, _ = cluster.servers
    store, fence = await opened(cluster.url, PREFIX)
    (head,) = heads_at(cluster, source, 1)
    slot = slot_of(key_of(head))
    others = heads_at(cluster, target, 3)
    done = asyncio.Event()
    rounds = 0

    async def use() -> None:
        nonlocal rounds
        while not done.is_set():
            rounds += 1
            states = await store.locations.apply(
                fence, [stored(fence, each, rounds % 255 + 1) for each in (head, *others)]
            )
            values = await store.locations.read(KEYSPACE, [GroupRead(each, [each[:8]]) for each in (head, *others)])
            assert values == [state.value for state in states], "a change was lost on the way"

    async def some_rounds() -> None:
        until = rounds + 5
        await eventually(lambda: rounds >= until or using.done())

    using = asyncio.create_task(use())
    await some_rounds()
    cluster.begin_move(slot, source, target)
    await some_rounds()
    assert cluster.move_keys(slot, source, target) >= 1
    await some_rounds()
    assert store.redis.redirections["ask"] > 0
    cluster.end_move(slot, target)
    await some_rounds()
    assert store.redis.redirections["moved"] > 0
    moved = store.redis.redirections["moved"]
    await some_rounds()
    assert store.redis.redirections["moved"] == moved, "it learns from one redirection"
    done.set()
    await using
    await store.close()


async def test_a_split_group_moves_while_its_chunks_change(cluster: RedisCluster) -> None:
    """Its parts are keys of their own, of which some have moved and some have not: no change gets lost between them."""
    prefix = f"s{secrets.token_hex(6)}"
    source, target, _ = cluster.servers
    store, fence = await opened(cluster.url, prefix)
    (head,) = heads_at(cluster, source, 1, prefix)
    slot = slot_of(key_of(head, prefix))
    chunks = [secrets.token_bytes(16) for _ in range(1_500)]

    def changes(shards: int) -> list[ChunkOperation]:
        operation = Operation(ordinal=fence.ordinal, full_shards=0xFF, added=(0, shards, 0))
        return [
            ChunkOperation(keyspace=KEYSPACE, chunk_hash=chunk, group_head=head, operation=operation)
            for chunk in chunks
        ]

    await store.locations.apply(fence, changes(0b1))
    cluster.begin_move(slot, source, target)
    assert cluster.move_keys(slot, source, target, limit=100) == 100
    changing = asyncio.create_task(store.locations.apply(fence, changes(0b10)))
    await eventually(lambda: store.redis.redirections["try_again"] > 0)
    assert not changing.done()
    cluster.move_keys(slot, source, target)
    cluster.end_move(slot, target)
    states = await changing
    values = await store.locations.read(KEYSPACE, [GroupRead(head, [chunk[:8] for chunk in chunks])])
    assert values == [state.value for state in states] and len(set(values)) == 1
    number = range_of(head)
    wanted = 0
    for chunk in chunks:
        wanted ^= fingerprint(KEYSPACE + head + chunk[:8], holding((0, 0b11, 0), 0xFF))
    assert await store.locations.digests(fence.ordinal, [number]) == [wanted]
    (group,), _ = await store.locations.split_groups(fence.ordinal, number, b"")
    parts = 0
    for digest in group.digests:
        parts ^= digest
    assert parts == wanted
    assert ask(source.port, "CLUSTER", "COUNTKEYSINSLOT", str(slot)) == 0
    await store.close()


async def test_tables_of_nodes_may_move_too(cluster: RedisCluster) -> None:
    """A script over several keys of a slot cannot run while only some of them have moved: it is tried again."""
    records = f"{PREFIX}:{{n}}:records".encode()
    source, slot = cluster.owner(records), slot_of(records)
    target = next(server for server in cluster.servers if server is not source)
    store, fence = await opened(cluster.url, PREFIX)
    cluster.begin_move(slot, source, target)
    assert cluster.move_keys(slot, source, target, limit=1) == 1
    renewing = asyncio.create_task(
        store.nodes.register(
            NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, endpoint="h:2", incarnation=fence.incarnation),
            last_incarnation=0,
            lease_ttl_ms=600_000,
        )
    )
    await eventually(lambda: store.redis.redirections["try_again"] > 0)
    assert not renewing.done()
    cluster.move_keys(slot, source, target)
    cluster.end_move(slot, target)
    granted = await renewing
    assert granted.incarnation == fence.incarnation and granted.ordinal == fence.ordinal
    (record,) = await store.nodes.snapshot()
    assert record.info.endpoint == "h:2" and record.alive
    await store.close()


async def test_a_drop_reaches_all_masters(cluster: RedisCluster) -> None:
    prefix = f"t{secrets.token_hex(6)}"
    store, fence = await opened(cluster.url, prefix)
    heads = [secrets.token_bytes(16) for _ in range(60)]
    await store.locations.apply(fence, [stored(fence, head) for head in heads])
    assert {cluster.owner(key_of(head, prefix)).port for head in heads} == {server.port for server in cluster.servers}
    dropped = [state async for states in store.locations.drop(KEYSPACE, None) for state in states]
    assert {state.group_head for state in dropped} == set(heads)
    assert await found(store, heads) == 0
    await store.close()


async def test_lost_scripts_are_loaded_on_each_master(cluster: RedisCluster) -> None:
    store, fence = await opened(cluster.url, f"t{secrets.token_hex(6)}")
    for _ in range(2):
        for server in cluster.servers:
            ask(server.port, "SCRIPT", "FLUSH", "SYNC")
        heads = [secrets.token_bytes(16) for _ in range(30)]
        states = await store.locations.apply(fence, [stored(fence, head) for head in heads])
        assert all(state.value for state in states) and await found(store, heads) == 30
    await store.close()


async def test_what_is_sent_again_is_waited_for_again(cluster: RedisCluster) -> None:
    """A new connection has written nothing yet, so that WAIT alone would say yes to what another one left behind."""
    prefix = f"t{secrets.token_hex(6)}"
    careless, fence = await opened(cluster.url, prefix)
    operations = [stored(fence, secrets.token_bytes(16)) for _ in range(30)]
    await careless.locations.apply(fence, operations)
    await careless.close()
    for server in cluster.servers:
        ask(server.port, "CONFIG", "RESETSTAT")
    careful = RedisIndexStore(cluster.url, timeout_s=1.0, key_prefix=prefix, wait_replicas=1)

    async def is_refused() -> bool:
        """Before its time is over, in half of which this machine does not always get anywhere."""
        with pytest.raises(StoreUnavailable) as refused:
            await careful.locations.apply(fence, operations)
        return "only 0 of 1 replicas" in str(refused.value)

    await eventually(is_refused)
    for server in cluster.servers:
        run = facts(server.port, "commandstats")
        assert "cmdstat_set" in run and "cmdstat_wait" in run
    await careful.close()


async def test_an_index_serves_from_a_cluster(cluster: RedisCluster) -> None:
    store = RedisIndexStore(cluster.url, timeout_s=TIMEOUT_S, key_prefix=f"t{secrets.token_hex(6)}")
    async with running_index(store) as index:
        chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
        await node.announce(chain.added(range(40)))
        assert (await index.stub.Match(chain.query())).matched_chunks == 40
        await eventually(lambda: index.metric("kvpool_index_redis_masters_up") == 3)
        assert index.metric("kvpool_index_redis_masters") == 3
        assert index.metric("kvpool_index_redis_problem", kind="no_persistence") == 1
        assert index.metric("kvpool_index_redis_problem", kind="topology") == 0
    await store.close()


async def test_without_any_member_calls_fail_in_time() -> None:
    store = RedisIndexStore("redis+cluster://127.0.0.1:1,127.0.0.1:2", timeout_s=NEVER_S)
    with pytest.raises(StoreUnavailable, match="no member of the Cluster"):
        await store.locations.read(KEYSPACE, [GroupRead(bytes(16), [bytes(8)])])
    await store.close()


async def test_a_replica_that_takes_over_is_found() -> None:
    with running_cluster(node_timeout_ms=2000) as cluster:
        records = f"{PREFIX}:{{n}}:records".encode()
        lost = cluster.owner(records)
        replica = cluster.add_replica(lost)
        store, fence = await opened(cluster.url, PREFIX)
        heads = heads_at(cluster, lost, 4)
        await store.locations.apply(fence, [stored(fence, head) for head in heads])
        assert ask(lost.port, "WAIT", "1", "60000") == 1
        lost.kill()
        with pytest.raises(StoreUnavailable):
            await found(store, heads)

        async def announced() -> bool:
            try:
                await store.locations.apply(fence, [stored(fence, head, 0b11) for head in heads])
            except StoreUnavailable:
                return False
            return True

        await eventually(announced, message="no replica took over")
        assert await found(store, heads) == 4 and cluster.owner(records) is replica
        assert store.redis.failovers == 1
        await store.close()
