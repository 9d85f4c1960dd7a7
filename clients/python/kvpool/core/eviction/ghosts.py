"""A bounded memory of keys that were given up."""

from __future__ import annotations

from array import array
from collections.abc import Hashable

_MASK = (1 << 64) - 1
_NOTE_BITS = 8
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads numbers that follow each other
_MIN_CELLS = 256


class GhostTable:
    """A small number noted for each key that left: 8 bytes a cell, one cell a key, the newer key wins it.

    Older keys fade without any order being kept: of those followed by as many others as there are cells, 37 % are left.
    A key is known by 56 bits, so that one in 2**56 looks like another: it only makes a key look better than it is.
    """

    def __init__(self) -> None:
        self._cells = array("Q", bytes(8 * _MIN_CELLS))
        self.cell_count = _MIN_CELLS
        self._is_used = False

    def resize(self, cell_count: int) -> None:
        """At least so many cells. What was noted is lost when that is more than now."""
        if cell_count > self.cell_count:
            self.cell_count = 1 << (cell_count - 1).bit_length()
            self._cells = array("Q", bytes(8 * self.cell_count))

    def put(self, key: Hashable, note: int) -> None:
        """Remember 0 <= note < 256 of a key."""
        self._is_used = True
        number = _number(key)
        self._cells[number & (self.cell_count - 1)] = number >> _NOTE_BITS << _NOTE_BITS | note

    def take(self, key: Hashable) -> int | None:
        """What was noted, once; None if it is not known any more."""
        if not self._is_used:
            return None
        number = _number(key)
        at = number & (self.cell_count - 1)
        cell = self._cells[at]
        if not cell or cell >> _NOTE_BITS != number >> _NOTE_BITS:
            return None
        self._cells[at] = 0
        return cell & ((1 << _NOTE_BITS) - 1)


def _number(key: Hashable) -> int:
    """64 bits of a key, the same in every process where keys are bytes, which end in a hash, or integers."""
    number = int.from_bytes(key[-8:], "big") if type(key) is bytes else hash(key)
    mixed = number * _MULTIPLIER & _MASK
    return mixed ^ mixed >> 32
