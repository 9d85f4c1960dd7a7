"""What Redis loses comes back without a restart, and a node that slept through its lease poisons nothing."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvpool.core.cluster import NodeInfo, NodeKind
from kvpool.core.outcome import Tier
from kvpool.testing import eventually, eventually_sync
from tests.e2e.healing_cluster import (
    INTERVAL_S,
    MadeChain,
    healing_cluster,
    matched,
    metric,
    open_keyspace,
    store_chunks,
)
from tests.fixtures.pagestore import KEYSPACE
from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.redis_topologies import ask, facts

pytestmark = pytest.mark.e2e

LEASE_TTL_S = 3.0
SLACK_S = 3.0  # the machine is busy
BOUND_S = LEASE_TTL_S / 3 + INTERVAL_S + SLACK_S


def equals(wanted: int, ask_now: Callable[[], Awaitable[int]]) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return await ask_now() == wanted

    return check


async def test_a_wiped_redis_is_filled_again_within_the_bound(tmp_path: Path) -> None:
    async with healing_cluster(tmp_path, LEASE_TTL_S) as cluster:
        client, chain, session = cluster.client(), MadeChain(40), await cluster.session()
        other = cluster.client(1)
        for replica in (client, other):  # whichever replica the pagestore turns to: it knows the name
            await open_keyspace(replica)
        await store_chunks(session, chain, range(40))
        async with cluster.control() as control:
            await control.flush()
        await eventually(equals(40, lambda: matched(client, chain)))
        pids = [process.pid for process in (*cluster.indexes, cluster.store)]

        async def heals_within_the_bound() -> bool:
            """Wiped again where this machine stood still meanwhile."""
            cluster.redis.flush()
            wiped_s = time.monotonic()
            await eventually(equals(40, lambda: matched(client, chain)))
            return time.monotonic() - wiped_s < BOUND_S

        async def both_tiers() -> bool:
            match = await client.match(chain.query())
            return {place.tier for run in match.runs for place in run.locations} == {Tier.STAGING, Tier.DISK}

        await eventually(heals_within_the_bound)
        await eventually(equals(40, lambda: matched(client, chain)))
        await eventually(both_tiers)
        assert [process.pid for process in (*cluster.indexes, cluster.store)] == pids
        # A replica that never heard of the keyspace knows it from the pagestore alone; its name comes with an engine.
        fresh = cluster.start_index("index2")
        cluster.indexes.append(fresh)
        await asyncio.to_thread(fresh.wait_ready)
        late = cluster.client(2)
        await eventually(equals(40, lambda: matched(late, chain)))
        assert [named.name for named in await late.list_keyspaces()] == ["test"], "the replicas remembered the name"
        await eventually(lambda: metric(cluster.store, "kvpool_pagestore_reconcile_rounds_total") >= 2)
        await eventually(lambda: metric(cluster.store, "kvpool_pagestore_reconcile_age_seconds") < BOUND_S)
        await eventually(lambda: 0 < metric(fresh, "kvpool_index_staleness_bound_seconds") < BOUND_S)
        for one in (client, other, late, session):
            await one.close()


async def test_a_failover_that_lost_acknowledged_writes_heals(tmp_path: Path) -> None:
    """The replica stops following, acknowledged changes of both kinds reach the master alone, it takes over."""
    async with healing_cluster(tmp_path) as cluster:
        client, session = cluster.client(), await cluster.session()
        kept, lost, dropped = MadeChain(20), MadeChain(20), MadeChain(20)
        await open_keyspace(client)
        await store_chunks(session, kept, range(20))
        await store_chunks(session, dropped, range(20))
        async with cluster.control() as control:
            await control.flush()
            await eventually(equals(20, lambda: matched(client, dropped)))
            with running_redis() as replica:
                await asyncio.to_thread(follow, replica.port, cluster.redis.port)
                ask(replica.port, "REPLICAOF", "NO", "ONE")  # from here on it falls behind
                await control.clear(KEYSPACE)
                await store_chunks(session, kept, range(10))
                await store_chunks(session, lost, range(20))
                await control.flush()
                await eventually(lambda: reported(client, {lost: 20, dropped: 0}))
                await asyncio.to_thread(take_over, cluster.redis, replica)
        await eventually(lambda: reported(client, {kept: 10, lost: 20, dropped: 0}))
        assert metric(cluster.store, "kvpool_pagestore_reconcile_ranges_total") > 0
        for one in (client, session):
            await one.close()


async def reported(client: object, wanted: dict[MadeChain, int]) -> bool:
    return [await matched(client, chain) for chain in wanted] == list(wanted.values())  # type: ignore[arg-type]


def follow(replica_port: int, master_port: int) -> None:
    """Make one server a replica of another, and wait until it has everything."""
    ask(master_port, "CONFIG", "SET", "repl-diskless-sync-delay", "0")
    ask(replica_port, "REPLICAOF", "127.0.0.1", str(master_port))

    def is_level() -> bool:
        here, there = facts(replica_port, "replication"), facts(master_port, "replication")
        return here.get("master_link_status") == "up" and here["slave_repl_offset"] == there["master_repl_offset"]

    eventually_sync(is_level)


def take_over(master: RedisServer, replica: RedisServer) -> None:
    """The master dies; what the replica has is served at its address."""
    master.kill()
    master.start()
    follow(master.port, replica.port)
    ask(master.port, "REPLICAOF", "NO", "ONE")


async def test_a_pagestore_that_slept_through_its_lease_comes_back_as_it_was(tmp_path: Path) -> None:
    async with healing_cluster(tmp_path, 1.0) as cluster:
        client, chain, session = cluster.client(), MadeChain(20), await cluster.session()
        await open_keyspace(client)
        await store_chunks(session, chain, range(10))
        await eventually(equals(10, lambda: matched(client, chain)))
        (before,) = await eventually(lambda: client.list_nodes(NodeKind.PAGESTORE))
        cluster.store.send(signal.SIGSTOP)
        await eventually(equals(0, lambda: matched(client, chain)))
        cluster.store.send(signal.SIGCONT)
        await eventually(equals(10, lambda: matched(client, chain)))
        await store_chunks(session, chain, range(10, 20))
        await eventually(equals(20, lambda: matched(client, chain)))
        (after,) = await eventually(lambda: client.list_nodes(NodeKind.PAGESTORE))
        assert after.info.incarnation == before.info.incarnation, "the same process, the same incarnation"
        for one in (client, session):
            await one.close()


async def test_a_pagestore_that_was_superseded_while_it_slept_ends_and_is_not_named(tmp_path: Path) -> None:
    async with healing_cluster(tmp_path) as cluster:
        client, chain, session = cluster.client(), MadeChain(20), await cluster.session()
        await open_keyspace(client)
        await store_chunks(session, chain, range(10))
        await eventually(equals(10, lambda: matched(client, chain)))
        (before,) = await client.list_nodes(NodeKind.PAGESTORE)
        writing = asyncio.create_task(store_chunks(session, chain, range(10, 20)))  # under way when it falls asleep
        cluster.store.send(signal.SIGSTOP)
        node = NodeInfo(node_id=before.info.node_id, kind=NodeKind.PAGESTORE, host_id="a", endpoint="127.0.0.1:9")
        newer = await client.register_node(node)
        assert newer.incarnation > before.info.incarnation
        assert await matched(client, chain) == 0, "what the older process had is not the newer one's"
        cluster.store.send(signal.SIGCONT)
        assert await asyncio.to_thread(cluster.store.wait, 60) == 1
        assert "registered" in cluster.store.log()
        await asyncio.gather(writing, return_exceptions=True)
        assert await matched(client, chain) == 0
        await session.close()
        await client.close()


async def test_an_index_replica_that_slept_undoes_nothing_when_it_wakes(tmp_path: Path) -> None:
    async with healing_cluster(tmp_path, 4.0) as cluster:
        first, second = cluster.client(0), cluster.client(1)
        kept, gone, session = MadeChain(10), MadeChain(10), await cluster.session()
        await open_keyspace(second)
        await store_chunks(session, kept, range(1))
        await eventually(equals(1, lambda: matched(second, kept)))
        cluster.indexes[0].send(signal.SIGSTOP)
        await store_chunks(session, gone, range(10))  # announced through the replica that sleeps, and again elsewhere
        await eventually(equals(10, lambda: matched(second, gone)))
        async with cluster.control() as control:
            await control.clear(KEYSPACE)
            await store_chunks(session, kept, range(10))
            await control.flush()
        await eventually(lambda: reported(second, {kept: 10, gone: 0}))
        cluster.indexes[0].send(signal.SIGCONT)
        await eventually(equals(10, lambda: matched(first, kept)))
        for _ in range(20):
            assert [await matched(client, chain) for client in (first, second) for chain in (kept, gone)] == [10, 0] * 2
            await asyncio.to_thread(metric, cluster.indexes[0], "kvpool_index_store_up")
        for one in (first, second, session):
            await one.close()
