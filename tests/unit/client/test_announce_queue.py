"""The announce queue: whatever is merged, batched, sent twice or dropped, the index ends up with the node's truth."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.core.cluster import LocationChange
from kvpool.core.location_digest import PART_BATCHES, PartSpan, part_of, range_of
from kvpool.core.outcome import Tier
from kvpool_server.node.announce_queue import AnnounceBatch, AnnounceQueue, merge_changes


def change(chunk: int, added: int = 0, removed: int = 0, bucket: int = 0) -> LocationChange:
    return LocationChange(
        keyspace=bytes(16),
        chunk_hash=bytes([chunk]) * 16,
        group_head_hash=bytes(14) + bucket.to_bytes(2, "big"),
        tier=Tier.STAGING,
        added_shards=added,
        removed_shards=removed,
    )


class Content:
    """What a node holds: of ranges, and of the parts of those groups that are kept apart."""

    def __init__(
        self,
        changes: Callable[[int], list[LocationChange]] = lambda number: [],
        parts: dict[PartSpan, list[LocationChange]] | None = None,
    ) -> None:
        self._changes = changes
        self._parts = parts if parts is not None else {}

    def cell_of(self, change: LocationChange) -> int | PartSpan:
        span = PartSpan(change.keyspace, change.group_head_hash, part_of(change.chunk_hash))
        return span if span in self._parts else range_of(change.group_head_hash)

    def changes(self, range_number: int) -> list[LocationChange]:
        return self._changes(range_number)

    def part_changes(self, span: PartSpan) -> list[LocationChange]:
        return self._parts[span]


def queue(
    content: Callable[[int], list[LocationChange]] = lambda number: [],
    *,
    parts: dict[PartSpan, list[LocationChange]] | None = None,
    pending_max: int = 100,
    batch_max: int = 3,
    in_flight_max: int = 2,
) -> AnnounceQueue:
    return AnnounceQueue(
        Content(content, parts), pending_max=pending_max, batch_max=batch_max, in_flight_max=in_flight_max
    )


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


def test_what_was_dropped_is_acknowledged_with_the_parts_of_a_group_that_is_kept_apart_since() -> None:
    held = [change(7, added=1)]
    parts: dict[PartSpan, list[LocationChange]] = {}
    changes = queue(parts=parts, pending_max=1)
    changes.add([change(7, added=1), change(8, added=1)])  # too many: range 0 is to be replaced instead
    span = PartSpan(bytes(16), bytes(16), 7)
    parts[span] = held
    changes.replace([span])
    for expected in (None, span):
        batch = changes.next_batch()
        assert batch is not None and batch.part == expected
        assert changes.acknowledged == 0
        changes.acknowledge(batch.sequence)
    assert changes.acknowledged == 2


def test_a_batch_that_is_not_full_waits_for_the_one_before() -> None:
    changes = queue(batch_max=2, in_flight_max=2)
    changes.add([change(1, added=1)])
    first = changes.next_batch()
    assert first is not None
    changes.add([change(1, added=2), change(1, added=4)])
    assert changes.next_batch() is None, "more may come that is merged"
    changes.add([change(2, added=1)])
    second = changes.next_batch()
    assert second is not None and second.changes == (change(1, added=6), change(2, added=1))
    changes.add([change(3, added=1), change(4, added=1)])
    assert changes.next_batch() is None, "two are in flight"


def test_after_an_overflow_the_ranges_are_reported_as_they_are_then() -> None:
    held = {0: [change(4, added=1)], 7: [change(9, added=3, bucket=7 * 16)]}
    changes = queue(lambda number: held.get(number, []), pending_max=2)
    changes.add([change(1, added=1, bucket=7 * 16), change(2, added=1), change(3, removed=1), change(4, added=1)])
    assert changes.pending_count == 0 and changes.waiting_count == 2
    assert changes.busy_ranges() == {0, 7}
    first, second = changes.next_batch(), changes.next_batch()
    assert first is not None and second is not None
    reported = {batch.buckets: list(batch.changes) for batch in (first, second)}
    assert reported == {(0, 15): held[0], (7 * 16, 7 * 16 + 15): held[7]}
    changes.acknowledge(first.sequence)
    assert changes.acknowledged == 0
    changes.add([change(5, added=1)])
    changes.acknowledge(second.sequence)
    third = changes.next_batch()
    assert third is not None and third.changes == (change(5, added=1),)
    changes.acknowledge(third.sequence)
    assert changes.acknowledged == changes.offered


def test_neighbouring_ranges_share_a_batch_until_it_is_full() -> None:
    changes = queue(lambda number: [change(number, added=1, bucket=number * 16)], batch_max=3, in_flight_max=9)
    changes.limit_items(3)
    changes.replace([5, 1, 2, 3, 4])
    batches = [changes.next_batch() for _ in range(3)]
    assert [batch and batch.buckets for batch in batches] == [(80, 95), (16, 63), (64, 79)]
    assert changes.next_batch() is None and changes.waiting_count == 0


def test_a_range_that_is_too_large_is_reported_bucket_by_bucket() -> None:
    items = [change(number, added=1, bucket=bucket) for bucket, number in ((2, 1), (2, 2), (3, 3), (9, 4), (9, 5))]
    items += [change(10 + number, added=1, bucket=11) for number in range(5)]
    items.append(change(30, added=1, bucket=12))
    changes = queue(lambda number: list(items) if number == 0 else [], batch_max=3, in_flight_max=2)
    changes.replace([0])
    batches: list[AnnounceBatch] = []
    while (batch := changes.next_batch()) is not None:
        batches.append(batch)
    # Bucket 11 is too large by itself: it is reported in plain changes, and what surrounds it is replaced.
    assert [(batch.buckets, len(batch.changes)) for batch in batches] == [
        ((0, 8), 3),
        ((9, 10), 2),
        (None, 3),
        (None, 2),
        ((12, 15), 1),
    ]
    assert [one for batch in batches for one in batch.changes] == items


def span(chunk: int) -> PartSpan:
    return PartSpan(bytes(16), bytes(16), chunk)


def test_a_part_is_replaced_in_its_turn_and_its_lost_changes_come_with_it() -> None:
    parts = {span(1): [change(1, added=1)], span(2): [change(2, added=3)]}
    changes = queue(parts=parts, pending_max=2, in_flight_max=9)
    changes.add([change(1, added=1), change(2, added=1), change(3, added=1), change(2, added=2)])
    assert changes.pending_count == 0 and changes.waiting_count == 3
    assert changes.busy_cells(0) == {0, span(1), span(2)} and changes.busy_ranges() == {0}
    batches = [changes.next_batch() for _ in range(3)]
    assert {(batch.part or batch.buckets): batch.changes for batch in batches if batch} == {
        (0, 15): (),
        span(1): tuple(parts[span(1)]),
        span(2): tuple(parts[span(2)]),
    }
    assert changes.busy_cells(0) == {0, span(1), span(2)} and changes.busy_cells(1) == set()
    changes.acknowledge(2)
    assert changes.acknowledged == 0, "of what was lost, the third has not been acknowledged"
    changes.acknowledge(3)
    assert changes.next_batch() is None and changes.acknowledged == changes.offered == 4


def test_a_part_that_is_too_large_for_a_batch_goes_out_in_plain_changes() -> None:
    fitting, larger = 2 * PART_BATCHES, 2 * PART_BATCHES + 1
    parts = {span(1): [change(1, added=1)] * fitting, span(2): [change(2, added=1)] * larger}
    changes = queue(parts=parts, in_flight_max=99)
    changes.limit_items(2)
    changes.replace(parts)
    sent = []
    while (batch := changes.next_batch()) is not None:
        sent.append((batch.part, len(batch.changes)))
    assert sent == [(span(1), fitting), *[(None, 2)] * PART_BATCHES, (None, 1)]


def test_a_refused_part_is_replaced_again() -> None:
    changes = queue(parts={span(1): []})
    changes.replace([span(1)])
    assert changes.next_batch() is not None
    changes.discard_in_flight()
    again = changes.next_batch()
    assert again is not None and again.part == span(1)


def test_nothing_counts_as_reported_while_the_index_may_have_lost_it() -> None:
    changes = queue(in_flight_max=8)
    changes.unsure = True
    changes.add([change(9, added=1)])
    first = changes.next_batch()
    assert first is not None
    changes.acknowledge(first.sequence)
    assert changes.next_batch() is None and changes.acknowledged == 0
    changes.unsure = False
    assert changes.next_batch() is None and changes.acknowledged == 1


class AnnounceMachine(RuleBasedStateMachine):
    """A node changes, the stream breaks and comes back, the index loses things: it must converge to the truth.

    Chunk c lies in bucket 8 * c, so that two chunks share a range.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = AnnounceQueue(Content(self._content), pending_max=4, batch_max=2, in_flight_max=2)
        self.truth: dict[int, int] = {}
        self.index: dict[int, int] = {}
        self.wire: deque[AnnounceBatch] = deque()

    @rule(chunk=st.integers(0, 6), added=st.integers(0, 7), removed=st.integers(0, 7))
    def change(self, chunk: int, added: int, removed: int) -> None:
        self.truth[chunk] = (self.truth.get(chunk, 0) | added) & ~removed
        self.queue.add([change(chunk, added, removed, bucket=8 * chunk)])

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

    @rule(kept=st.sets(st.integers(0, 6)), stale=st.sets(st.integers(0, 6)))
    def lose(self, kept: set[int], stale: set[int]) -> None:
        """The index forgets chunks and remembers others that went long ago; its owner is notified."""
        self.index = {chunk: shards for chunk, shards in self.index.items() if chunk in kept} | dict.fromkeys(stale, 7)
        self.queue.replace(range(4))

    @rule()
    def discard(self) -> None:
        self.wire.clear()
        self.queue.discard_in_flight()

    def _store(self, batch: AnnounceBatch) -> None:
        if batch.buckets is not None:
            first, last = batch.buckets
            self.index = {chunk: held for chunk, held in self.index.items() if not first <= 8 * chunk <= last}
        for one in batch.changes:
            chunk = one.chunk_hash[0]
            self.index[chunk] = (self.index.get(chunk, 0) | one.added_shards) & ~one.removed_shards

    def _content(self, number: int) -> list[LocationChange]:
        return [
            change(chunk, added=shards, bucket=8 * chunk)
            for chunk, shards in sorted(self.truth.items())
            if shards and 8 * chunk // 16 == number
        ]

    @invariant()
    def stays_bounded(self) -> None:
        assert self.queue.pending_count <= 4
        assert self.queue.in_flight <= 2
        assert self.queue.acknowledged <= self.queue.offered

    def teardown(self) -> None:
        self.break_stream(0)
        for _ in range(100):
            self.send()
            self.apply()
        assert {chunk: shards for chunk, shards in self.index.items() if shards} == {
            chunk: shards for chunk, shards in self.truth.items() if shards
        }
        assert self.queue.next_batch() is None
        assert self.queue.acknowledged == self.queue.offered


AnnounceMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
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
