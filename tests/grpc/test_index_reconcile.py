"""Comparing digests with the index, and telling it a whole range, over either store."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from kvpool.core import errors
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool.core.location_digest import BUCKETS_PER_RANGE, RANGE_COUNT, fingerprint, holding, range_of
from kvpool.testing import ManualClock
from kvpool.v1 import index_pb2
from kvpool.wire.convert_keyspace import spec_from_proto
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_index.core.entries import EVERY_SHARD, ChunkOperation, NodeEntry, Operation
from kvpool_index.ports import IndexStore
from tests.fixtures.index_node import (
    DISK,
    GRID,
    STAGING,
    TIMEOUT_S,
    Chain,
    FakeNode,
    held,
    open_keyspace,
    refusal,
    spec,
)
from tests.fixtures.index_server import RunningIndex, running_index
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.redis_server import redis_server as redis_server
from tests.fixtures.redis_topologies import ask, facts


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[IndexStore]:
    if request.param == "memory":
        yield MemoryIndexStore(ManualClock())
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    real = RedisIndexStore(server.url, timeout_s=TIMEOUT_S, key_prefix=f"t{secrets.token_hex(6)}")
    yield real
    await real.close()


@pytest.fixture
async def index(store: IndexStore) -> AsyncIterator[RunningIndex]:
    async with running_index(store) as running:
        yield running


async def digests(node: FakeNode, encodings: Sequence[bytes] = ()) -> index_pb2.ReconcileDigestsResponse:
    request = index_pb2.ReconcileDigestsRequest(
        node_id=node.node_id, incarnation=node.incarnation, keyspace_encodings=encodings
    )
    return await node.stub.ReconcileDigests(request, timeout=TIMEOUT_S)


def expected(chain: Chain, held: dict[int, tuple[int, int, int]]) -> list[int]:
    """By the definition on the wire."""
    found = [0] * RANGE_COUNT
    for index, shards in held.items():
        head = chain.hashes[index // 16 * 16]
        found[range_of(head)] ^= fingerprint(chain.keyspace + head + chain.hashes[index][:8], holding(shards, GRID))
    return found


def replacement(chain: Chain, changes: Sequence[index_pb2.LocationChange], group: int) -> index_pb2.ReplaceRange:
    """All of the range that a group of the chain lies in."""
    first = range_of(chain.hashes[16 * group]) * 16
    return index_pb2.ReplaceRange(first_bucket=first, last_bucket=first + 15, held=held(changes))


async def replace(node: FakeNode, part: index_pb2.ReplaceRange) -> None:
    async with node.announcing() as stream:
        part.sequence = 1
        assert await stream.exchange(index_pb2.AnnounceRequest(replace_range=part)) == 1


async def matched(index: RunningIndex, chain: Chain, shards: int = 0) -> int:
    return (await index.stub.Match(chain.query(shards=shards), timeout=TIMEOUT_S)).matched_chunks


async def test_digests_follow_every_change(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    assert list((await digests(node)).digests) == [0] * RANGE_COUNT
    async with node.announcing() as stream:
        await stream.send(
            [*chain.added(range(20)), *chain.added([3], tier=DISK), *chain.added([4], shards=5, tier=DISK)]
        )
        held = dict.fromkeys(range(20), (0, GRID, 0)) | {3: (0, GRID, GRID), 4: (0, GRID, 5)}
        answer = await digests(node)
        assert (list(answer.digests), answer.applied_sequence) == (expected(chain, held), 1)
        await stream.send(chain.removed(range(20)))
        held = {3: (0, 0, GRID), 4: (0, 0, 5)}
        answer = await digests(node)
        assert (list(answer.digests), answer.applied_sequence) == (expected(chain, held), 2)
    other = await FakeNode(index.stub).register()
    await other.announce(chain.added([3]))
    assert list((await digests(node)).digests) == expected(chain, held)
    assert list((await digests(other)).digests) == expected(chain, {3: (0, GRID, 0)})


async def test_a_range_says_then_what_its_owner_says(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    other = await FakeNode(index.stub).register()
    await node.announce([*chain.added(range(16)), *chain.added([16])])
    await other.announce(chain.added([2]))
    await replace(node, replacement(chain, [*chain.added([0, 1]), *chain.added([3], shards=1)], 0))
    held = {0: (0, GRID, 0), 1: (0, GRID, 0), 3: (0, 1, 0), 16: (0, GRID, 0)}
    assert list((await digests(node)).digests) == expected(chain, held)
    assert await matched(index, chain) == 3, "what another node has stays"
    assert await matched(index, chain, shards=1) == 4
    await replace(node, replacement(chain, [], 1))
    assert list((await digests(node)).digests) == expected(chain, {at: held[at] for at in (0, 1, 3)})
    assert index.metric("kvpool_index_replaced_ranges_total") == 2
    assert index.metric("kvpool_index_surplus_locations_removed_total") == 14


async def test_what_is_lost_is_announced_again_without_a_walk_over_the_store(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    for tier in (STAGING, DISK):
        await replace(node, replacement(chain, chain.added(range(16), tier=tier), 0))
    assert await matched(index, chain) == 16
    assert list((await digests(node)).digests) == expected(chain, dict.fromkeys(range(16), (0, 0, GRID)))
    assert index.metric("kvpool_index_corrected_digests_total") == 0


async def test_part_of_a_range_leaves_the_rest_alone(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added([0]))
    bucket = int.from_bytes(chain.hashes[0][-2:], "big")
    beside = bucket ^ 1
    await replace(node, index_pb2.ReplaceRange(first_bucket=beside, last_bucket=beside))
    assert await matched(index, chain) == 1
    await replace(node, index_pb2.ReplaceRange(first_bucket=bucket, last_bucket=bucket))
    assert await matched(index, chain) == 0
    assert list((await digests(node)).digests) == [0] * RANGE_COUNT


async def test_a_digest_that_lies_is_corrected(index: RunningIndex, store: IndexStore) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added([0, 1]))
    (record,) = await store.nodes.snapshot()
    number = range_of(chain.hashes[0])
    true = (await digests(node)).digests[number]
    await store.locations.correct_digests(record.ordinal, {number: (true, 77)})
    assert (await digests(node)).digests[number] == 77
    await replace(node, replacement(chain, chain.added([0, 1]), 0))
    assert list((await digests(node)).digests) == expected(chain, {0: (0, GRID, 0), 1: (0, GRID, 0)})
    assert index.metric("kvpool_index_corrected_digests_total") == 1


@pytest.mark.parametrize("at", ["entries", "correct_digests"])
async def test_a_report_that_comes_in_between_is_not_hidden_by_a_correction(
    index: RunningIndex, store: IndexStore, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added([0, 1]))
    (record,) = await store.nodes.snapshot()
    number = range_of(chain.hashes[0])
    true = (await digests(node)).digests[number]
    await store.locations.correct_digests(record.ordinal, {number: (true, 77)})
    original = getattr(store.locations, at)

    async def report() -> None:
        removal = Operation(ordinal=record.ordinal, full_shards=GRID, removed=EVERY_SHARD)
        (state,) = await store.locations.remove(
            [
                ChunkOperation(
                    keyspace=chain.keyspace, group_head=chain.hashes[0], chunk_hash=chain.hashes[1], operation=removal
                )
            ]
        )
        assert state is not None

    async def walk(*arguments: int) -> AsyncIterator[list[NodeEntry]]:
        await report()
        async for entries in original(*arguments):
            yield entries

    async def correct(*arguments: object) -> object:
        await report()
        return await original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(store.locations, at, walk if at == "entries" else correct)
        await replace(node, replacement(chain, chain.added([0, 1]), 0))
    wanted = expected(chain, dict.fromkeys((0, 1), (0, GRID, 0)))
    assert list((await digests(node)).digests) != wanted, "the next comparison looks again"
    await replace(node, replacement(chain, chain.added([0, 1]), 0))
    assert await matched(index, chain) == 2
    assert list((await digests(node)).digests) == wanted


async def test_a_late_range_through_an_old_stream_is_refused(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with node.announcing() as early:
        await early.send(chain.added([0]))
        async with node.announcing() as late:
            await late.send(chain.added([1]))
            part = replacement(chain, chain.added([5]), 0)
            part.sequence = 2
            with pytest.raises(errors.LeaseLost):
                await early.exchange(index_pb2.AnnounceRequest(replace_range=part))
            assert await matched(index, chain) == 2


async def test_ranges_and_batches_share_one_order(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with node.announcing() as stream:
        await stream.send(chain.added([0]), 5)
        part = replacement(chain, [], 0)
        part.sequence = 5
        with pytest.raises(errors.InvalidRequest):
            await stream.exchange(index_pb2.AnnounceRequest(replace_range=part))


async def test_malformed_ranges_are_named(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    bucket = int.from_bytes(chain.hashes[0][-2:], "big")
    for first, last, changes in (
        (5, 4, []),
        (-1, 4, []),
        (0, 1 << 16, []),
        (bucket ^ 1, bucket ^ 1, chain.added([0])),
    ):
        with pytest.raises(errors.InvalidRequest):
            await replace(node, index_pb2.ReplaceRange(first_bucket=first, last_bucket=last, held=held(changes)))


async def test_only_the_live_incarnation_is_compared(index: RunningIndex) -> None:
    node = await FakeNode(index.stub).register()
    first = node.incarnation
    await node.register(new_incarnation=True)
    request = index_pb2.ReconcileDigestsRequest(node_id=node.node_id, incarnation=first)
    assert isinstance(await refusal(index.stub.ReconcileDigests(request)), errors.StaleIncarnation)
    request = index_pb2.ReconcileDigestsRequest(node_id=secrets.token_bytes(16), incarnation=5)
    assert isinstance(await refusal(index.stub.ReconcileDigests(request)), errors.LeaseLost)
    for first_range, count in ((-1, 1), (RANGE_COUNT, 1), (0, RANGE_COUNT + 1), (RANGE_COUNT, 0)):
        request = index_pb2.ReconcileDigestsRequest(
            node_id=node.node_id, incarnation=node.incarnation, first_range=first_range, range_count=count
        )
        call = index.stub.ReconcileDigests(request)
        assert isinstance(await refusal(call), errors.InvalidRequest)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_keyspaces_that_were_lost_are_known_again(index: RunningIndex) -> None:
    encoding = encode_keyspace("default", spec_from_proto(spec()))
    chain, node = Chain(keyspace_id(encoding)), await FakeNode(index.stub).register()
    await node.announce(chain.added([0, 1]))
    assert isinstance(await refusal(index.stub.Match(chain.query())), errors.KeyspaceUnknown)
    await digests(node, [encoding])
    assert await matched(index, chain) == 2
    assert not (await index.stub.ListKeyspaces(index_pb2.ListKeyspacesRequest())).keyspaces, "its name is not known"
    assert await open_keyspace(index.stub, "again") == chain.keyspace
    (known,) = (await index.stub.ListKeyspaces(index_pb2.ListKeyspacesRequest())).keyspaces
    assert known.name == "again"
    request = index_pb2.ReconcileDigestsRequest(
        node_id=node.node_id, incarnation=node.incarnation, keyspace_encodings=[b"none"]
    )
    assert isinstance(await refusal(index.stub.ReconcileDigests(request)), errors.InvalidRequest)


async def test_comparing_asks_the_store_of_one_node_only(
    index: RunningIndex, store: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands of nodes, each of which compares its ranges in many calls."""
    node = await FakeNode(index.stub).register()
    asking = set[object]()  # tasks
    true = store.nodes.snapshot

    async def snapshot() -> object:
        asking.add(asyncio.current_task())
        return await true()

    monkeypatch.setattr(store.nodes, "snapshot", snapshot)
    for _ in range(16):
        await digests(node)
    assert len(asking) < 4, "those of the background, however long it takes; each call has a task of its own"
    await node.end()
    request = index_pb2.ReconcileDigestsRequest(node_id=node.node_id, incarnation=node.incarnation)
    assert isinstance(await refusal(node.stub.ReconcileDigests(request)), errors.LeaseLost)


async def test_what_a_node_did_not_name_is_found_without_a_walk(redis_server: RedisServer) -> None:
    """Its buckets are looked at, and no other keys of the store, however many there are."""
    store = RedisIndexStore(redis_server.url, timeout_s=TIMEOUT_S, key_prefix=f"t{secrets.token_hex(6)}")
    async with running_index(store) as index:
        chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
        others = [Chain(chain.keyspace) for _ in range(20)]
        for each in (chain, *others):
            await node.announce(each.added(range(40)))
        await node.register()
        ask(redis_server.port, "CONFIG", "RESETSTAT")
        first = range_of(chain.hashes[0]) * BUCKETS_PER_RANGE
        part = index_pb2.ReplaceRange(first_bucket=first, last_bucket=first + BUCKETS_PER_RANGE - 1)
        part.held.extend(held(chain.added(range(4))))
        await replace(node, part)
        assert (await index.stub.Match(chain.query())).matched_chunks == 4
        assert (await index.stub.Match(others[0].query())).matched_chunks == 40
        run = facts(redis_server.port, "commandstats")
        # Its range's groups, and those that are split.
        assert "cmdstat_scan" not in run and run["cmdstat_sscan"].startswith("calls=2,"), run
        assert int(run["cmdstat_hscan"].split("=")[1].split(",")[0]) < 40, run["cmdstat_hscan"]
        assert "cmdstat_hgetall" not in run and "cmdstat_smembers" not in run
    await store.close()
