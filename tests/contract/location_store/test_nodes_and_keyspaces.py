"""What every NodeDirectory and KeyspaceRegistry promises."""

import asyncio
import secrets
from dataclasses import replace

import pytest

from kvpool.core.cluster import NodeInfo, NodeKind, NodeLoad
from kvpool.core.errors import InvalidRequest, LeaseLost, StaleIncarnation
from kvpool_index.core.events import ORIGIN, NodeState, unpack_node
from kvpool_index.core.nodes import NodeRecord, Renewal
from kvpool_index.ports import BoundKeyspace, IndexStore, NodeGrant
from tests.contract.location_store.conftest import LEASE_MS, Harness, renew

LONG_MS = 10 * LEASE_MS
FOREVER_MS = 10**9


def new_node() -> NodeInfo:
    return NodeInfo(
        node_id=secrets.token_bytes(16),
        kind=NodeKind.PAGESTORE,
        host_id="host é",
        endpoint="host:1",
        bulk_endpoint="host:2",
        local_socket="/s",
        capacity_bytes=1 << 40,
        metrics_url="http://host:3/metrics",
        draining=True,
    )


async def register(store: IndexStore, info: NodeInfo, *, last_incarnation: int = 0, ttl_ms: int = LONG_MS) -> NodeGrant:
    return await store.nodes.register(info, last_incarnation=last_incarnation, lease_ttl_ms=ttl_ms)


async def record_of(store: IndexStore, node_id: bytes) -> NodeRecord | None:
    return next((record for record in await store.nodes.snapshot() if record.info.node_id == node_id), None)


async def node_events(store: IndexStore, node_id: bytes) -> list[NodeState]:
    entries = await store.events.read(store.events.stream_count - 1, ORIGIN, limit=1000, wait_s=0)
    states = [unpack_node(entry.payload) for entry in entries]
    return [state for state in states if state.info.node_id == node_id]


async def test_a_registration_is_seen_whole(harness: Harness) -> None:
    info = new_node()
    grant = await register(harness.store, info)
    record = await record_of(harness.peer, info.node_id)
    assert record is not None
    assert record.info == replace(info, incarnation=grant.incarnation)
    assert (record.ordinal, record.alive, record.ended, record.load) == (grant.ordinal, True, False, NodeLoad())
    assert LONG_MS - 5000 < record.lease_remaining_ms <= LONG_MS


async def test_incarnations_grow_past_everything_known(harness: Harness) -> None:
    info = new_node()
    first = await register(harness.store, info)
    assert first.incarnation > 10**15 - 1, "at least the store's time in microseconds"
    second = await register(harness.peer, info)
    assert second.incarnation > first.incarnation and second.ordinal != first.ordinal
    far = second.incarnation + 10**9
    third = await register(harness.store, info, last_incarnation=far)
    assert third.incarnation == far + 1
    assert (await register(harness.store, info)).incarnation == far + 2


async def test_no_registration_can_leave_a_node_without_a_next_incarnation(harness: Harness) -> None:
    info = new_node()
    victim = await register(harness.store, info)
    day_us = 24 * 3600 * 1_000_000
    for last in ((1 << 53) - 2, victim.incarnation + 2 * day_us):
        with pytest.raises(InvalidRequest, match="clock"):
            await register(harness.store, info, last_incarnation=last)
        with pytest.raises(InvalidRequest, match="clock"):
            await register(harness.store, replace(info, incarnation=last))
    attacked = await register(harness.peer, info, last_incarnation=victim.incarnation + day_us // 2)
    healed = await register(harness.store, info, last_incarnation=attacked.incarnation)
    assert healed.incarnation > attacked.incarnation


async def test_taking_over_a_live_lease_is_said(harness: Harness) -> None:
    info = new_node()
    first = await register(harness.store, info, ttl_ms=LEASE_MS)
    assert not first.took_over
    assert not (await register(harness.store, replace(info, incarnation=first.incarnation), ttl_ms=LEASE_MS)).took_over
    assert (await register(harness.peer, info, ttl_ms=LEASE_MS)).took_over
    await harness.let_leases_end()
    assert not (await register(harness.peer, info)).took_over


async def test_the_same_incarnation_keeps_its_ordinal(harness: Harness) -> None:
    info = new_node()
    first = await register(harness.store, info, ttl_ms=LEASE_MS)
    await harness.let_leases_end()
    again = await register(harness.peer, replace(info, incarnation=first.incarnation))
    assert (again.incarnation, again.ordinal) == (first.incarnation, first.ordinal)
    assert again.announce_epoch > first.announce_epoch
    with pytest.raises(StaleIncarnation):
        await register(harness.store, replace(info, incarnation=first.incarnation - 1))


async def test_an_incarnation_unknown_to_the_store_is_granted_again(harness: Harness) -> None:
    """The store was wiped, or rolled back to an older incarnation."""
    info = new_node()
    wiped = await register(harness.store, replace(info, incarnation=12345))
    assert wiped.incarnation == 12345
    newer = await register(harness.store, replace(info, incarnation=23456))
    assert newer.incarnation == 23456 and newer.ordinal != wiped.ordinal


async def test_renewal(harness: Harness) -> None:
    info, load = new_node(), NodeLoad(arena_capacity_bytes=5, disk_used_bytes=1 << 45, page_count=7)
    grant = await register(harness.store, info, ttl_ms=LEASE_MS)
    await renew(harness.peer, info.node_id, grant.incarnation, load, lease_ttl_ms=LONG_MS)
    record = await record_of(harness.store, info.node_id)
    assert record is not None and record.load == load and record.lease_remaining_ms > LONG_MS - 5000
    with pytest.raises(LeaseLost):
        await renew(harness.store, info.node_id, grant.incarnation + 1, load, lease_ttl_ms=LONG_MS)
    with pytest.raises(LeaseLost):
        await renew(harness.store, secrets.token_bytes(16), grant.incarnation, load, lease_ttl_ms=LONG_MS)
    newer = await register(harness.store, info, ttl_ms=LEASE_MS)
    with pytest.raises(StaleIncarnation):
        await renew(harness.store, info.node_id, grant.incarnation, load, lease_ttl_ms=LONG_MS)
    await harness.let_leases_end()
    with pytest.raises(LeaseLost):
        await renew(harness.store, info.node_id, newer.incarnation, load, lease_ttl_ms=LONG_MS)


async def test_leases_are_renewed_together_and_a_refusal_is_about_one(harness: Harness) -> None:
    load, nodes = NodeLoad(page_count=3), [new_node() for _ in range(300)]
    grants = [await register(harness.store, each, ttl_ms=LEASE_MS) for each in nodes]
    renewals = [
        Renewal(node_id=node.node_id, incarnation=grant.incarnation, load=load, lease_ttl_ms=LONG_MS)
        for node, grant in zip(nodes, grants, strict=True)
    ]
    renewals[7] = replace(renewals[7], incarnation=renewals[7].incarnation + 1)
    renewals[8] = replace(renewals[8], incarnation=renewals[8].incarnation - 1)
    refusals = await harness.peer.nodes.renew(renewals)
    assert [type(each) for each in refusals] == [type(None)] * 7 + [LeaseLost, StaleIncarnation] + [type(None)] * 291
    assert await harness.store.nodes.renew([replace(renewals[0], load=None)]) == [None]
    record = await record_of(harness.store, nodes[0].node_id)
    assert record is not None and record.load == load, "without a load the last one stays"
    assert await harness.store.nodes.renew([]) == []


async def test_end_is_final_and_idempotent(harness: Harness) -> None:
    info = new_node()
    grant = await register(harness.store, info)
    await harness.store.nodes.end(info.node_id, grant.incarnation - 1)
    record = await record_of(harness.store, info.node_id)
    assert record is not None and record.alive, "another incarnation's end does not touch the lease"
    await harness.store.nodes.end(info.node_id, grant.incarnation)
    await harness.peer.nodes.end(info.node_id, grant.incarnation)
    await harness.peer.nodes.end(secrets.token_bytes(16), 1)
    record = await record_of(harness.store, info.node_id)
    assert record is not None and not record.alive and record.ended and record.lease_remaining_ms <= 0
    events = await node_events(harness.store, info.node_id)
    assert [event.alive for event in events] == [True, False]
    assert events[-1].info == replace(info, incarnation=grant.incarnation)
    assert (await register(harness.store, info)).ordinal != grant.ordinal


async def test_death_is_declared_once_among_replicas(harness: Harness) -> None:
    info = new_node()
    grant = await register(harness.store, info, ttl_ms=LEASE_MS)

    def declare(store: IndexStore, forget_after_ms: int = FOREVER_MS) -> asyncio.Future[bool]:
        call = store.nodes.declare_dead(info.node_id, grant.incarnation, forget_after_ms=forget_after_ms)
        return asyncio.ensure_future(call)

    assert not await declare(harness.store), "its lease runs"
    await harness.let_leases_end()
    stores = [harness.store, harness.peer] * 4
    assert sorted(await asyncio.gather(*map(declare, stores))) == [False] * 7 + [True]
    assert [event.alive for event in await node_events(harness.store, info.node_id)] == [True, False]
    record = await record_of(harness.store, info.node_id)
    assert record is not None and not record.alive and not record.ended, "this incarnation may still come back"
    assert not await declare(harness.store, 0)
    assert await record_of(harness.store, info.node_id) is None, "forgotten when it is gone for long"
    assert not await declare(harness.store, 0)


async def test_announce_streams_follow_the_epoch(harness: Harness) -> None:
    info = new_node()
    first = await register(harness.store, info, ttl_ms=LEASE_MS)
    early = await harness.store.nodes.open_stream(info.node_id, first.incarnation, first.announce_epoch)
    late = await harness.peer.nodes.open_stream(info.node_id, first.incarnation, first.announce_epoch)
    assert late.number > early.number > 0
    second = await register(harness.store, replace(info, incarnation=first.incarnation), ttl_ms=LEASE_MS)
    with pytest.raises(LeaseLost):
        await harness.store.nodes.open_stream(info.node_id, first.incarnation, first.announce_epoch)
    with pytest.raises(LeaseLost):
        await harness.store.nodes.open_stream(secrets.token_bytes(16), first.incarnation, first.announce_epoch)
    await harness.let_leases_end()
    with pytest.raises(LeaseLost):
        await harness.store.nodes.open_stream(info.node_id, first.incarnation, second.announce_epoch)
    await register(harness.store, info)
    with pytest.raises(StaleIncarnation):
        await harness.store.nodes.open_stream(info.node_id, first.incarnation, second.announce_epoch)


def keyspace(tenant: str, name: str, content: bytes) -> BoundKeyspace:
    return BoundKeyspace(tenant=tenant, name=name, keyspace_id=(content * 16)[:16], encoding=content + b"\0\xff")


async def test_names_are_bound_once_per_tenant(harness: Harness) -> None:
    registry, peer = harness.store.keyspaces, harness.peer.keyspaces
    mine = keyspace("a", "m/1:x", b"one")
    assert await registry.bind(mine) == (mine, True)
    assert await peer.bind(replace(mine)) == (mine, False)
    other = keyspace("a", "m/1:x", b"two")
    assert await peer.bind(other) == (mine, False)
    assert await registry.by_id(other.keyspace_id) is None, "a refused binding leaves no trace"
    theirs = keyspace("b", "m/1:x", b"two")
    assert await registry.bind(theirs) == (theirs, True)
    assert await peer.by_id(mine.keyspace_id) == mine
    assert await peer.by_id(theirs.keyspace_id) == theirs


async def test_keyspaces_are_listed_by_name(harness: Harness) -> None:
    names = ["z", "a", "m.2", "m-1"]
    for number, name in enumerate(names):
        await harness.store.keyspaces.bind(keyspace("a", name, b"k%d" % number))
    await harness.store.keyspaces.bind(keyspace("b", "b", b"other"))
    assert [bound.name for bound in await harness.peer.keyspaces.of_tenant("a")] == sorted(names)
    assert [bound.name for bound in await harness.peer.keyspaces.of_tenant("b")] == ["b"]
    assert await harness.peer.keyspaces.of_tenant("c") == []


async def test_two_names_may_mean_the_same(harness: Harness) -> None:
    one, two = keyspace("a", "one", b"same"), keyspace("a", "two", b"same")
    await harness.store.keyspaces.bind(one)
    assert await harness.store.keyspaces.bind(two) == (two, True)
    assert await harness.store.keyspaces.by_id(one.keyspace_id) == one


async def test_no_more_keyspaces_are_restored_than_the_limit(harness: Harness) -> None:
    registry, peer = harness.store.keyspaces, harness.peer.keyspaces
    await registry.bind(keyspace("a", "one", b"k0"))
    await registry.bind(keyspace("b", "one", b"other"))
    named = [keyspace("a", "", b"k%d" % number) for number in range(5)]
    assert await peer.restore("a", named, limit=3) == 2
    assert await peer.count("a") == 3 and await peer.count("b") == 1
    known = await registry.by_ids([each.keyspace_id for each in named])
    assert [each is not None for each in known] == [True, True, True, False, False]
    assert known[0] == keyspace("a", "one", b"k0"), "what is known stays as it is"
    assert await peer.restore("a", named[:3], limit=3) == 0


async def test_only_keyspaces_that_were_not_used_are_forgotten(harness: Harness) -> None:
    registry, peer = harness.store.keyspaces, harness.peer.keyspaces
    mine, named_twice, restored = (keyspace("a", each, each.encode()) for each in ("x", "y", "z"))
    for each in (mine, named_twice, replace(named_twice, name="y2")):
        await registry.bind(each)
    await registry.restore("a", [replace(restored, name="")], limit=9)
    await registry.touch("a", [keyspace("a", "", b"none").keyspace_id])
    ids = {each.keyspace_id for each in (mine, named_twice, restored)}
    given = [mine, named_twice, replace(named_twice, name="y2"), replace(restored, name="")]
    assert await peer.idle("a", 3600) == [] and await peer.forget("a", given, idle_s=3600) == []
    assert set(await peer.idle("a", -5)) == ids and await peer.idle("b", -5) == []
    assert set(await peer.forget("a", given[1:], idle_s=-5)) == ids - {mine.keyspace_id}
    assert await registry.of_tenant("a") == [mine] and await registry.count("a") == 1
    assert await registry.by_ids([each.keyspace_id for each in given]) == [mine, None, None, None]
