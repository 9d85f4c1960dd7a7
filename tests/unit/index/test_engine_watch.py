"""What watchers get: fresh starts that are spread, bounded entries, and all nodes that are not known to be gone."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable

from prometheus_client import CollectorRegistry

from kvpool.core.cluster import ChunkBatch, ChunkEvent, IndexEvent, LocationChange, NodeInfo, NodeKind, ResyncEvent
from kvpool.core.keyspace import PUBLISHED_TENANT_SECRET, Dtype, KeyspaceSpec, KvGroup
from kvpool.core.outcome import Tier
from kvpool.testing import ManualClock
from kvpool_index.adapters.memory import MemoryIndexStore, MemoryLocationStore
from kvpool_index.adapters.memory_nodes import MemoryNodeDirectory
from kvpool_index.config import IndexConfig
from kvpool_index.core.events import ENTRY_BYTES, ENTRY_CHUNKS, ChunkState, pack_entries, unpack_chunks
from kvpool_index.core.nodes import NodeRecord
from kvpool_index.engine.index import IndexEngine
from kvpool_index.metrics import IndexMetrics
from tests.fixtures.virtual_time import run_virtually

WATCHERS = 20
SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(4, 2, 64),), dtype=Dtype.FP32, chunk_tokens=32)
NODE = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, endpoint="h:1")


def engine_of(
    store: MemoryIndexStore, clock: ManualClock, uniform: Callable[[float, float], float] = random.uniform
) -> IndexEngine:
    return IndexEngine(
        store=store,
        config=IndexConfig(lease_ttl_ms=5000),
        clock=clock,
        metrics=IndexMetrics(CollectorRegistry()),
        secret_of=lambda tenant: PUBLISHED_TENANT_SECRET,
        version="test",
        uniform=uniform,
    )


def test_a_gap_of_the_log_reaches_watchers_one_after_the_other() -> None:
    drawn: list[float] = []

    def uniform(low: float, high: float) -> float:
        assert (low, high) == (0.0, 2.0)
        drawn.append(high * len(drawn) / WATCHERS)
        return drawn[-1]

    async def play() -> list[float]:
        store = MemoryIndexStore(ManualClock(), stream_entries=1)
        engine = engine_of(store, ManualClock(), uniform=uniform)
        watches = [engine.watches.watch("t", "", b"", for_replica=True) for _ in range(WATCHERS)]
        for watch in watches:
            await resync(watch)
        began_s = asyncio.get_running_loop().time()
        for stream in range(store.events.stream_count):
            for _ in range(6):  # of which the last one is kept
                store.events.append_now(stream, b"")

        async def time_of(watch: Awaitable[None]) -> float:
            await watch
            return asyncio.get_running_loop().time() - began_s

        found = sorted(await asyncio.gather(*(time_of(resync(watch)) for watch in watches)))
        for watch in watches:
            await watch.aclose()
        await engine.close()
        return found

    times = run_virtually(play())
    assert len(drawn) >= WATCHERS
    assert len({round(each, 3) for each in times}) == WATCHERS and times[-1] < 5


async def resync(watch: AsyncGenerator[IndexEvent, None]) -> None:
    async for event in watch:
        if isinstance(event.event, ResyncEvent):
            return


class SlowDirectory(MemoryNodeDirectory):
    """A question about all nodes takes four seconds to arrive, of which a replica must think that leases had them."""

    clock: ManualClock

    async def snapshot(self) -> list[NodeRecord]:
        self.clock.advance(4.0)
        return await super().snapshot()


def slow_store(clock: ManualClock) -> MemoryIndexStore:
    store = MemoryIndexStore(clock)
    store.nodes = directory = SlowDirectory(clock, store.events)
    store.locations = MemoryLocationStore(clock, directory)
    directory.clock = clock
    return store


async def test_an_event_names_a_node_whose_lease_only_seems_over_because_the_store_answered_late() -> None:
    clock = ManualClock()
    store = slow_store(clock)
    engine = engine_of(store, clock)
    keyspace = (await engine.keyspaces.open("t", "k", SPEC)).keyspace.keyspace_id
    lease = await engine.nodes.register(NODE, 0)
    before = ",".join(await store.events.tails())
    assert await engine.nodes.live_nodes(None) == [], "for a match its lease is over"
    announced = await engine.open_announce(NODE.node_id, lease.incarnation, lease.announce_epoch)
    change = LocationChange(
        keyspace=keyspace,
        chunk_hash=b"c" * 16,
        group_head_hash=b"c" * 16,
        tier=Tier.DISK,
        added_shards=1,
        removed_shards=0,
    )
    await announced.apply(1, [change])
    watch = engine.watches.watch("t", before, b"")
    event = (await anext(watch)).event
    assert isinstance(event, ChunkEvent), event
    assert [(one.node_id, one.tier, one.shards) for one in event.locations] == [(NODE.node_id, Tier.DISK, 1)]
    await watch.aclose()
    await engine.close()


async def test_resync_names_a_node_whose_lease_only_seems_over_because_the_store_answered_late() -> None:
    clock = ManualClock()
    engine = engine_of(slow_store(clock), clock)
    await engine.nodes.register(NODE, 0)
    watch = engine.watches.watch("t", "", b"", for_replica=True)
    event = (await anext(watch)).event
    assert isinstance(event, ResyncEvent), event
    assert [node.node_id for node in event.nodes] == [NODE.node_id]
    await watch.aclose()
    await engine.close()


async def test_a_replica_gets_entries_that_come_together_in_one_message() -> None:
    """A batch is an entry in each of the log's streams; a message costs more than the chunks in it."""
    clock = ManualClock()
    store = MemoryIndexStore(clock)
    engine = engine_of(store, clock)
    keyspace = (await engine.keyspaces.open("t", "k", SPEC)).keyspace.keyspace_id
    lease = await engine.nodes.register(NODE, 0)
    announced = await engine.open_announce(NODE.node_id, lease.incarnation, lease.announce_epoch)
    watches = [engine.watches.watch("t", "", b"", for_replica=True) for _ in range(2)]
    for watch in watches:
        await resync(watch)
    hashes = [bytes([number]) * 16 for number in range(12)]  # three in each of four streams
    added = [LocationChange(keyspace, each, each, Tier.DISK, 1, 0) for each in hashes]
    seen = [asyncio.ensure_future(chunks_of(watch, len(hashes))) for watch in watches]
    await asyncio.sleep(0)
    await announced.apply(1, added)
    first, second = await asyncio.gather(*seen)
    assert sorted(chunk for batch in first for chunk in chunks_in(batch)) == hashes
    assert len(first) < store.events.stream_count - 1
    assert [batch.event for batch in first] == [batch.event for batch in second]
    assert all(one.event is other.event for one, other in zip(first, second, strict=True)), "packed once for both"
    assert first[-1].position == ",".join(await store.events.tails())
    for watch in watches:
        await watch.aclose()
    await engine.close()


async def chunks_of(watch: AsyncGenerator[IndexEvent, None], count: int) -> list[IndexEvent]:
    """Events until they have named so many chunks."""
    found: list[IndexEvent] = []
    while sum(len(chunks_in(event)) for event in found) < count:
        event = await anext(watch)
        found += [event] if isinstance(event.event, ChunkBatch) else []
    return found


def chunks_in(event: IndexEvent) -> list[bytes]:
    return [one.chunk_hash for one in event.event.events] if isinstance(event.event, ChunkBatch) else []


def test_entries_of_the_log_are_bounded_in_chunks_and_bytes() -> None:
    for value_bytes, count in ((5, 1000), (29 * 64, 100), (0, 1), (300, 65), (13, 0)):
        states = [
            ChunkState(
                keyspace=b"k" * 16, group_head=b"h" * 16, chunk_hash=b"c" * 16, value=bytes(value_bytes), version=at
            )
            for at in range(count)
        ]
        payloads = list(pack_entries(states))
        assert [state for payload in payloads for state in unpack_chunks(payload)] == states
        assert all(len(payload) <= ENTRY_BYTES for payload in payloads)
        sizes = [len(list(unpack_chunks(payload))) for payload in payloads]
        assert all(0 < size <= ENTRY_CHUNKS for size in sizes)
        full = ENTRY_BYTES // (59 + value_bytes)
        assert len(payloads) <= -(-count // min(ENTRY_CHUNKS, full))
