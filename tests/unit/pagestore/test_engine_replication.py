"""Replication: what became durable is brought to other nodes, and lost copies come back."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Collection
from contextlib import AsyncExitStack

import pytest

from kvpool.core.errors import ArenaFull, PageCorrupt
from kvpool.core.outcome import Tier
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool.testing import eventually
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.engine import local_pages
from kvpool_pagestore.engine.local_pages import ChunkNames, LocalPages
from tests.fixtures.movement import Cluster, MemberPeers, cluster_of, flip, join
from tests.fixtures.pagestore import KEYSPACE, PAGE_BYTES, TENANT, metadata
from tests.fixtures.pagestore_calls import acquire_one, open_session, store, wanted

PAGES = range(20)  # two chain groups
OTHERS = range(1600, 1600 + len(PAGES))


async def fill(cluster: Cluster, at: int = 0, numbers: range = PAGES) -> None:
    running = cluster.members[at].run
    peer = await open_session(running)
    assert await store(running, peer, numbers) == [None] * len(numbers)


async def test_every_page_gets_its_copies_on_other_hosts() -> None:
    async with cluster_of(4, hosts=["a", "a", "b", "c"], replication_factor=2) as cluster:
        await fill(cluster)
        await eventually(lambda: all(len(cluster.holders_of(number)) == 2 for number in PAGES))
        for number in PAGES:
            assert set(cluster.holders_of(number)) <= {0, 2, 3}, "node 1 shares the host of node 0"
        # Groups go where placement says, so that not all goes to one node; a group stays together.
        for start in (0, 16):
            assert len({tuple(cluster.holders_of(number)) for number in PAGES if number // 16 == start // 16}) == 1
        running = cluster.members[0].run
        await eventually(lambda: running.metric("moved_pages_total", purpose="replica") == len(PAGES))


async def test_without_another_host_a_node_of_the_same_host_serves() -> None:
    async with cluster_of(2, hosts=["a", "a"], replication_factor=3) as cluster:
        await fill(cluster)
        await eventually(lambda: all(cluster.holders_of(number) == [0, 1] for number in PAGES))
        assert cluster.members[0].run.engine.gauges().replica_queue_chunks == 0, "too few nodes are no failure"


async def test_durable_copies_go_only_to_nodes_with_a_disk() -> None:
    async with cluster_of(1, replication_factor=2) as cluster, AsyncExitStack() as stack:
        await join(cluster, stack, 1, host="host-1", disk=False, replication_factor=2)
        await join(cluster, stack, 2, host="host-2", replication_factor=2)
        await fill(cluster, numbers=range(0, 20 * 16, 16))  # twenty chain groups: placement would name either node
        await eventually(lambda: all(cluster.holders_of(number) == [0, 2] for number in range(0, 20 * 16, 16)))
        assert not cluster.members[1].pushed_bytes
        sent = cluster.members[0].run
        await eventually(lambda: sent.metric("moved_pages_total", purpose="replica") == 20)
        await sent.engine.replication.sweep()
        assert not any(
            "move_failures" in one.name for one in sent.registry.collect() if one.samples and one.samples[0].value
        )


async def test_a_factor_of_one_sends_no_request() -> None:
    async with cluster_of(2) as cluster:
        await fill(cluster)
        await cluster.members[0].run.engine.flush("tenant", b"")
        assert cluster.places == 0


async def test_a_copy_that_failed_is_tried_again() -> None:
    async with cluster_of(2, replication_factor=2) as cluster:
        cluster.members[1].refuse = lambda item: ArenaFull("full")
        await fill(cluster)
        failures = {"purpose": "replica", "reason": "ARENA_FULL"}
        await eventually(lambda: cluster.members[0].run.metric("move_failures_total", **failures) > 0)
        assert cluster.holders_of(0) == [0]
        cluster.members[1].refuse = lambda item: None
        await eventually(lambda: all(cluster.holders_of(number) == [0, 1] for number in PAGES))


async def test_the_index_may_be_away_when_pages_are_stored() -> None:
    async with cluster_of(2, replication_factor=2) as cluster:
        cluster.reachable = False
        await fill(cluster)
        await eventually(lambda: cluster.places > 0)
        cluster.reachable = True
        await eventually(lambda: all(cluster.holders_of(number) == [0, 1] for number in PAGES))


async def test_bytes_that_a_network_spoils_are_stored_nowhere() -> None:
    async with cluster_of(2, replication_factor=2) as cluster:
        peers = cluster.members[0].world.peers
        assert isinstance(peers, MemberPeers)
        peers.spoil = flip
        await fill(cluster)
        failures = {"purpose": "replica", "reason": "PAGE_CORRUPT"}
        await eventually(lambda: cluster.members[0].run.metric("move_failures_total", **failures) >= len(PAGES))
        assert cluster.holders_of(0) == [0] and not cluster.members[1].has(0, Tier.STAGING)
        # Our own copies were looked at again, and are well.
        running = cluster.members[0].run
        peer = await open_session(running)
        assert (await acquire_one(running, peer, wanted(0))).grant is not None
        peers.spoil = lambda page: None
        await eventually(lambda: cluster.holders_of(0) == [0, 1])


async def test_a_node_that_says_that_good_pages_are_corrupt_has_none_dropped() -> None:
    async with cluster_of(2, replication_factor=2, disk=False) as cluster:
        cluster.members[1].refuse = lambda item: PageCorrupt("so it says")
        await fill(cluster)
        running = cluster.members[0].run
        failures = {"purpose": "replica", "reason": "PAGE_CORRUPT"}
        await eventually(lambda: running.metric("move_failures_total", **failures) >= len(PAGES))
        peer = await open_session(running)
        for number in PAGES:
            assert (await acquire_one(running, peer, wanted(number), wait_s=0)).grant is not None


async def test_a_push_to_a_node_that_answers_nothing_is_given_up() -> None:
    # A durable push is given up after half of push_timeout_ms.
    async with cluster_of(2, replication_factor=2, pull_stall_ms=10, push_timeout_ms=500) as cluster:
        cluster.members[1].hung = True
        await fill(cluster)
        running = cluster.members[0].run
        failures = {"purpose": "replica", "reason": "DEADLINE_EXCEEDED"}
        await eventually(lambda: running.metric("move_failures_total", **failures) >= len(PAGES))
        cluster.members[1].hung = False
        await eventually(lambda: all(cluster.holders_of(number) == [0, 1] for number in PAGES))


async def test_a_full_queue_is_refused_and_a_sweep_finds_what_was_left_out() -> None:
    async with cluster_of(2, replication_factor=2, replica_queue_chunks=4) as cluster:
        await fill(cluster)
        running = cluster.members[0].run
        await eventually(lambda: running.metric("move_failures_total", purpose="replica", reason="OVERLOADED") > 0)
        await eventually(lambda: running.engine.gauges().replica_queue_chunks == 0)
        await running.engine.flush("tenant", b"")
        await running.engine.replication.sweep()
        assert all(cluster.holders_of(number) == [0, 1] for number in PAGES)


async def test_a_sweep_heals_what_a_dead_node_held() -> None:
    async with cluster_of(3, replication_factor=2) as cluster:
        await fill(cluster)
        await eventually(lambda: all(len(cluster.holders_of(number)) == 2 for number in PAGES))
        dead = next(at for at in cluster.holders_of(0) if at)
        cluster.members[dead].die()
        (left,) = {1, 2} - {dead}
        sweep = cluster.members[0].run.engine.replication
        await sweep.sweep()  # may still know of the dead node
        await sweep.sweep()
        await eventually(lambda: all({0, left} <= set(cluster.holders_of(number)) for number in PAGES))


async def test_a_copy_in_staging_does_not_count_for_a_durable_page() -> None:
    async with cluster_of(1, replication_factor=2) as cluster, AsyncExitStack() as stack:
        second = await join(cluster, stack, 1, host="host-1", disk_bytes=len(PAGES) * PAGE_BYTES)
        await fill(cluster)
        await eventually(lambda: all(cluster.holders_of(number) == [0, 1] for number in PAGES))
        await fill(cluster, 1, OTHERS)  # its disk has no room for both, its memory has
        await eventually(lambda: all(cluster.holders_of(number) == [0] for number in PAGES))
        assert all(second.has(number, Tier.STAGING) for number in PAGES)
        await cluster.members[0].run.engine.replication.sweep()
        assert all(cluster.holders_of(number) == [0, 1] for number in PAGES), "it is made durable where it is staged"


@pytest.mark.parametrize("hot_copies", [2, 3])
async def test_a_hot_chunk_gets_copies_on_more_nodes(hot_copies: int) -> None:
    async with cluster_of(3, hot_uses_per_minute=10, hot_copies=hot_copies) as cluster:
        await fill(cluster, numbers=range(2))
        running = cluster.members[0].run
        await running.engine.flush("tenant", b"")
        peer = await open_session(running)
        for _ in range(20):
            answer = await acquire_one(running, peer, wanted(1))
            assert answer.grant is not None
            running.engine.pages.release(peer, [answer.grant.lease_id])
        await eventually(lambda: len(cluster.holders_of(1)) == hot_copies)
        assert cluster.holders_of(0) == [0]
        await eventually(lambda: running.metric("moved_pages_total", purpose="hot") == hot_copies - 1)


async def test_what_never_reaches_a_disk_is_copied_from_staging_to_staging() -> None:
    async with cluster_of(3, disk=False, replication_factor=2) as cluster:
        await fill(cluster)
        await eventually(lambda: all(len(cluster.holders_of(number, Tier.STAGING)) == 2 for number in PAGES))


async def test_a_keyspace_has_a_factor_of_its_own() -> None:
    async with cluster_of(3) as cluster:
        for member in cluster.members:
            policy = VersionedPolicy(keyspace=KEYSPACE, policy=KeyspacePolicy(replication_factor=3), version=1)
            member.world.index.policies[KEYSPACE] = policy
        await fill(cluster)
        await eventually(lambda: all(cluster.holders_of(number) == [0, 1, 2] for number in PAGES))


async def test_a_sweep_asks_the_index_once_for_many_chain_groups() -> None:
    async with cluster_of(2, replication_factor=2) as cluster:
        numbers = range(64)  # four chain groups
        for start in range(0, 64, 16):
            await fill(cluster, numbers=range(start, start + 16))
            await cluster.members[0].run.engine.flush(TENANT, b"")
        await eventually(lambda: all(cluster.holders_of(number) == [0, 1] for number in numbers))
        movement = cluster.members[0].run.engine.replication
        await movement.sweep()
        await eventually(lambda: not movement.waiting_chunks)
        before = cluster.places
        await movement.sweep()
        assert cluster.places - before <= 2, "who the nodes are, and who holds the chunks"


async def test_what_a_node_holds_is_gathered_by_chain_group_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_pages, "_CHUNKS_A_TURN", 4)
    monkeypatch.setattr(local_pages, "_BUCKET_CHUNKS", 8)
    async with cluster_of(1, replication_factor=2) as cluster:
        running = cluster.members[0].run
        for start in range(0, 64, 16):
            await fill(cluster, numbers=range(start, start + 16))
            await running.engine.flush(TENANT, b"")
        turn, looks, gathered = 0, Counter[int](), list[tuple[list[ChunkNames], int]]()
        true_location, true_buckets = DiskMap.location, LocalPages.buckets

        def counted(self: DiskMap, keyspace: bytes, chunk_hash: bytes) -> tuple[int, bytes] | None:
            looks[turn] += 1
            return true_location(self, keyspace, chunk_hash)

        async def turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        async def noted(self: LocalPages, keyspaces: Collection[bytes] | None = None) -> list[ChunkNames]:
            found = await true_buckets(self, keyspaces)
            gathered.append((found, max(looks.values())))
            return found

        monkeypatch.setattr(DiskMap, "location", counted)
        monkeypatch.setattr(LocalPages, "buckets", noted)
        others = asyncio.ensure_future(turns())
        await running.engine.replication.sweep()
        others.cancel()
        ((buckets, most_looks),) = gathered
        assert most_looks <= 4
        listed = [[name for part in one.parts(3) for name in part] for one in buckets]
        groups = [{metadata(int.from_bytes(name[16:24], "big")).group_head_hash for name in one} for one in listed]
        assert sum(map(len, buckets)) == sum(map(len, listed)) == 64
        assert sum(map(len, groups)) == 4, "no group is in two of them"
        visited = [part for one in buckets for part in gc.get_referents(one) if not isinstance(part, type)]
        assert len(visited) == len(buckets), "a collection of garbage has to visit the names one by one"
