"""New nodes get their share: at a bounded rate, and nothing is forgotten before it is durable and known elsewhere."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

from kvpool.core.errors import ArenaFull
from kvpool.testing import eventually
from tests.fixtures.movement import Cluster, Member, MemberPeers, cluster_of, flip, join
from tests.fixtures.pagestore import PAGE_BYTES, TENANT
from tests.fixtures.pagestore_calls import open_session, store

PAGES = range(64)  # four chain groups
A_WHILE_S = 2.0  # after which a node asks the index again who is there
FAST: dict[str, Any] = {"rebalance_bytes_per_s": 1 << 30}


async def fill(member: Member) -> None:
    peer = await open_session(member.run)
    for start in range(PAGES.start, PAGES.stop, 16):
        assert await store(member.run, peer, range(start, start + 16)) == [None] * 16
        await member.run.engine.flush(TENANT, b"")


async def sweep(cluster: Cluster, at: int = 0) -> None:
    await cluster.members[at].run.engine.replication.sweep()


async def test_only_what_is_the_new_nodes_by_placement_moves_and_leaves_the_old_one() -> None:
    async with cluster_of(1, **FAST) as cluster, AsyncExitStack() as stack:
        await fill(cluster.members[0])
        await sweep(cluster)  # who is there before counts as settled
        joined = await join(cluster, stack, 1, host="new", **FAST)
        cluster.clock.advance(A_WHILE_S)
        await sweep(cluster)
        await eventually(lambda: all(len(cluster.holders_of(number)) == 1 for number in PAGES))
        moved = [number for number in PAGES if cluster.holders_of(number) == [1]]
        assert 0 < len(moved) < len(PAGES) and len(moved) % 16 == 0
        assert joined.pushed_bytes == len(moved) * PAGE_BYTES
        assert cluster.members[0].run.metric("moved_pages_total", purpose="rebalance") == len(moved)
        await sweep(cluster)  # once
        assert joined.pushed_bytes == len(moved) * PAGE_BYTES


async def test_it_is_off_unless_a_rate_is_given() -> None:
    async with cluster_of(1) as cluster, AsyncExitStack() as stack:
        await fill(cluster.members[0])
        await sweep(cluster)
        joined = await join(cluster, stack, 1, host="new")
        cluster.clock.advance(A_WHILE_S)
        await sweep(cluster)
        assert joined.pushed_bytes == 0


async def test_the_new_node_is_filled_at_the_rate_and_no_faster() -> None:
    rate: dict[str, Any] = {"rebalance_bytes_per_s": 128 * PAGE_BYTES}
    async with cluster_of(1, **rate) as cluster, AsyncExitStack() as stack:
        await fill(cluster.members[0])
        await sweep(cluster)
        joined = await join(cluster, stack, 1, host="new", **rate)
        cluster.clock.advance(A_WHILE_S)
        began_s = time.monotonic()
        await sweep(cluster)
        pages_moved = joined.pushed_bytes // PAGE_BYTES
        assert pages_moved and time.monotonic() - began_s >= (pages_moved - 1) / 128


async def test_what_the_new_node_does_not_take_or_gets_spoiled_stays() -> None:
    async with cluster_of(1, **FAST) as cluster, AsyncExitStack() as stack:
        await fill(cluster.members[0])
        await sweep(cluster)
        joined = await join(cluster, stack, 1, host="new", **FAST)
        peers = cluster.members[0].world.peers
        assert isinstance(peers, MemberPeers)
        peers.spoil = flip
        joined.refuse = lambda item: ArenaFull("full") if item.key.chunk_hash[-1] % 2 else None
        cluster.clock.advance(A_WHILE_S)
        await sweep(cluster)
        assert all(cluster.holders_of(number) == [0] for number in PAGES)
