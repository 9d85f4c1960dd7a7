"""The announce queue: whatever is merged, batched, sent twice or dropped, the index ends up with the node's truth."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.client.announce_queue import AnnounceBatch, AnnounceQueue, merge_changes
from kvpool.core.cluster import LocationChange
from kvpool.core.outcome import Tier


def change(chunk: int, added: int = 0, removed: int = 0, keyspace: int = 0) -> LocationChange:
    return LocationChange(
        keyspace=bytes([keyspace]) * 16,
        chunk_hash=bytes([chunk]) * 16,
        group_head_hash=bytes(16),
        tier=Tier.STAGING,
        added_shards=added,
        removed_shards=removed,
    )


def queue(pending_max: int = 100, batch_max: int = 3, in_flight_max: int = 2) -> AnnounceQueue:
    return AnnounceQueue(pending_max=pending_max, batch_max=batch_max, in_flight_max=in_flight_max)


def test_changes_of_one_chunk_are_merged_at_their_first_place() -> None:
    changes = queue()
    changes.add([change(1, added=0b01), change(2, added=1), change(1, added=0b10), change(1, removed=0b01)])
    batch = changes.next_batch()
    assert batch is not None
    assert batch.changes == (change(1, added=0b10, removed=0b01), change(2, added=1))
    assert batch.covers == 4


def test_a_bit_in_both_masks_is_removed() -> None:
    merged = merge_changes(change(1, added=0b11, removed=0b01), change(1, added=0b100, removed=0b100))
    assert merged == change(1, added=0b10, removed=0b101)


def test_batches_in_flight_are_limited_and_sent_again_in_order() -> None:
    changes = queue(batch_max=1)
    changes.add([change(number, added=1) for number in range(4)])
    first, second = changes.next_batch(), changes.next_batch()
    assert first is not None
    assert second is not None
    assert changes.next_batch() is None
    changes.acknowledge(first.sequence)
    third = changes.next_batch()
    assert third is not None
    changes.rewind()
    assert [changes.next_batch(), changes.next_batch()] == [second, third]
    assert changes.next_batch() is None
    assert [first.sequence, second.sequence, third.sequence] == [1, 2, 3]


def test_acknowledged_counts_only_what_is_surely_there() -> None:
    changes = queue(batch_max=1)
    changes.add([change(1, added=1), change(2, added=1), change(1, added=2)])
    first = changes.next_batch()
    assert first is not None
    # The third offer went out with the first batch, but the second has not.
    changes.acknowledge(first.sequence)
    assert changes.acknowledged == 1
    second = changes.next_batch()
    assert second is not None
    changes.acknowledge(second.sequence)
    assert changes.acknowledged == 3


def test_overflow_marks_dirty_and_the_snapshot_ends_it() -> None:
    changes = queue(pending_max=2)
    changes.add([change(1, added=1, keyspace=7), change(2, added=1), change(3, removed=1), change(4, added=1)])
    assert changes.pending_count == 0
    assert changes.dirty == {bytes([7]) * 16, bytes(16)}
    changes.dirty.clear()
    changes.start_snapshot(iter([change(4, added=1)]))
    batch = changes.next_batch()
    assert batch is not None
    assert batch.changes == (change(4, added=1),)
    assert batch.covers == 4


def test_nothing_counts_as_told_while_a_snapshot_runs() -> None:
    changes = queue(batch_max=2, in_flight_max=8)
    changes.start_snapshot(iter([change(number, added=1) for number in range(3)]))
    changes.add([change(9, added=1)])
    first = changes.next_batch()
    assert first is not None
    changes.acknowledge(first.sequence)
    assert changes.acknowledged == 0
    second = changes.next_batch()
    assert second is not None
    assert second.changes == (change(2, added=1), change(9, added=1))
    changes.acknowledge(second.sequence)
    assert changes.acknowledged == 1


class AnnounceMachine(RuleBasedStateMachine):
    """A node changes, the stream breaks and comes back, leases are lost: the index must converge to the truth."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = AnnounceQueue(pending_max=4, batch_max=2, in_flight_max=2)
        self.truth: dict[int, int] = {}
        self.index: dict[int, int] = {}
        self.wire: deque[AnnounceBatch] = deque()

    @rule(chunk=st.integers(0, 6), added=st.integers(0, 7), removed=st.integers(0, 7))
    def change(self, chunk: int, added: int, removed: int) -> None:
        self.truth[chunk] = (self.truth.get(chunk, 0) | added) & ~removed
        self.queue.add([change(chunk, added, removed)])

    @rule()
    def send(self) -> None:
        batch = self.queue.next_batch()
        if batch is not None:
            self.wire.append(batch)

    @rule()
    def apply(self) -> None:
        if self.wire:
            batch = self.wire.popleft()
            self._store(batch)
            self.queue.acknowledge(batch.sequence)

    @rule(applied=st.integers(0, 2))
    def break_stream(self, applied: int) -> None:
        """Some batches were applied, and their acknowledgements were lost."""
        for _ in range(min(applied, len(self.wire))):
            self._store(self.wire.popleft())
        self.wire.clear()
        self.queue.rewind()

    @rule()
    def wipe_index(self) -> None:
        self.index.clear()
        self.queue.start_snapshot(self._snapshot())

    @rule()
    def repair(self) -> None:
        if self.queue.dirty and not self.queue.in_flight:
            self.index.clear()
            self.queue.dirty.clear()
            self.queue.start_snapshot(self._snapshot())

    def _store(self, batch: AnnounceBatch) -> None:
        for one in batch.changes:
            chunk = one.chunk_hash[0]
            self.index[chunk] = (self.index.get(chunk, 0) | one.added_shards) & ~one.removed_shards

    def _snapshot(self) -> Iterator[LocationChange]:
        for chunk in list(self.truth):
            if shards := self.truth[chunk]:
                yield change(chunk, added=shards)

    @invariant()
    def stays_bounded(self) -> None:
        assert self.queue.pending_count <= 4
        assert self.queue.in_flight <= 2
        assert self.queue.acknowledged <= self.queue.offered

    def teardown(self) -> None:
        self.break_stream(0)
        for _ in range(100):
            self.repair()
            self.send()
            self.apply()
        assert {chunk: shards for chunk, shards in self.index.items() if shards} == {
            chunk: shards for chunk, shards in self.truth.items() if shards
        }
        assert self.queue.next_batch() is None
        assert self.queue.acknowledged == self.queue.offered


AnnounceMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestAnnounceQueue = AnnounceMachine.TestCase


def test_merging_equals_applying_in_turn() -> None:
    for bits in range(4**2 * 4**2):
        older = change(1, bits & 3, (bits >> 2) & 3)
        newer = change(1, (bits >> 4) & 3, (bits >> 6) & 3)
        for before in range(4):
            once = before
            for one in (older, newer):
                once = (once | one.added_shards) & ~one.removed_shards
            merged = merge_changes(older, newer)
            assert ((before | merged.added_shards) & ~merged.removed_shards) == once
