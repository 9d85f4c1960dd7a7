"""When dirty pages are written to disk, and which of them together."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey
from kvpool_pagestore.core.slots import PageRecord, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBackLimits:
    """How dirty pages are grouped."""

    batch_pages: int
    batch_bytes: int
    linger_s: float  # a page waits this long for others to join it
    max_batches: int  # in flight at once
    retry_first_s: float  # after a failure; doubles
    retry_last_s: float


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
    cause: object | None = None  # trace of the request that committed it

    @property
    def wanted(self) -> bool:
        """Its slot still holds this page, visible."""
        return self.slot.record is not None and self.slot.stay == self.stay and not self.slot.doomed

    @property
    def metadata(self) -> PageMetadata:
        """What is kept beside the page by now."""
        return self.slot.page.metadata if self.wanted else self.record.metadata


class WriteQueue:
    """Dirty pages in the order of their commits. Time is passed in."""

    def __init__(self, limits: WriteBackLimits) -> None:
        self._limits = limits
        self._fresh: dict[int, DirtyPage] = {}  # never tried, by number; their due times never fall
        self._again: dict[int, DirtyPage] = {}  # failed before, and due
        self._delayed: list[tuple[float, int, DirtyPage]] = []  # failed before: a heap by due time
        self._writing: dict[int, DirtyPage] = {}
        self._groups: dict[tuple[bytes, bytes], dict[int, DirtyPage]] = {}  # of fresh and again
        self._by_key: dict[PageKey, DirtyPage] = {}  # the one added last, until it is done
        self._fresh_bytes = 0
        self._last_number = 0
        self._held: set[bytes] = set()  # keyspaces that are being cleared
        self.batches_in_flight = 0

    @property
    def pending(self) -> list[DirtyPage]:
        """Everything that is to become durable, in writing included."""
        delayed = (page for _, _, page in self._delayed)
        return [*self._writing.values(), *self._again.values(), *self._fresh.values(), *delayed]

    def oldest_s(self, now_s: float) -> float:
        """How long ago the page was committed that waits for longest; 0 if none does."""
        return max((now_s - page.committed_s for page in self.pending if page.wanted), default=0.0)

    def add(self, slot: Slot, now_s: float) -> DirtyPage:
        """A page was committed, or is to go to disk after all."""
        self._last_number += 1
        page = DirtyPage(slot, slot.page, slot.stay, self._last_number, now_s + self._limits.linger_s, now_s)
        self._by_key[page.record.key] = page
        self._fresh[page.number] = page
        self._fresh_bytes += page.record.page_bytes
        self._groups.setdefault(_group(page), {})[page.number] = page
        return page

    def find(self, slot: Slot) -> DirtyPage | None:
        """The page of a slot if it is to become durable; also one that failed before and waits to be tried again."""
        page = self._by_key.get(slot.page.key)
        return page if page is not None and page.slot is slot and page.wanted else None

    def hurry(self, now_s: float) -> None:
        """Write all waiting pages now, failed ones too: somebody waits for them."""
        for page in self._fresh.values():
            page.due_s = min(page.due_s, now_s)
        self._delayed = [(min(due_s, now_s), number, page) for due_s, number, page in self._delayed]
        heapq.heapify(self._delayed)  # equal due times are ordered by number now

    def hold(self, keyspace: bytes) -> None:
        """Start no write of a keyspace until `unhold`."""
        self._held.add(keyspace)

    def unhold(self, keyspace: bytes) -> None:
        self._held.discard(keyspace)

    def next_batch(self, now_s: float) -> list[DirtyPage]:
        """Pages to write together now; empty if it is not time yet or enough batches are in flight."""
        if self.batches_in_flight >= self._limits.max_batches:
            return []
        self._take_delayed(now_s)
        oldest = next(iter(self._fresh.values()), None)
        if not (self._again or self._is_full() or (oldest is not None and oldest.due_s <= now_s)):
            return []
        batch = self._gather()
        for page in batch:
            self._dequeue(page)
            page.state = WriteState.WRITING
            self._writing[page.number] = page
        self.batches_in_flight += bool(batch)
        return batch

    def next_due_s(self, now_s: float) -> float | None:
        """When `next_batch`, which had nothing now, is worth asking again; None if only a change can help."""
        if self.batches_in_flight >= self._limits.max_batches:
            return None
        # What is due already may not start: its keyspace is held, or its key is being written.
        fresh = next((page.due_s for page in self._fresh.values() if page.due_s > now_s), None)
        delayed = self._delayed[0][0] if self._delayed else None
        return min((due_s for due_s in (fresh, delayed) if due_s is not None), default=None)

    def written(self, page: DirtyPage) -> None:
        """The page is durable."""
        del self._writing[page.number]
        page.durable = True
        self._done(page)

    def failed(self, page: DirtyPage, error: KvPoolError, now_s: float) -> None:
        """It could not be written: tried again later, with growing distance."""
        del self._writing[page.number]
        page.failures += 1
        page.error = error
        # The exponent is bounded: a disk that is gone for a week must not make this overflow.
        delay_s = self._limits.retry_first_s * 2.0 ** min(page.failures - 1, 32)
        page.due_s = now_s + min(delay_s, self._limits.retry_last_s)
        page.state = WriteState.WAITING
        heapq.heappush(self._delayed, (page.due_s, page.number, page))

    def batch_ended(self) -> None:
        self.batches_in_flight -= 1

    def _is_full(self) -> bool:
        return len(self._fresh) >= self._limits.batch_pages or self._fresh_bytes >= self._limits.batch_bytes

    def _take_delayed(self, now_s: float) -> None:
        while self._delayed and self._delayed[0][0] <= now_s:
            page = heapq.heappop(self._delayed)[2]
            self._again[page.number] = page
            self._groups.setdefault(_group(page), {})[page.number] = page

    def _gather(self) -> list[DirtyPage]:
        """The oldest page with its chain group, then the next oldest with its own, until the batch is full."""
        batch: dict[int, DirtyPage] = {}
        size_bytes = 0
        # A page dropped in the middle of its write and stored again waits: two writes of a key could land in any order.
        busy = {page.record.key for page in self._writing.values()}
        # Each group once: what cannot start now, as while its keyspace is cleared, may be all of it.
        firsts = (_group(page) for page in [*self._again.values(), *self._fresh.values()])
        for group in dict.fromkeys(firsts):
            for page in list(self._groups.get(group, {}).values()):
                if not page.wanted:  # cleared or evicted meanwhile
                    self._dequeue(page)
                    self._done(page)
                elif page.number not in batch and self._may_start(page.record.key, busy):
                    if batch and size_bytes + page.record.page_bytes > self._limits.batch_bytes:
                        return list(batch.values())
                    batch[page.number] = page
                    size_bytes += page.record.page_bytes
                    if len(batch) >= self._limits.batch_pages:
                        return list(batch.values())
        return list(batch.values())

    def _done(self, page: DirtyPage) -> None:
        page.state = WriteState.DONE
        if self._by_key.get(page.record.key) is page:
            del self._by_key[page.record.key]

    def _may_start(self, key: PageKey, busy: set[PageKey]) -> bool:
        return key not in busy and key.keyspace not in self._held

    def _dequeue(self, page: DirtyPage) -> None:
        if self._fresh.pop(page.number, None) is not None:
            self._fresh_bytes -= page.record.page_bytes
        self._again.pop(page.number, None)
        group = self._groups[_group(page)]
        del group[page.number]
        if not group:
            del self._groups[_group(page)]


def _group(page: DirtyPage) -> tuple[bytes, bytes]:
    """Pages of one chain group belong together."""
    return page.record.key.keyspace, page.record.metadata.group_head_hash
