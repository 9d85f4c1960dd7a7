"""Announce streams: acknowledged when stored, idempotent, fenced."""

from collections.abc import AsyncIterator

import grpc
import pytest

from kvpool.core import errors
from kvpool.testing import ManualClock
from kvpool.v1 import index_pb2
from kvpool.wire.status import error_from_rpc
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from tests.fixtures.index_node import DISK, GRID, Chain, FakeNode, open_keyspace
from tests.fixtures.index_server import RunningIndex, running_index


@pytest.fixture
async def index() -> AsyncIterator[RunningIndex]:
    async with running_index(config=IndexConfig(max_batch_items=64)) as running:
        yield running


async def matched(index: RunningIndex, chain: Chain, shards: int = 0) -> int:
    return (await index.stub.Match(chain.query(shards=shards))).matched_chunks


async def test_batches_are_acknowledged_in_order(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with node.announcing() as stream:
        assert await stream.send(chain.added(range(10))) == 1
        assert await matched(index, chain) == 10, "what is acknowledged is matched"
        assert await stream.send(chain.added(range(10, 40)), sequence=7) == 7
        assert await stream.send([], sequence=8) == 8
        assert await matched(index, chain) == 40
        assert await stream.send(chain.removed([20]), sequence=9) == 9
        assert await matched(index, chain) == 20
    assert index.metric("kvpool_index_announce_batches_total") == 4
    assert index.metric("kvpool_index_announce_changes_total") == 41


async def test_a_batch_may_be_sent_again(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    batch = [*chain.added(range(4)), *chain.removed([2]), *chain.added([2], tier=DISK)]
    for _ in range(2):
        await node.register()
        await node.announce(batch)
        match = await index.stub.Match(chain.query())
        assert [(run.chunk_count, [place.tier for place in run.locations]) for run in match.runs] == [
            (2, [2]),
            (1, [3]),
            (1, [2]),
        ]


async def test_locations_outlive_the_stream(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(3)))
    await node.register()
    await node.announce(chain.added([3]))
    assert await matched(index, chain) == 4


async def test_of_a_malformed_batch_nothing_is_applied(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    bad_hash, bad_tier, bad_keyspace = chain.added(range(3)), chain.added(range(3)), chain.added(range(3))
    bad_hash[1].chunk_hash = b"short"
    bad_tier[1].ClearField("tier")
    bad_keyspace[1].keyspace_id = b""
    for batch in (bad_hash, bad_tier, bad_keyspace):
        async with node.announcing() as stream:
            with pytest.raises(errors.InvalidRequest, match="change 1") as raised:
                await stream.send(batch)
            assert raised.value.item_index == 1
    async with node.announcing() as stream:
        with pytest.raises(errors.InvalidRequest, match="at most 64"):
            await stream.send(chain.added([0]) * 65)
    assert await matched(index, chain) == 0


async def test_the_order_of_messages_is_checked(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with node.announcing() as stream:
        await stream.send(chain.added([0]), sequence=5)
        with pytest.raises(errors.InvalidRequest, match="sequence"):
            await stream.send(chain.added([1]), sequence=5)
    again = index_pb2.AnnounceRequest(open=index_pb2.AnnounceOpen(node_id=node.node_id))
    for request in (again, index_pb2.AnnounceRequest()):
        async with node.announcing() as stream:
            with pytest.raises(errors.InvalidRequest, match="open"):
                await stream.exchange(request)
    first = index.stub.Announce()
    await first.write(index_pb2.AnnounceRequest(batch=index_pb2.AnnounceBatch(sequence=1)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await first.read()
    assert isinstance(error_from_rpc(caught.value), errors.InvalidRequest)


async def test_a_later_stream_fences_the_earlier(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with node.announcing() as early:
        await early.send(chain.added([0]))
        async with node.announcing() as late:
            await late.send(chain.added([1]))
            with pytest.raises(errors.LeaseLost):
                await early.send([*chain.added([2]), *chain.removed([1])])
            assert await late.send(chain.added([3])) == 2
    assert await matched(index, chain) == 2


async def test_a_stream_of_an_old_epoch_is_refused(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    old = FakeNode(index.stub, node.node_id, incarnation=node.incarnation, epoch=node.epoch)
    await node.register()
    async with old.announcing() as stream:
        with pytest.raises(errors.LeaseLost):
            await stream.send(chain.added([0]))
    old.epoch = node.epoch
    await node.register(new_incarnation=True)
    async with old.announcing() as stream:
        with pytest.raises(errors.StaleIncarnation):
            await stream.send(chain.added([0]))
    assert await matched(index, chain) == 0


async def test_a_node_that_slept_through_its_lease_poisons_nothing() -> None:
    clock = ManualClock()
    async with running_index(MemoryIndexStore(clock), clock=clock, config=IndexConfig(lease_ttl_ms=5000)) as index:
        chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
        async with node.announcing() as stream:
            await stream.send(chain.added([0]))
            clock.advance(6.0)
            assert await matched(index, chain) == 0, "its locations left with its lease"
            with pytest.raises(errors.LeaseLost):
                await stream.send(chain.added([1]))
        await node.register()
        assert await matched(index, chain) == 1, "the same incarnation has what it had"


async def test_keyspaces_the_index_does_not_know_yet(index: RunningIndex) -> None:
    """After the store was wiped, pagestores announce before engines have opened anything."""
    async with running_index() as elsewhere:
        chain = Chain(await open_keyspace(elsewhere.stub))
    node = await FakeNode(index.stub).register()
    await node.announce(chain.added(range(3)))
    assert await open_keyspace(index.stub) == chain.keyspace
    assert await matched(index, chain) == 3
    await node.register()
    await node.announce([chain.change(2, removed=1)])
    assert await matched(index, chain) == 2
    assert await matched(index, chain, shards=GRID ^ 1) == 3


async def test_streams_end_when_the_index_drains(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with node.announcing() as stream:
        await stream.send(chain.added([0]))
        index.engine.streams.end_all()
        with pytest.raises(errors.Draining):
            await stream.send(chain.added([1]))
    call = index.stub.MatchStream()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(error_from_rpc(caught.value), errors.Draining)
