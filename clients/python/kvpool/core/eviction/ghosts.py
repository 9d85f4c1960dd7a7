"""A bounded memory of keys that were given up."""

from __future__ import annotations

from array import array
from collections.abc import Hashable

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads numbers that follow each other
_MIN_CELLS = 256


class GhostTable:
    """A small number noted for each key that left: 9 bytes a cell, one cell a key, the newer key wins it.

    Older keys fade without any order being kept: of those followed by as many others as there are cells, 37 % are left.
    A key is known by 64 bits, so that one in 2**64 looks like another: it only makes a key look better than it is. The
    one whose number is 0 is never known.
    """

    def __init__(self) -> None:
        self.cell_count = _MIN_CELLS
        self._cells = array("q", bytes(8 * _MIN_CELLS))
        self._notes = bytearray(_MIN_CELLS)

    def resize(self, cell_count: int) -> None:
        """At least so many cells. What was noted is lost when that is more than now."""
        if cell_count > self.cell_count:
            self.cell_count = 1 << (cell_count - 1).bit_length()
            self._cells = array("q", bytes(8 * self.cell_count))
            self._notes = bytearray(self.cell_count)

    def put(self, key: Hashable, note: int) -> None:
        """Remember 0 <= note < 256 of a key."""
        number = int.from_bytes(key[-8:], "big", signed=True) if type(key) is bytes else hash(key)
        mixed = number * _MULTIPLIER & _MASK
        at = (mixed ^ mixed >> 32) & (self.cell_count - 1)
        self._cells[at] = number
        self._notes[at] = note

    def take(self, key: Hashable) -> int | None:
        """What was noted, once; None if it is not known any more."""
        # The end of bytes, which is a hash, is the same number in every process, as integers are.
        number = int.from_bytes(key[-8:], "big", signed=True) if type(key) is bytes else hash(key)
        mixed = number * _MULTIPLIER & _MASK
        at = (mixed ^ mixed >> 32) & (self.cell_count - 1)
        if self._cells[at] != number or not number:
            return None
        self._cells[at] = 0
        return self._notes[at]
