"""When dirty pages are written to disk, and which of them together."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from math import inf

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey
from kvpool_pagestore.core.slots import PageRecord, Slot


class Pace:
    """Spaces work so that it stays at a rate: no burst is saved up. Time is passed in."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def wait_s(self, size_bytes: int, now_s: float) -> float:
        """Book work of this size; how long to wait before it begins."""
        begins_s = max(now_s, self._free_s)
        self._free_s = begins_s + size_bytes / self._bytes_per_s
        return begins_s - now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBackLimits:
    """How dirty pages are grouped, and how fast they go to disk."""

    batch_pages: int
    batch_bytes: int
    linger_s: float  # a page waits this long for others to join it
    max_batches: int  # in flight at once
    retry_first_s: float  # after a failure; doubles
    retry_last_s: float
    bytes_per_s: int = 0  # the budget: handed to the disk on average; 0: as fast as it takes them


class WriteState(Enum):
    """Where a page is on its way to disk."""

    WAITING = "waiting"
    WRITING = "writing"
    DONE = "done"  # durable, or no longer wanted


@dataclass(slots=True, eq=False)
class DirtyPage:
    """One page that is to become durable."""

    slot: Slot
    record: PageRecord  # as it was committed; retention may change meanwhile, see `metadata`
    stay: int  # of the page in the slot
    number: int  # order of commits
    due_s: float  # when it is written at the latest
    committed_s: float
    failures: int = 0
    error: KvPoolError | None = None  # of the last try
    durable: bool = False
    state: WriteState = WriteState.WAITING
    urgent: bool = False  # a caller waits until it is durable: the budget does not hold it back
    cause: object | None = None  # trace of the request that committed it

    @property
    def wanted(self) -> bool:
        """Its slot still holds this page, visible."""
        return self.slot.record is not None and self.slot.stay == self.stay and not self.slot.deleted

    @property
    def metadata(self) -> PageMetadata:
        """The page's current metadata."""
        return self.slot.page.metadata if self.wanted else self.record.metadata


class WriteQueue:
    """Dirty pages in the order of their commits, urgent ones first. Time is passed in.

    What is taken from the front again and again is an OrderedDict: a dict looks at everything that was there before.
    """

    def __init__(self, limits: WriteBackLimits) -> None:
        self._limits = limits
        self._pace = Pace(limits.bytes_per_s) if limits.bytes_per_s else None
        self._pending: OrderedDict[int, DirtyPage] = OrderedDict()  # all that are not done, by number
        self._pending_bytes = 0
        self._fresh: OrderedDict[int, DirtyPage] = OrderedDict()  # never tried, by number; their due times never fall
        self._again: OrderedDict[int, DirtyPage] = OrderedDict()  # failed or held back before, and due
        self._delayed: list[tuple[float, int, DirtyPage]] = []  # failed before: a heap by due time
        self._writing: dict[int, DirtyPage] = {}
        self._urgent: OrderedDict[int, DirtyPage] = OrderedDict()  # of fresh and again
        # Of fresh and again, the oldest first.
        self._groups: OrderedDict[tuple[bytes, bytes], OrderedDict[int, DirtyPage]] = OrderedDict()
        self._by_key: dict[PageKey, DirtyPage] = {}  # the one added last, until it is done
        self._fresh_bytes = 0
        self._last_number = 0
        self._held: dict[bytes, list[DirtyPage]] = {}  # keyspaces that are being cleared, with what came up meanwhile
        self.batches_in_flight = 0

    @property
    def pending(self) -> list[DirtyPage]:
        """Everything that is to become durable, in writing included."""
        return list(self._pending.values())

    def oldest_s(self, now_s: float) -> float:
        """How long ago the page was committed that waits for longest; 0 if none does."""
        while self._pending:
            number, page = next(iter(self._pending.items()))
            if page.wanted:
                return now_s - page.committed_s
            self._forget(number)
        return 0.0

    def waiting_bytes(self) -> int:
        """Bytes of pages that are to become durable, those that are being written included.

        A page that was dropped counts until it comes up.
        """
        return self._pending_bytes

    def is_writing(self, keyspace: bytes) -> bool:
        """Whether pages of a keyspace are being written."""
        return any(page.record.key.keyspace == keyspace for page in self._writing.values())

    def add(self, slot: Slot, now_s: float) -> DirtyPage:
        """A page was committed, or is to go to disk after all."""
        self._last_number += 1
        page = DirtyPage(slot, slot.page, slot.stay, self._last_number, now_s + self._limits.linger_s, now_s)
        self._by_key[page.record.key] = page
        self._pending[page.number] = page
        self._pending_bytes += page.record.page_bytes
        self._fresh[page.number] = page
        self._fresh_bytes += page.record.page_bytes
        self._join_group(page)
        return page

    def find(self, slot: Slot) -> DirtyPage | None:
        """The page of a slot if it is to become durable; also one that failed before and waits to be tried again."""
        page = self._by_key.get(slot.page.key)
        return page if page is not None and page.slot is slot and page.wanted else None

    def urge(self, pages: Iterable[DirtyPage], now_s: float) -> None:
        """Write these pages next, failed ones too, whatever the budget says: a caller waits for them.

        Others of their chain groups go with them: one sync for all.
        """
        is_any_delayed = False
        for page in pages:
            if page.state is WriteState.WAITING and not page.urgent:
                page.urgent = True
                if self._is_queued(page):
                    self._urgent[page.number] = page
                else:
                    is_any_delayed = True
        if is_any_delayed:
            self._hurry_delayed(now_s, only_urgent=True)

    def hurry(self, now_s: float) -> None:
        """Lingering and waiting after failures end now: the disk can be written again."""
        for page in self._fresh.values():
            page.due_s = min(page.due_s, now_s)
        self._hurry_delayed(now_s, only_urgent=False)

    def hold(self, keyspace: bytes) -> None:
        """Start no write of a keyspace until `unhold`."""
        self._held.setdefault(keyspace, [])

    def unhold(self, keyspace: bytes) -> None:
        for page in self._held.pop(keyspace, ()):
            self._requeue(page)

    def next_batch(self, now_s: float, *, in_budget: bool = True) -> list[DirtyPage]:
        """Pages to write together now; empty if it is not time yet or enough batches are in flight.

        in_budget: False if pages that no caller waits for may start whatever the budget says, and cost none of it.
        """
        if self.batches_in_flight >= self._limits.max_batches:
            return []
        self._take_delayed(now_s)
        if self._urgent and (batch := self._start(self._gather(self._urgent.values(), then_others=False))):
            return batch
        pace = self._pace if in_budget else None
        if (pace is not None and pace.wait_s(0, now_s)) or not self._is_due(now_s):
            return []
        batch = self._start(self._gather(self._again.values(), then_others=True))
        if pace is not None:
            pace.wait_s(sum(page.record.page_bytes for page in batch), now_s)
        return batch

    def next_due_s(self, now_s: float, *, in_budget: bool = True) -> float | None:
        """When `next_batch`, which had nothing now, is worth asking again; None if only a change can help."""
        if self.batches_in_flight >= self._limits.max_batches:
            return None
        delayed = self._delayed[0][0] if self._delayed and self._delayed[0][0] < inf else None
        pause_s = self._pace.wait_s(0, now_s) if self._pace is not None and in_budget else 0.0
        if pause_s:
            oldest = next(iter(self._fresh.values()), None)
            fresh = now_s if self._again or self._is_full() else oldest.due_s if oldest is not None else None
        else:  # what is due already may not start: its keyspace is held, or its key is being written
            fresh = next((page.due_s for page in self._fresh.values() if page.due_s > now_s), None)
        due_s = min((due_s for due_s in (fresh, delayed) if due_s is not None), default=None)
        return max(due_s, now_s + pause_s) if due_s is not None else None

    def written(self, page: DirtyPage) -> None:
        """The page is durable."""
        del self._writing[page.number]
        page.durable = True
        self._done(page)

    def failed(self, page: DirtyPage, error: KvPoolError, now_s: float, *, is_disk_out: bool = False) -> None:
        """It could not be written: tried again later, with growing distance.

        is_disk_out: not before `hurry` or `urge`. Tries would hold the slots of any number of pages that are clean by
        now, and with them all of the arena.
        """
        del self._writing[page.number]
        page.failures += 1
        page.error = error
        # The exponent is bounded: a disk that is gone for a week must not make this overflow.
        delay_s = self._limits.retry_first_s * 2.0 ** min(page.failures - 1, 32)
        page.due_s = inf if is_disk_out else now_s + min(delay_s, self._limits.retry_last_s)
        page.state, page.urgent = WriteState.WAITING, False  # who waited has the error
        heapq.heappush(self._delayed, (page.due_s, page.number, page))

    def batch_ended(self) -> None:
        self.batches_in_flight -= 1

    def _start(self, batch: list[DirtyPage]) -> list[DirtyPage]:
        for page in batch:
            self._dequeue(page)
            page.state = WriteState.WRITING
            self._writing[page.number] = page
        self.batches_in_flight += bool(batch)
        return batch

    def _is_due(self, now_s: float) -> bool:
        oldest = next(iter(self._fresh.values()), None)
        return bool(self._again) or self._is_full() or (oldest is not None and oldest.due_s <= now_s)

    def _is_full(self) -> bool:
        return len(self._fresh) >= self._limits.batch_pages or self._fresh_bytes >= self._limits.batch_bytes

    def _take_delayed(self, now_s: float) -> None:
        while self._delayed and self._delayed[0][0] <= now_s:
            self._requeue(heapq.heappop(self._delayed)[2])

    def _requeue(self, page: DirtyPage) -> None:
        self._again[page.number] = page
        if page.urgent:
            self._urgent[page.number] = page
        self._join_group(page)

    def _join_group(self, page: DirtyPage) -> None:
        group = self._groups.get(_group(page))
        if group is None:
            group = self._groups[_group(page)] = OrderedDict()
        group[page.number] = page

    def _is_queued(self, page: DirtyPage) -> bool:
        """It waits for nothing but its turn."""
        return page.number in self._fresh or page.number in self._again

    def _hurry_delayed(self, now_s: float, *, only_urgent: bool) -> None:
        self._delayed = [
            (due_s if only_urgent and not page.urgent else min(due_s, now_s), number, page)
            for due_s, number, page in self._delayed
        ]
        heapq.heapify(self._delayed)  # equal due times are ordered by number now

    def _gather(self, firsts: Iterable[DirtyPage], *, then_others: bool) -> list[DirtyPage]:
        """The first page with its chain group, then the next with its own, until the batch is full.

        then_others: after these, the oldest of all groups.
        """
        batch: dict[int, DirtyPage] = {}
        size_bytes = 0
        # A page dropped in the middle of its write and stored again waits: two writes of a key could land in any order.
        busy = {page.record.key for page in self._writing.values()}
        seen = set[tuple[bytes, bytes]]()  # each group once
        first_groups = (_group(page) for page in firsts)
        gone = list[DirtyPage]()  # cleared or evicted meanwhile
        held = list[DirtyPage]()  # out of the way until their keyspace is released: they may be all that waits
        for group in chain(first_groups, self._groups if then_others else ()):
            if group in seen:
                continue
            seen.add(group)
            for page in self._groups.get(group, _NO_GROUP).values():
                if not page.wanted:
                    gone.append(page)
                elif page.record.key.keyspace in self._held:
                    held.append(page)
                elif self._may_start(page.record.key, busy):
                    if batch and size_bytes + page.record.page_bytes > self._limits.batch_bytes:
                        break
                    batch[page.number] = page
                    size_bytes += page.record.page_bytes
                    if len(batch) >= self._limits.batch_pages:
                        break
            else:
                continue
            break
        for page in gone:
            self._dequeue(page)
            self._done(page)
        for page in held:
            self._dequeue(page)
            self._held[page.record.key.keyspace].append(page)
        return list(batch.values())

    def _done(self, page: DirtyPage) -> None:
        page.state = WriteState.DONE
        self._forget(page.number)
        if self._by_key.get(page.record.key) is page:
            del self._by_key[page.record.key]

    def _forget(self, number: int) -> None:
        page = self._pending.pop(number, None)
        if page is not None:
            self._pending_bytes -= page.record.page_bytes

    def _may_start(self, key: PageKey, busy: set[PageKey]) -> bool:
        return key not in busy

    def _dequeue(self, page: DirtyPage) -> None:
        if self._fresh.pop(page.number, None) is not None:
            self._fresh_bytes -= page.record.page_bytes
        self._again.pop(page.number, None)
        self._urgent.pop(page.number, None)
        group = self._groups[_group(page)]
        del group[page.number]
        if not group:
            del self._groups[_group(page)]


_NO_GROUP: OrderedDict[int, DirtyPage] = OrderedDict()


def _group(page: DirtyPage) -> tuple[bytes, bytes]:
    """Pages of one chain group belong together."""
    return page.record.key.keyspace, page.record.metadata.group_head_hash
