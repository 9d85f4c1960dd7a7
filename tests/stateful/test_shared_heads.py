"""A first chunk that many chains share: what is announced and looked up at once does not grow with their number."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from hashlib import blake2b
from operator import xor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from kvpool.core.cluster import LocationChange, NodeInfo, NodeKind, NodeLease
from kvpool.core.keyspace import PUBLISHED_TENANT_SECRET, Dtype, KeyspaceSpec, KvGroup, encode_keyspace, keyspace_id
from kvpool.core.location_digest import PART_BATCHES, ChunkPlaces, HeldChunk, SplitGroup, fingerprint, holding, range_of
from kvpool.core.outcome import Tier
from kvpool.testing import ManualClock
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.core.replacement import BucketSpan
from kvpool_index.engine.index import IndexEngine
from kvpool_index.metrics import IndexMetrics
from kvpool_server.node import reconciler
from kvpool_server.node.announce_queue import AnnounceQueue
from kvpool_server.node.chunk_directory import ChunkDirectory
from kvpool_server.node.reconciler import Reconciler
from tests.stateful.rounds import make_round

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(4, 1, 64),), dtype=Dtype.FP32, chunk_tokens=32)
TENANT = "default"
ENCODING = encode_keyspace(TENANT, SPEC)
KEYSPACE = keyspace_id(ENCODING)
HEAD = bytes(14) + b"\x01\x23"
RANGE = range_of(HEAD)
ITEMS_MAX = 512
CHUNKS = 20_000


def chunk(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "big"), digest_size=16).digest()


class Node:
    """A node whose chunks all lie in one group, and an index that has its batches applied whenever it gets a turn."""

    def __init__(self, count: int) -> None:
        self.held = {chunk(number) for number in range(count)}
        self.numbers = itertools.count(count)
        self.looked_up = 0
        self.sent = 0  # changes, in batches and in what is replaced
        self.largest = 0  # changes of one batch
        self.loses_batches = False
        self.changes_while_asked = 0
        self.engine = IndexEngine(
            store=MemoryIndexStore(ManualClock()),
            config=IndexConfig(lease_ttl_ms=600_000),
            clock=ManualClock(),
            metrics=IndexMetrics(CollectorRegistry()),
            secret_of=lambda tenant: PUBLISHED_TENANT_SECRET,
            version="test",
        )
        self.directory = ChunkDirectory(self)
        self.queue = AnnounceQueue(self.directory, pending_max=65_536, batch_max=ITEMS_MAX, in_flight_max=2)
        self.lease = NodeLease(incarnation=0, lease_ttl_ms=1, renew_interval_ms=1, announce_epoch=0)
        self.reconciler = Reconciler(
            cast(Any, self),
            b"n" * 16,
            self.queue,
            self.directory,
            self,
            lease=lambda: self.lease,
            wake=lambda: None,
            interval_s=0.0,  # rounds are made one by one: see `round`
            share=1.0,
        )
        self.endpoints = SimpleNamespace(config=SimpleNamespace(backoff_initial_s=0.0, backoff_max_s=0.0))

    # LocationTruth

    def chunks(self) -> Iterator[ChunkPlaces]:
        for chunk_hash in self.held:
            self.looked_up += 1
            yield ChunkPlaces(KEYSPACE, chunk_hash, HEAD)

    def locate(self, keyspace: bytes, chunk_hashes: Collection[bytes]) -> list[tuple[bytes, HeldChunk]]:
        self.looked_up += len(chunk_hashes)
        return [(one, HeldChunk(HEAD, (0, 0, 1), 1)) for one in chunk_hashes if one in self.held]

    def keyspace_encodings(self) -> list[bytes]:
        return [ENCODING]

    # What Reconciler asks of the index

    async def reconcile_digests(
        self, node_id: bytes, incarnation: int, *, first_range: int, range_count: int, encodings: Sequence[bytes]
    ) -> list[int]:
        if first_range <= RANGE < first_range + range_count:
            self.put(self.changes_while_asked)
        digests, _ = await self.engine.reconcile_digests(
            TENANT, node_id, incarnation, first_range, range_count, encodings
        )
        return digests

    async def reconcile_split_groups(self, node_id: bytes, incarnation: int, *, range_number: int) -> list[SplitGroup]:
        self.put(self.changes_while_asked)
        groups, _, _ = await self.engine.reconciliation.split_groups(node_id, incarnation, range_number, b"")
        return groups

    # What the node does

    def put(self, count: int) -> None:
        hashes = [chunk(next(self.numbers)) for _ in range(count)]
        self.held.update(hashes)
        self.announce(hashes, held=True)

    def drop(self, hashes: Sequence[bytes]) -> None:
        self.held.difference_update(hashes)
        self.announce(hashes, held=False)

    def announce(self, hashes: Sequence[bytes], *, held: bool) -> None:
        changes = [
            LocationChange(
                keyspace=KEYSPACE,
                chunk_hash=chunk_hash,
                group_head_hash=HEAD,
                tier=Tier.DISK,
                added_shards=int(held),
                removed_shards=int(not held),
            )
            for chunk_hash in hashes
        ]
        self.reconciler.note(changes)
        self.queue.add(changes)

    async def register(self) -> None:
        await self.reconciler.load()
        info = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, endpoint="h:1")
        self.lease = await self.engine.nodes.register(info, 0)
        self.stream = await self.engine.open_announce(b"n" * 16, self.lease.incarnation, self.lease.announce_epoch)

    async def send(self) -> None:
        batch = self.queue.next_batch()
        if batch is None:
            return
        self.sent += len(batch.changes)
        self.largest = max(self.largest, len(batch.changes))
        if self.loses_batches:
            await self.stream.apply(batch.sequence, ())
        elif batch.part is not None:
            await self.stream.replace_part(batch.sequence, batch.part, batch.changes)
        elif batch.buckets is not None:
            await self.stream.replace(batch.sequence, BucketSpan(*batch.buckets), batch.changes)
        else:
            await self.stream.apply(batch.sequence, batch.changes)
        self.queue.acknowledge(batch.sequence)
        self.reconciler.acknowledged()

    async def round(self) -> None:
        await make_round(self.reconciler, self.send)
        await self.deliver()

    async def deliver(self) -> None:
        while self.queue.pending_count:
            await self.send()

    async def is_right(self) -> bool:
        """Whether the index knows just what is held."""
        digests, _ = await self.engine.reconcile_digests(TENANT, b"n" * 16, self.lease.incarnation, 0, 0, ())
        held = [fingerprint(KEYSPACE + HEAD + chunk_hash[:8], holding((0, 0, 1), 1)) for chunk_hash in self.held]
        return digests[RANGE] == reduce(xor, held) == self.directory.digest(RANGE)


async def synchronized(count: int) -> Node:
    node = Node(count)
    node.queue.limit_items(ITEMS_MAX)
    await node.register()
    await node.round()
    assert await node.is_right()
    return node


async def test_all_below_one_head_is_announced_once_in_bounded_batches() -> None:
    node = await synchronized(CHUNKS)
    assert node.sent == CHUNKS
    assert node.largest <= ITEMS_MAX * PART_BATCHES


async def test_a_range_that_keeps_changing_is_not_announced_again() -> None:
    node = await synchronized(CHUNKS)
    for _ in range(2):
        sent, held = node.sent, len(node.held)
        node.changes_while_asked = 3
        await node.round()
        node.changes_while_asked = 0
        changed = len(node.held) - held
        assert changed and node.sent - sent <= 10 * changed
        assert await node.is_right()


@pytest.mark.parametrize("changes", [0, 2])
@pytest.mark.slow
async def test_stale_and_lost_entries_of_a_bucket_above_the_limit_heal_within_two_rounds(changes: int) -> None:
    node = await synchronized(CHUNKS)
    node.loses_batches = True
    gone = [chunk(number) for number in range(3)]
    node.drop(gone)
    node.put(2)
    await node.deliver()
    node.loses_batches = False
    assert not await node.is_right()
    node.changes_while_asked = changes
    sent = node.sent
    for _ in range(2):
        await node.round()
    assert await node.is_right()
    assert node.sent - sent <= CHUNKS // 20, "five parts of 256, twice at most, and what was new"


@pytest.mark.slow
async def test_a_stale_entry_of_a_split_group_heals_at_a_node_that_holds_little_of_it() -> None:
    node = await synchronized(CHUNKS)
    node.drop(sorted(node.held)[5:])
    await node.deliver()
    node.loses_batches = True
    node.drop(sorted(node.held)[:2])
    await node.deliver()
    node.loses_batches = False
    for _ in range(2):
        await node.round()
    assert await node.is_right() and len(node.held) == 3


@pytest.mark.slow
async def test_comparing_looks_few_chunks_up_at_once_and_only_those_that_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = itertools.count(0.0, 1.0)
    monkeypatch.setattr(reconciler, "time", SimpleNamespace(thread_time=lambda: next(seconds)))
    node = await synchronized(4 * CHUNKS)
    node.directory.mark_changed(KEYSPACE)  # as if all had changed
    steps: deque[int] = deque()

    async def watch() -> None:
        while True:
            before = node.looked_up
            await asyncio.sleep(0)
            steps.append(node.looked_up - before)

    watching = asyncio.create_task(watch())
    await node.round()
    assert sum(steps) >= 4 * CHUNKS and max(steps) <= 300
    watching.cancel()
    looked_up = node.looked_up
    node.put(5)
    await node.round()
    assert node.looked_up - looked_up < 4 * CHUNKS // 20


async def test_loading_takes_few_chunks_at_once() -> None:
    node = Node(CHUNKS)
    steps = []
    before = 0
    for _ in node.directory.load():
        steps.append(node.looked_up - before)
        before = node.looked_up
    assert len(steps) >= CHUNKS // 300 and max(steps) <= 300
