"""Which page goes when a tier is full: leaf-first GDSF on log frequency, held against LRU. Pure; time is passed in.

Each use gives a key a score: the tick of the use plus `weight * window * log2(uses)`. The lowest score goes, but only
ends of chains can go. That is GreedyDual-Size-Frequency (Cherkasova 1998) for equal sizes, with the logarithm of LFU
with aging, and with the uses of evicted keys remembered. `window` is what LRU would remember, in ticks, known by
simulating LRU with a byte a tick. A hit that LRU would have missed raises the weight, the opposite lowers it (as LeCaR
does, Vietri and others 2018): traffic in which frequency misleads gets LRU.

Every step takes a bounded time: queues are doubly linked lists in columns, one for each domain and range of scores.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import log2
from typing import Generic

import numpy as np
import numpy.typing as npt

from kvpool_pagestore.core.key_rows import NO_ROW, DictRows, K, KeyRows
from kvpool_pagestore.core.retained import EXPIRED_PRIORITY, PLAIN, Retention
from kvpool_pagestore.core.use_history import Ghosts, LruWindow

_PRESENT, _HELD = 1, 2  # flags of a row; without _PRESENT it only stands for a parent of keys that are inside
_MAX_USES = 255
_UNKNOWN, _MAX_POSITION = -1, (1 << 31) - 1
_LOG_USES = [0.0, *(log2(uses) for uses in range(1, _MAX_USES + 1))]
_FIRST_WEIGHT, _LEAST_WEIGHT, _MOST_WEIGHT, _WEIGHT_STEP = 1 / 23, 1 / 64, 1.0, 1 + 1 / 60
_SAME_USE_SHARE = 128  # uses within this part of the keys inside are one: shards of a chunk, a look-up and its load
_EXACT_KEYS = 4096  # with fewer keys inside, each score has a queue of its own
_NEVER, _SCORE_BITS = 1 << 62, 48
_PLAIN_CLASS = 1 - EXPIRED_PRIORITY
_GAP_CLASS = 255  # of a key that could go, but for those after it in its chain; above every priority
_COPIES = 1  # added to the number of a domain's shelf, which is even: that of its copies
_GAP_ROWS = 4096  # looked at together in the search for gaps
_TURN = 256  # entries of a backlog that one call works off


@dataclass(slots=True)
class _Shelf:
    """Queues of a domain's keys or copies, by rank: priority and score in one number. The lowest rank goes first."""

    domain: Hashable
    key_count: int = 0  # of the domain, its copies included; kept by the shelf that has an even number
    gap_count: int = 0
    ranks: list[int] = field(default_factory=list)  # of queues that are not empty, ascending
    first: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    offered: int = _NEVER  # the rank with which it is in the heap of all shelves


@dataclass(slots=True)
class _Part:
    """Shelves of some domains in the order of their lowest ranks, kept while a caller names the same domains."""

    domains: Collection[Hashable]
    only_copies: bool
    domain_count: int  # when it was made: domains may be added to a set that a caller keeps
    shelves: set[int]
    heap: list[tuple[int, int]]  # lowest rank and number of shelves; the rank may have changed since


class EvictionPolicy(Generic[K]):
    """Which key a full tier gives up next. It holds keys only; bytes and budgets are its user's.

    - Never gives up a key while one of its descendants is inside, whatever the order in which they came.
    - A key that is held (being read or written) or pinned is never a victim; if nothing else is left there is none.
    - What has expired goes first, then lower priorities before higher ones, then lower scores.
    - A key may be marked as a copy: nothing is lost when it goes. Others go by the same order, and one can ask for
      copies alone.
    - Memory is bounded by the keys inside, what is remembered of others included.

    Methods that name a key are ignored if it is not inside, except `insert` and `restore`. Those that name its row take
    less time; a key has the same one while it is inside.
    """

    def __init__(self, rows: KeyRows[K] | None = None) -> None:
        self._rows: KeyRows[K] = rows if rows is not None else DictRows()
        self._ghosts, self._window = Ghosts(), LruWindow()
        self._weight, self._was_full, self._count, self._now_us = _FIRST_WEIGHT, False, 0, 0
        self._parent, self._children, self._before, self._after, self._shelf, self._position = (
            array("i") for _ in range(6)
        )
        self._last_use, self._score = array("q"), array("q")
        # uses: 0 of an unlikely key that is not used yet.
        # class: the priority in its rank, from 1 on, of a row in a queue; 0 while it cannot go, or _GAP_CLASS.
        self._uses, self._flags, self._class = bytearray(), bytearray(), bytearray()
        self._retained: dict[int, Retention] = {}  # rows whose retention is not plain
        self._due: list[tuple[int, int]] = []  # when to place a row again, and the row
        self._due_of: dict[int, int] = {}  # the entry of `_due` that counts, by row
        self._shelves: dict[int, _Shelf] = {}
        self._shelf_of: dict[Hashable, int] = {}
        self._shelf_count = 0
        self._gap_at = 0  # the row at which the next search for gaps begins
        self._heap: list[tuple[int, int]] = []  # lowest rank and number of shelves; older ranks may be lower
        self._parts: list[_Part] = []  # one of copies alone, one of all keys

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: K) -> bool:
        return self._find(key) >= 0

    def insert(
        self,
        key: K,
        parent: K | None = None,
        *,
        position: int = _UNKNOWN,
        domain: Hashable = None,
        retention: Retention = PLAIN,
        is_unlikely: bool = False,
    ) -> None:
        """A key came in; it counts as used now. Again for a key that is inside: touched and retained as said here.

        parent: the key before it in its chain, inside or not; None for the first of a chain. It never changes.
        position: of the key in its chain, 0 for the first. A parent whose position is not the one before is ignored,
        so that parents form no cycle whatever clients say. Without positions the caller must see to that.
        domain: a label by which `evict` can be held to a part of the keys, such as the keyspace.
        is_unlikely: unless it is known from before, it ranks until it is used as what LRU would give up next.
        """
        row = self._rows.find(key)
        if row >= 0 and self._flags[row] & _PRESENT:
            self.touch_row(row)
            self.retain(key, retention)
            return
        row = self._enter(row, key, parent, position, domain, retention)
        self._uses[row], last = self._ghosts.take(_number(key), self._window.now)
        self._use(row, last, is_hit=False, is_unlikely=is_unlikely)

    def restore(
        self,
        key: K,
        parent: K | None = None,
        *,
        position: int = _UNKNOWN,
        domain: Hashable = None,
        retention: Retention = PLAIN,
    ) -> None:
        """`insert` of a key that was inside before a restart, in any order: not a use."""
        row = self._rows.find(key)
        if row >= 0 and self._flags[row] & _PRESENT:
            self.insert(key, retention=retention)
            return
        row = self._enter(row, key, parent, position, domain, retention)
        self._uses[row], self._last_use[row], self._score[row] = 1, 0, self._window.now
        self._place(row)

    def restore_all(
        self,
        parents: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        domains: Sequence[tuple[Hashable, int, int]],
    ) -> None:
        """`restore` of the keys of rows from 0 on, when there are no others; their retention is plain.

        parents: a row or -1. positions: from 0 on. domains: with the first row and the one after the last of each.
        """
        count = len(parents)
        assert not len(self._flags)
        follows = parents >= 0
        follows[follows] = positions[parents[follows]] == positions[follows] - 1
        parents = np.where(follows, parents, NO_ROW).astype(np.int32)
        children = np.bincount(parents[follows], minlength=count).astype(np.int32)
        shelves, classes = np.zeros(count, np.int32), np.zeros(count, np.uint8)
        before, after = np.zeros(count, np.int32), np.zeros(count, np.int32)
        rank = self._window.now | _PLAIN_CLASS << _SCORE_BITS
        for domain, begin, end in domains:
            number, shelf = self._new_shelf(domain)
            shelves[begin:end] = number
            leaves = begin + np.flatnonzero(children[begin:end] == 0)
            shelf.key_count, shelf.gap_count = end - begin, end - begin - len(leaves)
            classes[begin:end] = _GAP_CLASS
            classes[leaves], before[leaves[0]], after[leaves[-1]] = _PLAIN_CLASS, NO_ROW, NO_ROW
            before[leaves[1:]], after[leaves[:-1]] = leaves[:-1], leaves[1:]
            shelf.ranks, shelf.first[rank], shelf.last[rank] = [rank], int(leaves[0]), int(leaves[-1])
        self._parent, self._children, self._before, self._after, self._shelf, self._position = (
            array("i", column.tobytes()) for column in (parents, children, before, after, shelves, positions)
        )
        scores = np.full(count, self._window.now, np.int64)
        self._last_use, self._score = (array("q", column.tobytes()) for column in (np.zeros(count, np.int64), scores))
        self._uses, self._flags = bytearray(b"\x01" * count), bytearray(bytes([_PRESENT]) * count)
        self._class = bytearray(classes)
        self._count = count
        self._rebuild_heap()

    def follow(self, key: K, parent: K, position: int) -> None:
        """Name the parent of a key that came without; see `insert`."""
        row = self._find(key)
        if row >= 0 and self._parent[row] < 0 and parent != key:
            self._append(row, parent, position)

    def touch(self, key: K) -> None:
        """It was used. Touch the keys of a chain from its head on."""
        row = self._find(key)
        if row >= 0:
            self.touch_row(row)

    def touch_row(self, row: int) -> None:
        """The same by the row of a key that is inside."""
        if not self._uses[row] or self._window.now - self._last_use[row] >= self._count // _SAME_USE_SHARE:
            self._use(row, self._last_use[row], is_hit=True)

    def hold(self, key: K) -> None:
        """No victim until `release`. Not counted: one release ends any number of holds."""
        row = self._find(key)
        if row >= 0:
            self.hold_row(row)

    def hold_row(self, row: int) -> None:
        """The same by the row of a key that is inside."""
        self._flags[row] |= _HELD
        if self._class[row]:
            self._unlink(row)

    def release(self, key: K) -> None:
        """It may be a victim again."""
        row = self._find(key)
        if row >= 0:
            self.release_row(row)

    def release_row(self, row: int) -> None:
        """The same by the row of a key that is inside."""
        self._flags[row] &= ~_HELD
        self._place(row)

    def mark_row(self, row: int, *, is_copy: bool) -> None:
        """Say of a key that is inside, by its row, whether it is a copy. One that comes in is none."""
        number = self._shelf[row] & ~_COPIES | is_copy
        if number == self._shelf[row]:
            return
        if number not in self._shelves:
            self._shelves[number] = _Shelf(self._shelves[number & ~_COPIES].domain)
        if self._class[row]:
            self._unlink(row)
        self._shelf[row] = number
        self._place(row)

    def retain(self, key: K, retention: Retention) -> None:
        """Another retention from now on."""
        row = self._find(key)
        if row >= 0 and (retention != PLAIN or self._retained.pop(row, None) is not None):
            self._note(row, retention)
            self._place(row)

    def remove(self, key: K) -> None:
        """It is gone for a reason of the user's own; nothing of it is remembered."""
        row = self._rows.find(key)
        if row >= 0:
            self.remove_row(row)

    def remove_row(self, row: int) -> None:
        """The same by the key's row."""
        if self._flags[row] & _PRESENT:
            self._window.forget(self._last_use[row])
            self._leave(row)
        else:
            self._free(row)

    def evict(
        self,
        now_us: int = 0,
        *,
        domains: Collection[Hashable] | None = None,
        only_copies: bool = False,
        spare: Callable[[K], bool] | None = None,
    ) -> K | None:
        """Take out the next victim. None if nothing may go.

        domains: only keys of these, if not None; name the same object again while the next victim is to be of the same
        domains, or each victim costs a step for each of them. only_copies: of these domains. spare: keys for which it
        is true are passed over this time.
        """
        row = self._victim(now_us, domains, spare, only_copies)
        if row < 0:
            return None
        victim = self._rows.key(row)
        self._give_up(row)
        return victim

    def evict_row(self, now_us: int = 0) -> int:
        """`evict` that returns the row, or NO_ROW. For a caller whose rows are kept until it removes them."""
        row = self._victim(now_us, None, None, False)
        if row >= 0:
            self._give_up(row)
        return row

    def gaps(self, domains: Collection[Hashable], *, only_copies: bool = False) -> Iterator[int]:
        """Rows of keys that `evict` could take if there were none after them in their chains, each at most once.

        As of the time of the last victim. The policy may change between two of them. Each search begins where the one
        before has stopped, and looks at 4096 rows in some 10 us.
        """
        found = ((one, self._shelves.get(one)) for one in self._numbers(domains, only_copies))
        shelves = {number: shelf for number, shelf in found if shelf is not None and shelf.gap_count}
        for start, stop in ((self._gap_at, len(self._class)), (0, self._gap_at)):
            for first in range(start, stop, _GAP_ROWS):
                if not any(shelf.gap_count for shelf in shelves.values()):
                    return
                for row in self._gaps_between(first, min(first + _GAP_ROWS, stop), list(shelves)):
                    if self._class[row] == _GAP_CLASS and self._shelf[row] in shelves:
                        self._gap_at = row + 1
                        yield row

    # Inside

    def _gaps_between(self, first: int, end: int, shelves: Sequence[int]) -> list[int]:
        # No view of a column may be left when this returns: it could not grow.
        rows = first + np.flatnonzero(np.frombuffer(self._class, np.uint8)[first:end] == _GAP_CLASS)
        gaps: list[int] = rows[np.isin(np.frombuffer(self._shelf, np.int32)[rows], shelves)].tolist()
        return gaps

    def _victim(
        self, now_us: int, domains: Collection[Hashable] | None, spare: Callable[[K], bool] | None, only_copies: bool
    ) -> int:
        """The row that goes next, or NO_ROW."""
        self._now_us, self._was_full = now_us, True
        spared: list[int] = []
        while True:
            more = bool(self._due) and self._place_due()
            row = self._lowest() if domains is None else self._lowest_of(domains, only_copies)
            if row >= 0 and (spare is None or not spare(self._rows.key(row))):
                break
            if row >= 0:
                self._unlink(row)
                spared.append(row)
            elif not more:
                break
        for passed in spared:
            self._place(passed)
        return row

    def _give_up(self, row: int) -> None:
        uses = max(1, self._uses[row])
        self._ghosts.put(_number(self._rows.key(row)), uses, self._last_use[row], self._count)
        self._leave(row)
        if self._window.count > self._count:
            self._window.shrink(self._count)

    def _find(self, key: K) -> int:
        row = self._rows.find(key)
        return row if row >= 0 and self._flags[row] & _PRESENT else NO_ROW

    def _new(self, key: K, position: int) -> int:
        row = self._rows.add(key)
        if row == len(self._flags):  # a part of the columns at a time
            self._parent.extend([NO_ROW] * _TURN)
            for column in (self._children, self._before, self._after, self._shelf, self._position):
                column.extend([0] * _TURN)
            self._last_use.extend([0] * _TURN)
            self._score.extend([0] * _TURN)
            for flags in (self._uses, self._flags, self._class):
                flags += bytes(_TURN)
        self._position[row] = min(position, _MAX_POSITION)
        return row

    def _enter(self, row: int, key: K, parent: K | None, position: int, domain: Hashable, retention: Retention) -> int:
        """row: what stands for the key already, or NO_ROW."""
        if row < 0:
            row = self._new(key, position)
        if parent is not None and self._parent[row] < 0 and parent != key:  # a stand-in has its own
            self._append(row, parent, position)
        number = self._shelf_of.get(domain)
        if number is None:
            number, _ = self._new_shelf(domain)
        self._shelves[number].key_count += 1
        self._shelf[row], self._flags[row] = number, _PRESENT
        self._count += 1
        if retention is not PLAIN:
            self._note(row, retention)
        return row

    def _new_shelf(self, domain: Hashable) -> tuple[int, _Shelf]:
        self._shelf_count += 1
        number = self._shelf_of[domain] = 2 * self._shelf_count
        shelf = self._shelves[number] = _Shelf(domain)
        self._parts = []  # the domain may be one of theirs
        return number, shelf

    def _append(self, row: int, parent: K, position: int) -> None:
        """Put a row after its parent in its chain, unless that would contradict what was said of either before."""
        above = self._rows.find(parent)
        if position >= 0:
            before = self._position[above] if above >= 0 else position - 1
            if not 0 < position <= _MAX_POSITION or self._position[row] != position or before != position - 1:
                return
        if above < 0:
            above = self._new(parent, position - 1 if position > 0 else _UNKNOWN)
        self._parent[row] = above
        self._children[above] += 1
        if self._class[above]:
            self._place(above)

    def _leave(self, row: int) -> None:
        if self._class[row]:
            self._unlink(row)
        if self._retained:
            self._retained.pop(row, None)
        number = self._shelf[row] & ~_COPIES
        shelf = self._shelves[number]
        shelf.key_count -= 1
        if not shelf.key_count:
            del self._shelf_of[shelf.domain], self._shelves[number]
            self._shelves.pop(number | _COPIES, None)
        self._flags[row] = 0
        self._count -= 1
        self._free(row)

    def _free(self, row: int) -> None:
        """Forget a row that is not inside and stands for the parent of none, and so on up its chain."""
        parents, children, flags = self._parent, self._children, self._flags
        while row >= 0 and not flags[row] and not children[row]:
            above, parents[row] = parents[row], NO_ROW
            self._rows.remove(row)
            if above >= 0:
                children[above] -= 1
                if not children[above]:
                    self._place(above)
            row = above

    def _use(self, row: int, last: int, *, is_hit: bool, is_unlikely: bool = False) -> None:
        window, count = self._window, self._count
        if last > 0 and self._was_full and is_hit != (last > window.start):
            weight = self._weight * _WEIGHT_STEP if is_hit else self._weight / _WEIGHT_STEP
            self._weight = min(max(weight, _LEAST_WEIGHT), _MOST_WEIGHT)
        window.use(last, count)
        now = score = window.now
        width, uses = now - window.start, self._uses[row]
        if is_unlikely and not uses:
            score = window.start
        elif uses < _MAX_USES:
            uses += 1
            self._uses[row] = uses
        if uses > 1:
            score += int(self._weight * width * _LOG_USES[uses])
        if count >= _EXACT_KEYS:  # 256 queues a window, 16 of a small domain
            large = self._shelves[self._shelf[row] & ~_COPIES].key_count >= _EXACT_KEYS
            score &= -1 << max(0, (width >> (8 if large else 4)).bit_length() - 1)
        if 0 < self._class[row] < _GAP_CLASS and score != self._score[row]:
            self._unlink(row)
        self._last_use[row], self._score[row] = now, score
        self._place(row)

    def _note(self, row: int, retention: Retention) -> None:
        if retention == PLAIN:
            self._retained.pop(row, None)
            return
        self._retained[row] = retention
        times = [at for at in (retention.pinned_until_us, retention.expires_us) if at > self._now_us]
        if times and min(times) < self._due_of.get(row, _NEVER):  # else it is placed again in time
            self._due_of[row] = min(times)
            heappush(self._due, (min(times), row))

    def _place_due(self) -> bool:
        """Place rows again of which a pin or the life has ended, some at a time; whether there are more."""
        for _ in range(_TURN):
            if not self._due or self._due[0][0] > self._now_us:
                return False
            at_us, row = heappop(self._due)
            if self._due_of.get(row) == at_us:
                del self._due_of[row]
                if row in self._retained:
                    self._note(row, self._retained[row])
                    self._place(row)
        return True

    def _place(self, row: int) -> None:
        """Put it into the queue where it belongs now, if it may go at all."""
        its_class = _PLAIN_CLASS
        if self._flags[row] != _PRESENT:
            its_class = 0
        elif self._retained and (retention := self._retained.get(row)) is not None:
            expired = 0 < retention.expires_us <= self._now_us
            its_class = 1 if expired else 1 + retention.priority - EXPIRED_PRIORITY
            if retention.pinned_until_us > self._now_us:
                its_class = 0
        if its_class and self._children[row]:
            its_class = _GAP_CLASS
        if its_class != self._class[row]:
            if self._class[row]:
                self._unlink(row)
            if its_class:
                self._link(row, its_class)

    def _link(self, row: int, its_class: int) -> None:
        number, rank = self._shelf[row], self._score[row] | its_class << _SCORE_BITS
        shelf = self._shelves[number]
        if its_class == _GAP_CLASS:
            shelf.gap_count += 1
            self._class[row] = its_class
            return
        last = shelf.last.get(rank, NO_ROW)
        if last >= 0:
            self._after[last] = row
        else:
            insort(shelf.ranks, rank)
            shelf.first[rank] = row
            if rank < shelf.offered:
                shelf.offered = rank
                heappush(self._heap, (rank, number))
                if len(self._heap) > 2 * len(self._shelves) + _TURN:
                    self._rebuild_heap()
            for part in self._parts:
                if number in part.shelves and shelf.ranks[0] == rank:
                    heappush(part.heap, (rank, number))
                    if len(part.heap) > 2 * len(part.shelves) + _TURN:
                        self._parts = [one for one in self._parts if one is not part]
        self._before[row], self._after[row], self._class[row] = last, NO_ROW, its_class
        shelf.last[rank] = row

    def _rebuild_heap(self) -> None:
        self._heap = []
        for number, shelf in self._shelves.items():
            shelf.offered = shelf.ranks[0] if shelf.ranks else _NEVER
            if shelf.ranks:
                self._heap.append((shelf.offered, number))
        heapify(self._heap)

    def _unlink(self, row: int) -> None:
        shelf = self._shelves[self._shelf[row]]
        if self._class[row] == _GAP_CLASS:
            shelf.gap_count -= 1
            self._class[row] = 0
            return
        rank, before, after = self._score[row] | self._class[row] << _SCORE_BITS, self._before[row], self._after[row]
        if before >= 0:
            self._after[before] = after
        if after >= 0:
            self._before[after] = before
        if before < 0 and after < 0:
            del shelf.ranks[bisect_left(shelf.ranks, rank)], shelf.first[rank], shelf.last[rank]
        elif before < 0:
            shelf.first[rank] = after
        elif after < 0:
            shelf.last[rank] = before
        self._class[row] = 0

    def _lowest(self) -> int:
        """The row that would go next, or NO_ROW."""
        while self._heap:
            rank, number = self._heap[0]
            lowest = self._shelves.get(number)
            if lowest is None or lowest.offered != rank:
                heappop(self._heap)
            elif not lowest.ranks:
                lowest.offered = _NEVER
            elif lowest.ranks[0] > rank:
                lowest.offered = lowest.ranks[0]
                heapreplace(self._heap, (lowest.offered, number))
            else:
                return lowest.first[rank]
        return NO_ROW

    def _lowest_of(self, domains: Collection[Hashable], only_copies: bool) -> int:
        """The same of these domains."""
        part = self._part(domains, only_copies)
        while part.heap:
            rank, number = part.heap[0]
            shelf = self._shelves.get(number)
            if shelf is None or not shelf.ranks:
                heappop(part.heap)
            elif shelf.ranks[0] != rank:
                heapreplace(part.heap, (shelf.ranks[0], number))
            else:
                return shelf.first[rank]
        return NO_ROW

    def _part(self, domains: Collection[Hashable], only_copies: bool) -> _Part:
        found = next((one for one in self._parts if one.only_copies == only_copies), None)
        if found is None or found.domains is not domains or found.domain_count != len(domains):
            numbers = self._numbers(domains, only_copies)
            there = ((number, self._shelves.get(number)) for number in numbers)
            heap = [(shelf.ranks[0], number) for number, shelf in there if shelf is not None and shelf.ranks]
            heapify(heap)
            self._parts = [one for one in self._parts if one is not found]
            self._parts.append(found := _Part(domains, only_copies, len(domains), numbers, heap))
        return found

    def _numbers(self, domains: Collection[Hashable], only_copies: bool) -> set[int]:
        """Numbers of the shelves of these domains; some have no shelf of copies."""
        known = self._shelf_of
        if len(known) < len(domains):
            homes = [number for domain, number in known.items() if domain in domains]
        else:
            homes = [known[domain] for domain in domains if domain in known]
        copies = {number | _COPIES for number in homes}
        return copies if only_copies else copies.union(homes)


def _number(key: Hashable) -> int:
    """The end of bytes, which is a hash, is the same in every process, as integers are."""
    return int.from_bytes(key[-8:]) if isinstance(key, bytes) else hash(key)
