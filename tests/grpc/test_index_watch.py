"""Watch: every change at least once, resumable, and honest about what was lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from kvpool.core import errors
from kvpool.testing import ManualClock, eventually
from kvpool.v1 import index_pb2
from kvpool.wire.status import error_from_rpc
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from tests.fixtures.index_node import GRID, STAGING, Chain, FakeNode, open_keyspace
from tests.fixtures.index_server import RunningIndex, running_index

Event = index_pb2.WatchResponse


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryIndexStore:
    return MemoryIndexStore(clock, stream_entries=16)


@pytest.fixture
async def index(clock: ManualClock, store: MemoryIndexStore) -> AsyncIterator[RunningIndex]:
    config = IndexConfig(max_watchers=2, lease_ttl_ms=500, watch_buffer_events=100)
    async with running_index(store, clock=clock, config=config) as running:
        yield running


class Watching:
    """An open watch."""

    def __init__(self, call: "grpc.aio.UnaryStreamCall[index_pb2.WatchRequest, Event]") -> None:
        self.call = call
        self.position = ""

    async def next(self, kind: str = "") -> Event:
        """The next event, or the next one of a kind."""
        while True:
            event = await self.call.read()
            assert isinstance(event, Event), "the watch ended"
            self.position = event.position
            if not kind or event.WhichOneof("event") == kind:
                return event

    async def chunks(self, count: int) -> dict[bytes, index_pb2.ChunkEvent]:
        """The last of `count` chunk events of each chunk."""
        events = [(await self.next("chunk")).chunk for _ in range(count)]
        return {event.chunk_hash: event for event in events}


@asynccontextmanager
async def watching(index: RunningIndex, *, after: str = "", keyspace: bytes = b"") -> AsyncIterator[Watching]:
    open_before = index.metric("kvpool_index_watchers")
    call = index.stub.Watch(index_pb2.WatchRequest(after_position=after, keyspace_id=keyspace))
    await eventually(lambda: call.done() or index.metric("kvpool_index_watchers") == open_before + 1)
    yield Watching(call)
    call.cancel()
    await eventually(lambda: index.metric("kvpool_index_watchers") == open_before)


async def test_changes_are_seen_with_their_whole_value(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with watching(index) as watch:
        await node.announce(chain.added(range(20)))
        added = await watch.chunks(20)
        assert set(added) == set(chain.hashes[:20])
        event = added[chain.hashes[17]]
        assert (event.keyspace_id, event.group_head_hash) == (chain.keyspace, chain.hashes[16])
        assert [(place.node_id, place.tier, place.shards) for place in event.locations] == [
            (node.node_id, STAGING, GRID)
        ]
        await node.register()
        await node.announce(chain.removed([17]))
        gone = (await watch.chunks(1))[chain.hashes[17]]
        assert not gone.locations and gone.version > event.version


async def test_drops_and_stale_reports_are_events_too(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    await node.announce(chain.added(range(20)))
    async with watching(index) as watch:
        await index.stub.DropKeyspaceLocations(index_pb2.DropKeyspaceLocationsRequest(keyspace_id=chain.keyspace))
        dropped = await watch.chunks(20)
        assert {each[:8] for each in dropped} == {each[:8] for each in chain.hashes[:20]}
        assert not any(event.locations for event in dropped.values())


async def test_nodes_come_change_and_go(index: RunningIndex, clock: ManualClock) -> None:
    async with watching(index) as watch:
        node = await FakeNode(index.stub, draining=False).register()
        came = (await watch.next("node")).node
        assert came.alive and came.node.node_id == node.node_id and came.node.incarnation == node.incarnation
        node.draining = True
        await node.register()
        changed = (await watch.next("node")).node
        assert changed.alive and changed.node.draining
        clock.advance(1.0)
        died = (await watch.next("node")).node
        assert not died.alive and died.node.node_id == node.node_id
        await node.register()
        assert (await watch.next("node")).node.alive
        await node.end()
        assert not (await watch.next("node")).node.alive


async def test_a_watch_resumes_where_it_was(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with watching(index) as watch:
        await node.announce(chain.added(range(5)))
        await watch.chunks(5)
        position = watch.position
    await node.register()
    await node.announce(chain.added(range(5, 25)))
    async with watching(index, after=position) as watch:
        assert set(await watch.chunks(20)) == set(chain.hashes[5:25])
        await node.register()
        await node.announce(chain.added([30]))
        assert set(await watch.chunks(1)) == {chain.hashes[30]}


async def test_within_an_entry_the_position_stays_before_it(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with watching(index) as watch:
        await node.announce(chain.added(range(8)))
        await watch.chunks(3)
        position = watch.position
    async with watching(index, after=position) as watch:
        assert set(await watch.chunks(8)) == set(chain.hashes[:8]), "the whole entry comes again"


async def test_a_position_that_is_gone_yields_resync(index: RunningIndex, store: MemoryIndexStore) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with watching(index) as watch:
        await node.announce(chain.added([0]))
        await watch.chunks(1)
        position = watch.position
    for round_number in range(20):
        await node.register()
        await node.announce([chain.change(0, added=1 << round_number % 16)])
    for after in (position, "1-0,1-0", ",".join(["99999-0"] * 5)):
        async with watching(index, after=after) as watch:
            assert (await watch.next()).WhichOneof("event") == "resync"
            await node.register()
            await node.announce(chain.added([1]))
            assert set(await watch.chunks(1)) == {chain.hashes[1]}, "and it goes on from the present"


async def test_a_slow_receiver_gets_resync(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    async with watching(index) as watch:
        for _ in range(400):  # more than transport and buffer hold together
            await node.register()
            await node.announce(chain.added(range(40)))
            if index.metric("kvpool_index_watch_resyncs_total"):
                break
        kinds = set[str]()
        while "resync" not in kinds:
            kinds.add(str((await watch.next()).WhichOneof("event")))
        await node.register()
        await node.announce(chain.removed([39]))
        while (event := await watch.next("chunk")).chunk.locations:
            pass
        assert event.chunk.chunk_hash == chain.hashes[39]


async def test_only_the_tenants_own_and_the_keyspace_asked_for(store: MemoryIndexStore, clock: ManualClock) -> None:
    async with (
        running_index(store, clock=clock, config=IndexConfig(tenant="red")) as red,
        running_index(store, clock=clock, config=IndexConfig(tenant="blue")) as blue,
    ):
        mine, theirs = Chain(await open_keyspace(red.stub)), Chain(await open_keyspace(blue.stub))
        node = await FakeNode(red.stub).register()
        async with watching(red) as everything, watching(red, keyspace=mine.keyspace) as some:
            await node.announce([*theirs.added(range(5)), *mine.added(range(3))])
            for watch in (everything, some):
                assert {event.keyspace_id for event in (await watch.chunks(3)).values()} == {mine.keyspace}
        call = red.stub.Watch(index_pb2.WatchRequest(keyspace_id=theirs.keyspace))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(error_from_rpc(caught.value), errors.KeyspaceUnknown)


async def test_what_is_refused(index: RunningIndex) -> None:
    refused = [
        (index_pb2.WatchRequest(after_position="nonsense"), errors.InvalidRequest),
        (index_pb2.WatchRequest(keyspace_id=b"short"), errors.InvalidRequest),
    ]
    async with watching(index), watching(index):
        for request, kind in [*refused, (index_pb2.WatchRequest(), errors.Overloaded)]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await index.stub.Watch(request).read()
            assert isinstance(error_from_rpc(caught.value), kind)
    await eventually(lambda: index.metric("kvpool_index_watchers") == 0)


async def test_no_more_watch_than_may_however_many_begin_at_once(
    index: RunningIndex, store: MemoryIndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tails = store.events.tails

    async def slow() -> tuple[str, ...]:
        await asyncio.sleep(0)
        return await tails()

    monkeypatch.setattr(store.events, "tails", slow)
    watches = [index.engine.watches.watch("default", "", b"", for_replica=True) for _ in range(6)]
    begun = await asyncio.gather(*(anext(watch) for watch in watches), return_exceptions=True)
    assert sum(isinstance(each, errors.Overloaded) for each in begun) == 4, "two may watch"
    for watch in watches:
        await watch.aclose()


async def test_a_draining_index_ends_its_watches(index: RunningIndex) -> None:
    async with watching(index) as watch:
        index.engine.streams.end_all()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.next()
        assert isinstance(error_from_rpc(caught.value), errors.Draining)
