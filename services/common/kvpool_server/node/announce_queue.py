"""What a node still has to announce: merged, in order, bounded. Pure bookkeeping; the announcer sends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Protocol

from kvpool.core.cluster import LocationChange
from kvpool.core.location_digest import (
    BUCKETS_PER_RANGE,
    PART_BATCHES,
    PartSpan,
    bucket_of,
    range_buckets,
    range_of,
)
from kvpool_server.node.chunk_directory import Cell, range_of_cell

_Key = tuple[bytes, bytes, int]  # keyspace, chunk hash, tier


class HeldContent(Protocol):
    """What the node holds now: a kvpool_server.node.chunk_directory.ChunkDirectory."""

    def cell_of(self, change: LocationChange) -> Cell:
        """The cell that a change falls into."""
        ...

    def changes(self, range_number: int) -> list[LocationChange]:
        """All that is held in a range but for groups that are kept apart, ordered by bucket."""
        ...

    def part_changes(self, span: PartSpan) -> list[LocationChange]:
        """All that is held in one part of a group."""
        ...


@dataclass(frozen=True, slots=True)
class AnnounceBatch:
    """Changes with a place in the stream's order; or, if `buckets` or `part` is set, all that the node holds in these.

    covers: every change that was offered up to this count is in this batch or in one before it.
    buckets: the first and the last one, inclusive.
    """

    sequence: int
    changes: tuple[LocationChange, ...]
    covers: int
    buckets: tuple[int, int] | None = None
    part: PartSpan | None = None

    def ranges(self) -> set[int]:
        """The digest ranges that it is about."""
        if self.part is not None:
            return {range_of(self.part.group_head)}
        if self.buckets is None:
            return {range_of(change.group_head_hash) for change in self.changes}
        first, last = (bucket // BUCKETS_PER_RANGE for bucket in self.buckets)
        return set(range(first, last + 1))


@dataclass(slots=True)
class _Pending:
    first_offer: int  # count of offers when the key entered the queue
    change: LocationChange


def merge_changes(older: LocationChange, newer: LocationChange) -> LocationChange:
    """One change of the same chunk and tier with the effect of `older`, then `newer`."""
    added = (older.added_shards & ~older.removed_shards & ~newer.removed_shards) | (
        newer.added_shards & ~newer.removed_shards
    )
    removed = ((older.removed_shards & ~newer.added_shards) | newer.removed_shards) & ~added
    return LocationChange(newer.keyspace, newer.chunk_hash, newer.group_head_hash, newer.tier, added, removed)


class AnnounceQueue:
    """Changes wait here, merged by chunk and tier, until they are batched; batches wait until they are acknowledged.

    Cells wait here too, to be replaced as a whole: what is held in one is asked for when its turn comes, so that what
    was announced before is in it, and what is announced after comes after.

    More than `pending_max` chunks and tiers are not kept: then all of them are dropped, and their cells are replaced
    instead.
    """

    def __init__(self, content: HeldContent, *, pending_max: int, batch_max: int, in_flight_max: int) -> None:
        self._content = content
        self._pending_max = pending_max
        self._batch_max = batch_max
        self._items_max = batch_max  # of a cell that is replaced
        self._in_flight_max = in_flight_max
        self._pending: dict[_Key, _Pending] = {}
        self._cells: dict[Cell, None] = {}  # to be replaced, in the order of asking
        self._dropped: set[Cell] = set()  # of them, those whose changes need not be kept until then
        self._unacknowledged: deque[AnnounceBatch] = deque()
        self._ready: deque[AnnounceBatch] = deque()  # made, and to be sent before anything else
        self._sequence = 0
        self._covered = 0  # offers that batches so far cover
        self._cell_is_next = False
        self.discard_count = 0  # how often what was in flight was refused
        self.offered = 0  # changes handed to `add` so far
        self.acknowledged = 0  # of them, how many the index has for sure
        self.unsure = False  # True: the index may have lost what it had acknowledged, so that nothing counts as known

    @property
    def pending_count(self) -> int:
        """Chunks and tiers that wait for a batch."""
        return len(self._pending)

    @property
    def waiting_count(self) -> int:
        """Cells that wait to be replaced."""
        return len(self._cells)

    @property
    def in_flight(self) -> int:
        """Batches that are not acknowledged."""
        return len(self._unacknowledged)

    @property
    def last_sequence(self) -> int:
        """Of the latest batch."""
        return self._sequence

    @property
    def has_full_batch(self) -> bool:
        """Whether waiting for more changes would not make the next batch larger."""
        return len(self._pending) >= self._batch_max or bool(self._cells or self._ready)

    def busy_ranges(self) -> set[int]:
        """Ranges of which the index may not know everything yet."""
        busy = {range_of(entry.change.group_head_hash) for entry in self._pending.values()}
        busy.update(map(range_of_cell, self._cells))
        return busy.union(*(batch.ranges() for batch in self._unacknowledged))

    def busy_cells(self, range_number: int) -> set[Cell]:
        """Cells of a range of which the index may not know everything yet."""
        busy = {cell for cell in self._cells if range_of_cell(cell) == range_number}
        changes = [entry.change for entry in self._pending.values()]
        for batch in self._unacknowledged:
            changes += batch.changes
            if range_number in batch.ranges():
                busy.update([batch.part] if batch.part is not None else [range_number] if batch.buckets else [])
        here = (change for change in changes if range_of(change.group_head_hash) == range_number)
        return busy.union(map(self._content.cell_of, here))

    def is_waiting(self, cell: Cell) -> bool:
        """Whether a cell waits to be replaced."""
        return cell in self._cells

    def is_batched(self, offered: int) -> bool:
        """Whether the first so many changes handed to `add` wait no more."""
        head = next(iter(self._pending.values()), None)
        return head is None or head.first_offer > offered

    def is_acknowledged(self, sequence: int) -> bool:
        """Whether the index has every batch up to `sequence`."""
        return not self._unacknowledged or self._unacknowledged[0].sequence > sequence

    def add(self, changes: Iterable[LocationChange]) -> None:
        """Take changes, in order."""
        for change in changes:
            self.offered += 1
            key = (change.keyspace, change.chunk_hash, int(change.tier))
            known = self._pending.get(key)
            if known is not None:
                known.change = merge_changes(known.change, change)
            elif self._dropped and self._content.cell_of(change) in self._dropped:
                continue  # it comes with its cell
            elif len(self._pending) >= self._pending_max:
                self._drop_pending(change)
            else:
                self._pending[key] = _Pending(self.offered, change)

    def replace(self, cells: Iterable[Cell]) -> None:
        """Have all that the node holds in these cells replace what the index knows of them."""
        for cell in cells:
            self._cells[cell] = None
            # Its group may be kept apart only since changes were dropped: they were those of its range then.
            if isinstance(cell, PartSpan) and range_of_cell(cell) in self._dropped:
                self._dropped.add(cell)

    def limit_items(self, items_max: int) -> None:
        """Put at most so many changes into a batch, and into a span of buckets that is replaced, from now on."""
        self._batch_max = min(self._batch_max, items_max)
        self._items_max = items_max

    def discard_in_flight(self) -> None:
        """The index refuses what was sent: forget it; its cells are replaced."""
        self.discard_count += 1
        for batch in self._unacknowledged:
            self.replace(map(self._content.cell_of, batch.changes))
            if batch.part is not None:
                self.replace([batch.part])
            elif batch.buckets is not None:
                self.replace(batch.ranges())
        self._unacknowledged.clear()
        self._ready.clear()

    def next_batch(self) -> AnnounceBatch | None:
        """The next batch, first those to be sent again.

        None if there is nothing to send, or as much in flight as is good: a batch that is not full waits for the
        acknowledgement of the one before, because changes that come meanwhile may join it.
        """
        if self._ready:
            return self._ready.popleft()
        if self._unacknowledged and (not self.has_full_batch or len(self._unacknowledged) >= self._in_flight_max):
            return None
        if self._cells and (self._cell_is_next or not self._pending):
            self._cell_is_next = False
            made = self._cell_batches()
        else:
            self._cell_is_next = True
            changes = self._take_pending()
            made = [self._batch(changes)] if changes else []
            self._cover()
        if not made:
            if not self._unacknowledged:
                self.acknowledged = max(self.acknowledged, self._covered)
            return None
        self._ready.extend(made)
        return self._ready.popleft()

    def acknowledge(self, sequence: int) -> None:
        """The index has every batch up to `sequence`."""
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            self.acknowledged = max(self.acknowledged, self._unacknowledged.popleft().covers)

    def rewind(self) -> None:
        """A new stream begins: what was not acknowledged goes out again, in order, before anything else."""
        self._ready = deque(self._unacknowledged)

    def _drop_pending(self, change: LocationChange) -> None:
        lost = {self._content.cell_of(entry.change) for entry in self._pending.values()}
        lost.add(self._content.cell_of(change))
        self._pending.clear()
        self._dropped |= lost
        self.replace(lost)

    def _cover(self) -> None:
        if not self.unsure and not self._dropped:
            head = next(iter(self._pending.values()), None)
            self._covered = self.offered if head is None else head.first_offer - 1

    def _batch(
        self,
        changes: Iterable[LocationChange],
        buckets: tuple[int, int] | None = None,
        part: PartSpan | None = None,
    ) -> AnnounceBatch:
        self._cover()
        self._sequence += 1
        batch = AnnounceBatch(self._sequence, tuple(changes), self._covered, buckets, part)
        self._unacknowledged.append(batch)
        return batch

    def _take_pending(self) -> list[LocationChange]:
        keys = list(islice(self._pending, self._batch_max))
        return [self._pending.pop(key).change for key in keys]

    def _cell_batches(self) -> list[AnnounceBatch]:
        """The next cell; of ranges also those after it, as long as they make one batch of the usual size."""
        first = next(iter(self._cells))
        self._forget(first)
        if isinstance(first, PartSpan):
            return self._part_batches(first)
        changes = self._content.changes(first)
        if len(changes) > self._items_max:
            return [self._batch(some, buckets) for some, buckets in _split(changes, first, self._items_max)]
        last = first
        while last + 1 in self._cells and len(changes) < self._batch_max:
            more = self._content.changes(last + 1)
            if len(changes) + len(more) > self._items_max:
                break
            last += 1
            self._forget(last)
            changes += more
        return [self._batch(changes, range_buckets(first, last))]

    def _part_batches(self, span: PartSpan) -> list[AnnounceBatch]:
        """A part that is too large for one batch goes out in plain changes, as such a bucket does."""
        changes = self._content.part_changes(span)
        if len(changes) <= self._items_max * PART_BATCHES:
            return [self._batch(changes, part=span)]
        size = self._items_max
        return [self._batch(changes[start : start + size]) for start in range(0, len(changes), size)]

    def _forget(self, cell: Cell) -> None:
        del self._cells[cell]
        self._dropped.discard(cell)


def _split(
    changes: list[LocationChange], range_number: int, items_max: int
) -> Iterator[tuple[list[LocationChange], tuple[int, int] | None]]:
    """A range that is too large for one batch, in runs of whole buckets that together cover it.

    A bucket that is too large by itself goes out in plain changes: what is not held any more stays until it is met.
    """
    first_bucket, last_bucket = range_buckets(range_number, range_number)
    part: list[LocationChange] = []
    for bucket, found in groupby(changes, key=lambda change: bucket_of(change.group_head_hash)):
        items = list(found)
        if len(part) + len(items) > items_max:
            if bucket > first_bucket:
                yield part, (first_bucket, bucket - 1)
            part, first_bucket = [], bucket
        if len(items) > items_max:
            for start in range(0, len(items), items_max):
                yield items[start : start + items_max], None
            items, first_bucket = [], bucket + 1
        part += items
    if first_bucket <= last_bucket:
        yield part, (first_bucket, last_bucket)
