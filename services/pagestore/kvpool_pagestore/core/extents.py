"""Blocks of the disk tier: its capacity divided between pages and all else, and which blocks are free."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

TRAILER_BYTES: Final = 256  # behind each page, for finding it again without RocksDB

_FIXED_BYTES: Final = 24 << 20  # logs, write buffers on their way into tables, the manifest
_RECORD_SHARE: Final = 64  # one part in this many of the rest is for records
_RECORD_BYTES: Final = 400  # of one page: 140 and what compaction has beside them at its worst, with room
_SLACK_SHARE: Final = 32  # one part in this many of the blocks is of pages just being deleted
_FILES: Final = 16  # about so many; a large tier has larger files, within bounds
_FILE_BYTES_MIN: Final = 64 << 20
_FILE_BYTES_MAX: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class ExtentBudget:
    """The files of page bytes within a capacity."""

    capacity_bytes: int

    @property
    def block_count(self) -> int:
        """Blocks of all files together, at most."""
        beside_bytes = _FIXED_BYTES + max(0, self.capacity_bytes - _FIXED_BYTES) // _RECORD_SHARE
        return max(0, self.capacity_bytes - beside_bytes) // BLOCK_BYTES

    @property
    def file_block_count(self) -> int:
        """Blocks of one file; the last one may have less."""
        size_bytes = self.block_count * BLOCK_BYTES // _FILES
        return min(max(size_bytes, _FILE_BYTES_MIN), _FILE_BYTES_MAX) // BLOCK_BYTES

    @property
    def live_limit_bytes(self) -> int:
        """What pages may be charged together (`charged_bytes`)."""
        return (self.block_count - self.block_count // _SLACK_SHARE) * BLOCK_BYTES


def page_blocks(page_bytes: int) -> int:
    """Blocks of one page with its trailer."""
    return blocks_of(page_bytes + TRAILER_BYTES)


def charged_bytes(page_bytes: int) -> int:
    """What one page counts towards the budget: its blocks, and for a small page as many as its record is worth."""
    return max(page_blocks(page_bytes) * BLOCK_BYTES, _RECORD_BYTES * _RECORD_SHARE)


BLOCK_BYTES: Final = 4096
_START_BITS: Final = 40
_START_MASK: Final = (1 << _START_BITS) - 1
_SLACK: Final = 64  # entries that a heap may have too many before it is built again


class Extent(NamedTuple):
    """A piece of one file, in blocks."""

    file: int
    start: int
    block_count: int

    @property
    def offset_bytes(self) -> int:
        return self.start * BLOCK_BYTES

    @property
    def size_bytes(self) -> int:
        return self.block_count * BLOCK_BYTES


def blocks_of(size_bytes: int) -> int:
    """Blocks that some bytes fill."""
    return -(-size_bytes // BLOCK_BYTES)


@dataclass(slots=True)
class _Same:
    """Free extents of one size: a heap of places, beside some that are no longer so."""

    heap: list[int] = field(default_factory=list)
    extent_count: int = 0


class FreeExtents:
    """Free extents; neighbours are joined. An extent is either free here or in use.

    Asked for so many blocks it gives the smallest free extent that is large enough, so that pages of one size take each
    other's places exactly; where none is, the largest ones together. Nothing ever has to be moved to make room.
    """

    def __init__(self) -> None:
        self._by_start: dict[int, int] = {}  # count by place; integers alone, which the garbage collector passes over
        self._by_end: dict[int, int] = {}  # start by place of the end
        self._counts: list[int] = []  # of free extents, each once, ascending
        self._of_count: dict[int, _Same] = {}
        self.block_count = 0

    def take(self, count: int) -> list[Extent]:
        """`count` blocks in as few pieces as there can be. Ask for no more than `block_count`."""
        if count > self.block_count:
            raise ValueError(f"{count} blocks are asked for, {self.block_count} are free")
        taken: list[Extent] = []
        while count:
            size = self._counts[min(bisect_left(self._counts, count), len(self._counts) - 1)]
            file, start = self._first(size)
            used = min(size, count)
            self._remove(file, start, size)
            if size > used:
                self._insert(file, start + used, size - used)
            taken.append(Extent(file, start, used))
            count -= used
        return taken

    def give(self, extents: Iterable[Extent]) -> None:
        """These are free. Give what was taken once: two pages would share it else, which is noticed only now and then
        (ValueError)."""
        for file, start, count in extents:
            if _place(file, start) in self._by_start or _place(file, start + count) in self._by_end:
                raise ValueError(f"blocks {start} to {start + count} of file {file} are free already")
            before = self._by_end.get(_place(file, start))
            if before is not None:
                self._remove(file, before, start - before)
                start, count = before, count + start - before
            after = self._by_start.get(_place(file, start + count))
            if after is not None:
                self._remove(file, start + count, after)
                count += after
            self._insert(file, start, count)

    def give_around(self, file: int, count: int, used: npt.NDArray[np.int64]) -> list[Extent]:
        """A file of `count` blocks of which those in `used` ([N, 3]: file, start, count; by start) are in use.

        Answers the extents that overlap one before them or stick out of the file: they are no page's.
        """
        starts, ends = used[:, 1], used[:, 1] + used[:, 2]
        reached = np.maximum.accumulate(np.concatenate([[0], ends]))  # [N + 1]: blocks that those before end at
        wrong = (starts < reached[:-1]) | (ends > count)
        if wrong.any():  # what overlaps something wrong may itself be right
            keep, end = np.ones(len(used), bool), 0
            for at, (start, stop) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                keep[at] = start >= end and stop <= count
                end = stop if keep[at] else end
            found = [Extent(*row) for row in used[~keep].tolist()]
            self.give_around(file, count, used[keep])
            return found
        gaps = np.concatenate([starts, [count]]) - reached
        self.give(Extent(file, int(reached[at]), int(gaps[at])) for at in np.flatnonzero(gaps))
        return []

    def _insert(self, file: int, start: int, count: int) -> None:
        self._by_start[_place(file, start)] = count
        self._by_end[_place(file, start + count)] = start
        same = self._of_count.get(count)
        if same is None:
            same = self._of_count[count] = _Same()
            insort(self._counts, count)
        heappush(same.heap, _place(file, start))
        same.extent_count += 1
        self.block_count += count

    def _remove(self, file: int, start: int, count: int) -> None:
        del self._by_start[_place(file, start)]
        del self._by_end[_place(file, start + count)]
        same = self._of_count[count]
        same.extent_count -= 1
        if not same.extent_count:
            del self._of_count[count], self._counts[bisect_left(self._counts, count)]
        elif len(same.heap) > 2 * same.extent_count + _SLACK:
            same.heap = list({at for at in same.heap if self._by_start.get(at) == count})
            heapify(same.heap)
        self.block_count -= count

    def _first(self, count: int) -> tuple[int, int]:
        """File and start of the first extent of so many blocks; there is one."""
        heap = self._of_count[count].heap
        while self._by_start.get(heap[0]) != count:
            heappop(heap)
        return heap[0] >> _START_BITS, heap[0] & _START_MASK


def _place(file: int, start: int) -> int:
    return file << _START_BITS | start
