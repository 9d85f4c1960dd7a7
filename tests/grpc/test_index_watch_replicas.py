"""Watches for replicas: a fresh view first, chunks in batches, heartbeats that tell how current the receiver is."""

from collections.abc import AsyncIterator

import pytest

from kvpool.core.cluster import ChunkBatch, ChunkEvent
from kvpool.core.errors import StoreUnavailable
from kvpool.testing import ManualClock, eventually
from kvpool.v1 import index_pb2
from kvpool.wire.convert_watch import index_event_from_proto
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.events import Interest
from tests.fixtures.index_node import Chain, FakeNode, open_keyspace
from tests.fixtures.index_server import RunningIndex, running_index
from tests.grpc.test_index_watch import Watching


@pytest.fixture
def store() -> MemoryIndexStore:
    return MemoryIndexStore(ManualClock(), stream_entries=16)


@pytest.fixture
async def index(store: MemoryIndexStore) -> AsyncIterator[RunningIndex]:
    config = IndexConfig(max_watchers=80, watch_buffer_events=200)
    async with running_index(store, clock=ManualClock(), config=config) as running:
        yield running


def watching(index: RunningIndex, *, after: str = "", keyspace: bytes = b"") -> Watching:
    request = index_pb2.WatchRequest(after_position=after, keyspace_id=keyspace, for_replica=True)
    return Watching(index.stub.Watch(request))


async def test_it_begins_with_the_nodes_alive(index: RunningIndex) -> None:
    node = await FakeNode(index.stub).register()
    watch = watching(index)
    first = await watch.next()
    assert first.WhichOneof("event") == "resync" and first.position
    assert [(each.node_id, each.incarnation) for each in first.resync.nodes] == [(node.node_id, node.incarnation)]
    assert not index.metric("kvpool_index_watch_resyncs_total"), "a beginning is no loss"
    watch.call.cancel()


async def next_batch(watch: Watching) -> ChunkBatch:
    event = index_event_from_proto(await watch.next("chunks"))
    assert event is not None and isinstance(event.event, ChunkBatch)
    return event.event


async def test_an_entry_is_one_message_and_the_position_is_behind_it(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    watch = watching(index)
    await watch.next("resync")
    await node.announce(chain.added(range(16)))
    event = await next_batch(watch)
    assert [each.chunk_hash for each in event.events] == chain.hashes[:16]
    watch.call.cancel()
    again = watching(index, after=watch.position)
    await node.register()
    await node.announce(chain.removed([3]))
    event = await next_batch(again)
    assert [(each.chunk_hash, each.locations) for each in event.events] == [(chain.hashes[3], ())]
    again.call.cancel()


async def test_heartbeats_come_only_while_the_log_can_be_read(
    index: RunningIndex, store: MemoryIndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watching(index)
    beat = await watch.next("heartbeat")
    assert beat.heartbeat.age_ms == 0 and beat.position
    asked = 0

    async def gone() -> tuple[str, ...]:
        nonlocal asked
        asked += 1
        raise StoreUnavailable("down")

    with monkeypatch.context() as patch:
        patch.setattr(store.events, "tails", gone)
        await eventually(lambda: asked >= 2)
    await watch.next("heartbeat")
    watch.call.cancel()


async def test_a_log_that_was_rolled_back_is_not_read_to_its_end(
    index: RunningIndex, store: MemoryIndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await FakeNode(index.stub).register()
    watch = watching(index)
    await watch.next("heartbeat")

    async def wiped() -> tuple[str, ...]:
        return ("0-0",) * store.events.stream_count

    with monkeypatch.context() as patch:
        patch.setattr(store.events, "tails", wiped)
        assert not await index.engine.watches.reader.reaches_end()
    assert await index.engine.watches.reader.reaches_end()
    watch.call.cancel()


async def test_heartbeats_move_the_position_of_a_watcher_that_sees_nothing(index: RunningIndex) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    other = await open_keyspace(index.stub, "other", model_revision="r2")
    watch = watching(index, keyspace=other)
    await watch.next("resync")
    for round_number in range(40):  # more than the log keeps
        await node.register()
        await node.announce([chain.change(0, added=1 << round_number % 16)])

    async def nothing_was_missed() -> bool:
        """Of a watch that goes on behind a heartbeat; those that came meanwhile are older than what the log keeps."""
        await watch.next("heartbeat")
        again = watching(index, after=watch.position, keyspace=other)
        kind = (await again.next()).WhichOneof("event")
        again.call.cancel()
        return kind == "heartbeat"

    await eventually(nothing_was_missed)
    watch.call.cancel()


async def test_sixty_four_watchers_share_one_reader_and_one_conversion(
    index: RunningIndex, store: MemoryIndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, node = Chain(await open_keyspace(index.stub)), await FakeNode(index.stub).register()
    watches = [watching(index) for _ in range(64)]
    for watch in watches:
        await watch.next("resync")
    await eventually(lambda: index.metric("kvpool_index_watchers") == 64)
    reads = 0
    read = store.events.read

    async def counted(stream: int, after: str, *, limit: int, wait_s: float) -> object:
        nonlocal reads
        entries = await read(stream, after, limit=limit, wait_s=wait_s)
        reads += bool(entries)  # those that return nothing are repeated as long as it takes
        return entries

    monkeypatch.setattr(store.events, "read", counted)
    await node.announce(chain.added(range(16)))
    for watch in watches:
        assert len((await watch.next("chunks")).chunks.events) == 16
    assert reads <= store.events.stream_count
    for watch in watches:
        watch.call.cancel()


async def test_a_batch_is_the_same_object_for_all_who_want_the_same() -> None:
    from kvpool_index.core.events import EntryEvents, Position

    def event(keyspace: bytes) -> ChunkEvent:
        return ChunkEvent(keyspace=keyspace, chunk_hash=b"c" * 16, group_head_hash=b"g" * 16, locations=(), version=1)

    owned = [("red", event(b"a" * 16)), ("red", event(b"b" * 16)), ("blue", event(b"c" * 16))]
    news = EntryEvents(owned, Position(("0-0",)), Position(("1-0",)))
    assert news.batch(Interest("red", b"")) is news.batch(Interest("red", b""))
    assert news.batch(Interest("green", b"")) is None
    picked = news.batch(Interest("red", b"b" * 16))
    assert picked is not None and [each.keyspace for each in picked.events] == [b"b" * 16]
