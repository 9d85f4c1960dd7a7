"""Which parts of the disk tier's files are free, in blocks of 4 KiB."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

BLOCK_BYTES: Final = 4096


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


class FreeExtents:
    """Free extents; neighbours are joined. An extent is either free here or somebody's.

    Asked for so many blocks it gives the smallest free extent that is large enough, so that pages of one size take each
    other's places exactly; where none is, the largest ones together. Nothing ever has to be moved to make room.
    """

    def __init__(self) -> None:
        self._by_start: dict[tuple[int, int], int] = {}  # count by file and start
        self._by_end: dict[tuple[int, int], int] = {}  # start by file and end
        self._by_count: list[tuple[int, int, int]] = []  # sorted: count, file, start
        self.block_count = 0

    def take(self, count: int) -> list[Extent]:
        """`count` blocks in as few pieces as there can be. Ask for no more than `block_count`."""
        if count > self.block_count:
            raise ValueError(f"{count} blocks are asked for, {self.block_count} are free")
        taken: list[Extent] = []
        while count:
            at = bisect_left(self._by_count, (count, -1, -1))
            size, file, start = self._by_count[min(at, len(self._by_count) - 1)]
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
            if (file, start) in self._by_start or (file, start + count) in self._by_end:
                raise ValueError(f"blocks {start} to {start + count} of file {file} are free already")
            before = self._by_end.get((file, start))
            if before is not None:
                self._remove(file, before, start - before)
                start, count = before, count + start - before
            after = self._by_start.get((file, start + count))
            if after is not None:
                self._remove(file, start + count, after)
                count += after
            self._insert(file, start, count)

    def give_around(self, file: int, count: int, used: npt.NDArray[np.int64]) -> list[Extent]:
        """A file of `count` blocks of which those in `used` ([N, 3]: file, start, count; by start) are somebody's.

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
        self._by_start[file, start] = count
        self._by_end[file, start + count] = start
        insort(self._by_count, (count, file, start))
        self.block_count += count

    def _remove(self, file: int, start: int, count: int) -> None:
        del self._by_start[file, start]
        del self._by_end[file, start + count]
        del self._by_count[bisect_left(self._by_count, (count, file, start))]
        self.block_count -= count
