"""Whatever is announced, lost, rolled back or reported in between: after a comparison the index knows the truth."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from prometheus_client import CollectorRegistry

from kvpool.core.cluster import Location, LocationChange, NodeInfo, NodeKind, NodeLease, StaleLocation
from kvpool.core.errors import LeaseLost
from kvpool.core.keyspace import PUBLISHED_TENANT_SECRET, Dtype, KeyspaceSpec, KvGroup, encode_keyspace, keyspace_id
from kvpool.core.location_digest import RANGE_COUNT, ChunkPlaces, HeldChunk, SplitGroup
from kvpool.core.outcome import Tier
from kvpool.testing import ManualClock
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.entries import MAX_ENTRIES, GroupRead, decode_value
from kvpool_index.core.replacement import BucketSpan
from kvpool_index.engine.index import IndexEngine
from kvpool_index.metrics import IndexMetrics
from kvpool_server.node.announce_queue import AnnounceBatch, AnnounceQueue
from kvpool_server.node.chunk_directory import ChunkDirectory
from kvpool_server.node.reconciler import Reconciler
from tests.stateful.rounds import make_round

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(4, 2, 64),), dtype=Dtype.FP32, chunk_tokens=32)
ENCODING = encode_keyspace("default", SPEC)
KEYSPACE = keyspace_id(ENCODING)
WHOLE, VALID = 0b001, 0b111  # two heads: one shard of both, and one of each
NODE = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, endpoint="h:1")
CHUNKS = 6
TIERS = (Tier.GPU, Tier.STAGING, Tier.DISK)
HASHES = [bytes([number + 1]) * 16 for number in range(CHUNKS)]
HEADS = [bytes(15) + bytes([20 * (number // 2)]) for number in range(CHUNKS)]  # two chunks a group, and a range

Step: TypeAlias = tuple[Any, ...]
changes = st.tuples(
    st.just("change"), st.integers(0, CHUNKS - 1), st.integers(1, 2), st.integers(0, VALID), st.booleans()
)
steps = st.one_of(
    changes,
    changes,
    st.tuples(st.sampled_from(["deliver", "send", "lose_reply", "wipe", "checkpoint", "roll_back", "round", "reopen"])),
    st.tuples(st.just("stale"), st.integers(0, CHUNKS - 1), st.integers(1, 2)),
)


class World:
    """A node with its real queue, directory and reconciler; an index with its real engine; no wire between them."""

    def __init__(self) -> None:
        self.truth: dict[int, list[int]] = {}
        self.store = MemoryIndexStore(ManualClock())
        self.engine = self.make_engine(self.store)
        self.checkpoint: MemoryIndexStore | None = None
        self.directory = ChunkDirectory(self)
        self.queue = AnnounceQueue(self.directory, pending_max=3, batch_max=2, in_flight_max=2)
        self.queue.limit_items(8)  # a bucket that does not fit is not replaced
        self.lease = NodeLease(incarnation=0, lease_ttl_ms=1, renew_interval_ms=1, announce_epoch=0)
        self.reconciler = Reconciler(
            cast(Any, self),
            NODE.node_id,
            self.queue,
            self.directory,
            self,
            lease=lambda: self.lease,
            wake=lambda: None,
            interval_s=0.0,  # rounds are made one by one: see `round`
            share=1.0,
        )
        self.endpoints = SimpleNamespace(config=SimpleNamespace(backoff_initial_s=0.0, backoff_max_s=0.0))
        self.wire: list[AnnounceBatch] = []
        self.stream: Any = None

    def metric(self, name: str) -> float:
        return self.registry.get_sample_value(name) or 0.0

    def make_engine(self, store: MemoryIndexStore) -> IndexEngine:
        self.registry = CollectorRegistry()
        return IndexEngine(
            store=store,
            config=IndexConfig(lease_ttl_ms=600_000),
            clock=ManualClock(),
            metrics=IndexMetrics(self.registry),
            secret_of=lambda tenant: PUBLISHED_TENANT_SECRET,
            version="test",
        )

    # LocationTruth

    def chunks(self) -> list[ChunkPlaces]:
        return []

    def locate(self, keyspace: bytes, chunk_hashes: Collection[bytes]) -> Iterator[tuple[bytes, HeldChunk]]:
        for chunk_hash in chunk_hashes:
            number = HASHES.index(chunk_hash)
            gpu, staging, disk = self.truth.get(number, [0, 0, 0])
            yield chunk_hash, HeldChunk(HEADS[number], (gpu, staging, disk), WHOLE)

    def keyspace_encodings(self) -> list[bytes]:
        return [ENCODING]

    # What Reconciler asks of the index

    async def reconcile_digests(
        self, node_id: bytes, incarnation: int, *, first_range: int, range_count: int, encodings: Sequence[bytes]
    ) -> list[int]:
        try:
            digests, _ = await self.engine.reconcile_digests(
                "default", node_id, incarnation, first_range, range_count, encodings
            )
        except LeaseLost:
            await self.register()
            raise
        return digests

    async def reconcile_split_groups(self, node_id: bytes, incarnation: int, *, range_number: int) -> list[SplitGroup]:
        groups, _, _ = await self.engine.reconciliation.split_groups(node_id, incarnation, range_number, b"")
        return groups

    async def register(self) -> None:
        known = NodeInfo(
            node_id=NODE.node_id, kind=NODE.kind, endpoint=NODE.endpoint, incarnation=self.lease.incarnation
        )
        self.lease = await self.engine.nodes.register(known, 0)
        self.reconciler.start_round(unsure=True)
        await self.reopen()

    async def reopen(self) -> None:
        self.wire.clear()
        self.queue.rewind()
        self.stream = await self.engine.open_announce(NODE.node_id, self.lease.incarnation, self.lease.announce_epoch)

    async def step(self, kind: str, *values: Any) -> None:
        if kind == "change":
            self.change(*values)
        elif kind == "deliver":
            for _ in range(50):
                await self.send()
        elif kind in ("send", "lose_reply"):
            await self.send(reply=kind == "send")
        elif kind == "wipe":
            self.use(MemoryIndexStore(ManualClock()))
        elif kind == "checkpoint":
            self.checkpoint = copy.deepcopy(self.store)
        elif kind == "roll_back" and self.checkpoint is not None:
            self.use(copy.deepcopy(self.checkpoint))
        elif kind == "reopen":
            await self.after_loss(self.reopen())
        elif kind == "stale":
            number, tier = values
            place = Location(node_id=NODE.node_id, incarnation=self.lease.incarnation, tier=TIERS[tier], shards=VALID)
            stale = StaleLocation(
                keyspace=KEYSPACE, chunk_hash=HASHES[number], group_head_hash=HEADS[number], location=place
            )
            await self.engine.announcements.report_stale("default", [stale])
        elif kind == "round":
            await self.round([])

    def use(self, store: MemoryIndexStore) -> None:
        """The store is another one, with other contents, all at once."""
        self.store, self.engine = store, self.make_engine(store)
        self.stream = None

    def change(self, number: int, tier: int, shards: int, present: bool) -> None:
        held = self.truth.setdefault(number, [0, 0, 0])
        held[tier] = held[tier] | shards if present else held[tier] & ~shards
        reported = LocationChange(
            keyspace=KEYSPACE,
            chunk_hash=HASHES[number],
            group_head_hash=HEADS[number],
            tier=TIERS[tier],
            added_shards=shards if present else 0,
            removed_shards=0 if present else shards,
        )
        self.reconciler.note([reported])
        self.queue.add([reported])

    async def send(self, *, reply: bool = True) -> None:
        batch = self.queue.next_batch()
        if batch is None:
            return
        await self.after_loss(self.apply(batch, reply=reply))

    async def apply(self, batch: AnnounceBatch, *, reply: bool) -> None:
        if self.stream is None:
            raise LeaseLost("the store is another one")
        if batch.part is not None:
            await self.stream.replace_part(batch.sequence, batch.part, batch.changes)
        elif batch.buckets is not None:
            await self.stream.replace(batch.sequence, BucketSpan(*batch.buckets), batch.changes)
        else:
            await self.stream.apply(batch.sequence, batch.changes)
        if reply:
            self.queue.acknowledge(batch.sequence)
            self.reconciler.acknowledged()
        else:
            await self.reopen()

    async def after_loss(self, work: Any) -> None:
        try:
            await work
        except LeaseLost:
            await self.register()

    async def round(self, meanwhile: list[Step]) -> None:
        """A whole comparison, while the announcer works and the node goes on changing."""

        async def turn() -> None:
            if meanwhile:
                await self.step(*meanwhile.pop())
            await self.send()

        await make_round(self.reconciler, turn)

    async def known(self) -> dict[int, tuple[int, ...]]:
        """What the index has of this node."""
        reads = [GroupRead(HEADS[number], [HASHES[number][:8]]) for number in range(CHUNKS)]
        (record,) = [each for each in await self.store.nodes.snapshot() if each.info.node_id == NODE.node_id]
        found: dict[int, tuple[int, ...]] = {}
        for number, value in enumerate(await self.store.locations.read(KEYSPACE, reads)):
            for entry in decode_value(value, WHOLE):
                if entry.ordinal == record.ordinal:
                    found[number] = entry.shards
        return found


@settings(max_examples=60, deadline=None)
@given(
    phases=st.lists(
        st.tuples(
            st.lists(steps, min_size=1, max_size=6),
            st.lists(steps, min_size=1, max_size=6),
            st.sampled_from(["wipe", "roll_back", "roll_back", "reopen"]),
            st.lists(steps, max_size=2),
        ),
        min_size=1,
        max_size=3,
    ),
    during=st.lists(changes, max_size=6),
)
@example(  # the index is left with a chunk that is gone altogether
    phases=[([("change", 0, 1, 3, True)], [("change", 0, 1, 3, False)], "roll_back", [])], during=[]
)
@pytest.mark.slow
def test_the_index_ends_with_the_truth(
    phases: list[tuple[list[Step], list[Step], str, list[Step]]], during: list[Step]
) -> None:
    async def play() -> None:
        world = World()
        await world.register()
        for before, after, loss, later in phases:
            for step in (*before, ("deliver",), ("checkpoint",), *after, ("deliver",), (loss,), *later):
                await world.step(*step)
        await world.after_loss(world.reopen())  # a node whose store is another one finds out by its lease
        await world.round(list(during))
        for _ in range(3):
            if not world.queue.unsure:  # else the node has registered again meanwhile
                break
            await world.round([])
        await world.round([])  # what changed under the last one
        expected = {number: tuple(held) for number, held in world.truth.items() if any(held)}
        assert await world.known() == expected
        own = [world.directory.digest(number) for number in range(RANGE_COUNT)]
        (record,) = await world.store.nodes.snapshot()
        assert await world.store.locations.digests(record.ordinal, range(RANGE_COUNT)) == own
        assert world.queue.acknowledged == world.queue.offered

    asyncio.run(play())


async def _fill(world: World, number: int) -> list[tuple[bytes, int]]:
    """Have as many other nodes announce a chunk as its value can name; their ids and incarnations."""
    found: list[tuple[bytes, int]] = []
    for at in range(MAX_ENTRIES):
        node = NodeInfo(node_id=at.to_bytes(16, "big"), kind=NODE.kind, endpoint="h:1")
        lease = await world.engine.nodes.register(node, 0)
        stream = await world.engine.open_announce(node.node_id, lease.incarnation, lease.announce_epoch)
        change = LocationChange(
            keyspace=KEYSPACE,
            chunk_hash=HASHES[number],
            group_head_hash=HEADS[number],
            tier=TIERS[1],
            added_shards=WHOLE,
            removed_shards=0,
        )
        await stream.apply(1, [change])
        found.append((node.node_id, lease.incarnation))
    return found


@pytest.mark.slow
def test_a_node_that_a_full_chunk_leaves_out_is_not_repaired_for_ever_and_recorded_when_another_has_gone() -> None:
    async def play() -> None:
        world = World()
        await world.register()
        await world.round([])
        (full, incarnation), *_ = await _fill(world, 0)
        for number in (0, 1):
            world.change(number, 1, WHOLE, True)
        for _ in range(12):
            await world.round([])
        repaired = world.reconciler.replaced_count
        for _ in range(50):
            await world.round([])
        assert world.reconciler.replaced_count == repaired, "what no repair mends is left alone"
        assert set(await world.known()) == {1} and world.queue.acknowledged == world.queue.offered
        assert world.metric("kvpool_index_corrected_digests_total") == 0, "the digests agree with what is recorded"
        assert world.metric("kvpool_index_left_out_locations_total") > 0
        world.change(2, 1, WHOLE, True)  # anything else in the range is mended as ever
        await world.step("deliver")
        await world.step("stale", 2, 1)
        await world.round([])
        await world.round([])
        assert set(await world.known()) == {1, 2}
        place = Location(node_id=full, incarnation=incarnation, tier=TIERS[1], shards=VALID)
        gone = StaleLocation(keyspace=KEYSPACE, chunk_hash=HASHES[0], group_head_hash=HEADS[0], location=place)
        assert await world.engine.announcements.report_stale("default", [gone]) == [True]
        for _ in range(66):
            await world.round([])
        assert set(await world.known()) == {0, 1, 2}

    asyncio.run(play())
