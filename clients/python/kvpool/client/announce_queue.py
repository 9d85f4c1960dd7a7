"""What a node still has to tell the index: merged, in order, bounded. Pure bookkeeping; node_link sends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvpool.core.cluster import LocationChange

_Key = tuple[bytes, bytes, int]  # keyspace, chunk hash, tier


@dataclass(frozen=True, slots=True)
class AnnounceBatch:
    """Changes with a place in the stream's order.

    covers: every change that was offered up to this count is in this batch or in one before it.
    """

    sequence: int
    changes: tuple[LocationChange, ...]
    covers: int


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
    return LocationChange(
        keyspace=newer.keyspace,
        chunk_hash=newer.chunk_hash,
        group_head_hash=newer.group_head_hash,
        tier=newer.tier,
        added_shards=added,
        removed_shards=removed,
    )


class AnnounceQueue:
    """Changes wait here, merged by chunk and tier, until they are batched; batches wait until they are acknowledged.

    More than `pending_max` chunks and tiers are not kept: then all of them are dropped and their keyspaces are marked
    dirty. The owner must then have their locations dropped at the index, lift the marks and start a snapshot.

    Items of a snapshot and changes may be mixed in any order, because each item is the truth at the time it is taken
    from the iterator: a change that is sent after it is either newer or told already.
    """

    def __init__(self, *, pending_max: int, batch_max: int, in_flight_max: int) -> None:
        self._pending_max = pending_max
        self._batch_max = batch_max
        self._in_flight_max = in_flight_max
        self._pending: dict[_Key, _Pending] = {}
        self._unacknowledged: deque[AnnounceBatch] = deque()
        self._resend: deque[AnnounceBatch] = deque()
        self._snapshot: Iterator[LocationChange] | None = None
        self._sequence = 0
        self._covered = 0  # offers that batches so far cover
        self.offered = 0  # changes handed to `add` so far
        self.acknowledged = 0  # of them, how many the index has for sure
        self.dirty: set[bytes] = set()  # keyspaces of which changes were dropped

    @property
    def pending_count(self) -> int:
        """Chunks and tiers that wait for a batch."""
        return len(self._pending)

    @property
    def in_flight(self) -> int:
        """Batches that are not acknowledged."""
        return len(self._unacknowledged)

    @property
    def has_work(self) -> bool:
        """Whether next_batch would return one, leaving the limit of batches in flight aside."""
        return bool(self._resend or self._pending or self._snapshot is not None)

    def add(self, changes: Iterable[LocationChange]) -> None:
        """Take changes, in order."""
        for change in changes:
            self.offered += 1
            key = (change.keyspace, change.chunk_hash, int(change.tier))
            known = self._pending.get(key)
            if known is not None:
                known.change = merge_changes(known.change, change)
            elif change.keyspace in self.dirty:
                continue  # the snapshot that must follow tells it
            elif len(self._pending) >= self._pending_max:
                self.dirty.update(entry.change.keyspace for entry in self._pending.values())
                self.dirty.add(change.keyspace)
                self._pending.clear()
            else:
                self._pending[key] = _Pending(self.offered, change)

    def start_snapshot(self, items: Iterator[LocationChange]) -> None:
        """Tell everything again, from a lazy iterator; one that runs already is replaced."""
        self._snapshot = items

    def limit_batches(self, batch_max: int) -> None:
        """Put at most `batch_max` changes into batches from now on."""
        self._batch_max = batch_max

    def discard_in_flight(self) -> None:
        """The index refuses what was sent: forget it, marking its keyspaces dirty."""
        self.dirty.update(change.keyspace for batch in self._unacknowledged for change in batch.changes)
        self._unacknowledged.clear()
        self._resend.clear()

    def next_batch(self) -> AnnounceBatch | None:
        """The next batch, first those to be sent again.

        None if there is nothing to send, while keyspaces are dirty, and when too many batches are in flight.
        """
        if self._resend:
            return self._resend.popleft()
        if self.dirty or len(self._unacknowledged) >= self._in_flight_max:
            return None
        changes = self._from_snapshot()
        changes += self._from_pending(self._batch_max - len(changes))
        if self._snapshot is None:
            head = next(iter(self._pending.values()), None)
            self._covered = self.offered if head is None else head.first_offer - 1
        if not changes:
            if not self._unacknowledged:
                self.acknowledged = self._covered
            return None
        self._sequence += 1
        batch = AnnounceBatch(self._sequence, tuple(changes), self._covered)
        self._unacknowledged.append(batch)
        return batch

    def _from_snapshot(self) -> list[LocationChange]:
        if self._snapshot is None:
            return []
        items = list(islice(self._snapshot, self._batch_max))
        if len(items) < self._batch_max:
            self._snapshot = None
        return items

    def _from_pending(self, limit: int) -> list[LocationChange]:
        keys = list(islice(self._pending, limit))
        return [self._pending.pop(key).change for key in keys]

    def acknowledge(self, sequence: int) -> None:
        """The index has every batch up to `sequence`."""
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            self.acknowledged = max(self.acknowledged, self._unacknowledged.popleft().covers)

    def rewind(self) -> None:
        """A new stream begins: what was not acknowledged goes out again, in order, before anything else."""
        self._resend = deque(self._unacknowledged)
