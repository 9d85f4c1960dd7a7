"""Blocks for pages: taken from what is free or from a new file, given back when nobody reads them any more."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.extent_files import ExtentFiles
from kvpool_pagestore.core.disk_budget import ExtentBudget
from kvpool_pagestore.core.extents import Extent, FreeExtents

Extents = tuple[Extent, ...]

_GIVEN_AT_ONCE: Final = 256  # under the lock: a millisecond


class ExtentBlocks:
    """Thread-safe. An extent is free, in one page, or on its way from one to the other."""

    def __init__(self, files: ExtentFiles, budget: ExtentBudget) -> None:
        self._files = files
        self._budget = budget
        self._free = FreeExtents()
        self._lock = threading.Lock()
        self._growing = threading.Lock()  # held while a file is made, for as long as its file system takes
        self._missing_blocks = 0  # what the file system had no room for when it was asked last
        self._readers: dict[PageKey, int] = {}
        self._read_meanwhile: dict[PageKey, list[Extent]] = {}  # freed while they were read

    def found(self, used: npt.NDArray[np.int64]) -> set[Extent]:
        """What pages have at a start ([N, 3] file, start, count; by file and start); all else is free.

        Answers the extents that are not there, or another page's.
        """
        counts = self._files.block_counts
        lost = {Extent(*row) for row in used[~np.isin(used[:, 0], list(counts))].tolist()}
        for number, count in counts.items():
            lost.update(self._free.give_around(number, count, used[used[:, 0] == number]))
        return lost

    def take(self, wanted: Sequence[int]) -> list[Extents] | None:
        """Blocks for each of some pages; None if all together are not free."""
        with self._lock:
            if self._free.block_count < sum(wanted):
                return None
            return [tuple(self._free.take(count)) for count in wanted]

    def take_new(self, wanted: Sequence[int]) -> list[Extents] | None:
        """As `take`, but makes files as far as the budget allows. Raises StoreFault if one cannot be made."""
        with self._growing:
            taken = self.take(wanted)
            while taken is None and self._grow(sum(wanted)):
                taken = self.take(wanted)  # not if another writer was quicker
            return taken

    def grow_as_wanted(self) -> None:
        """Find the room that was not there. Raises StoreFault."""
        with self._growing:
            self._grow(self._missing_blocks)

    def give(self, extents: Iterable[Extent]) -> None:
        """Nobody knows of them any more."""
        with self._lock:
            self._free.give(extents)

    def give_unless_read(self, freed: Sequence[tuple[PageKey, Extents]]) -> None:
        """Nobody finds them any more; who is reading a page of that key may still be in them."""
        for start in range(0, len(freed), _GIVEN_AT_ONCE):
            with self._lock:
                for key, extents in freed[start : start + _GIVEN_AT_ONCE]:
                    if key in self._readers:
                        self._read_meanwhile.setdefault(key, []).extend(extents)
                    else:
                        self._free.give(extents)

    def begin_reading(self, key: PageKey) -> None:
        """Call before the page is looked up."""
        with self._lock:
            self._readers[key] = self._readers.get(key, 0) + 1

    def end_reading(self, key: PageKey) -> None:
        with self._lock:
            count = self._readers[key] - 1
            if count:
                self._readers[key] = count
            else:
                del self._readers[key]
                self._free.give(self._read_meanwhile.pop(key, ()))

    def _grow(self, block_count: int) -> bool:
        """Make files until so many blocks are free, or the budget is used up; whether any was made."""
        has_grown = False
        while self._free.block_count < block_count:
            counts = self._files.block_counts
            room = min(self._budget.file_block_count, self._budget.block_count - sum(counts.values()))
            if room <= 0:
                break
            number = max(counts, default=0) + 1
            self._missing_blocks = block_count
            self._files.create(number, room)
            self._missing_blocks = 0
            self.give([Extent(number, 0, room)])
            has_grown = True
        return has_grown
