"""What eviction remembers of uses: those of keys that left, and what LRU would hold now. Pure."""

from __future__ import annotations

import numpy as np

_WINDOW_SHARE = 8  # ticks of the LRU window for each key, at most
_DROPPED_AT_ONCE = 256  # ticks that one call forgets
_MASK, _MULTIPLIER = (1 << 64) - 1, 0x9E3779B97F4A7C15  # 2**64 / golden ratio


class Ghosts:
    """Uses and last tick of keys that left: a cell of 8 bytes for each, two cells for a key inside, the newer wins."""

    def __init__(self) -> None:
        self._cells = np.zeros(1, np.uint64).data

    def put(self, number: int, uses: int, tick: int, key_count: int) -> None:
        if 2 * len(self._cells) < 3 * key_count:
            self._cells = np.zeros(2 * key_count, np.uint64).data  # its memory comes as it is used
        mixed = number * _MULTIPLIER & _MASK
        self._cells[(mixed >> 24) % len(self._cells)] = (mixed & 0xFFFFFF) << 40 | uses << 32 | tick & 0xFFFFFFFF

    def take(self, number: int, now: int) -> tuple[int, int]:
        """Uses and last tick, once; zeros if they are not known."""
        mixed = number * _MULTIPLIER & _MASK
        at = (mixed >> 24) % len(self._cells)
        cell = self._cells[at]
        if cell >> 40 != mixed & 0xFFFFFF or not cell & 0xFF00000000:
            return 0, 0
        self._cells[at] = 0
        return cell >> 32 & 0xFF, now - (now - cell & 0xFFFFFFFF)


class LruWindow:
    """What LRU would hold, exactly: ticks after `start` of which so many are the last use of their key."""

    def __init__(self) -> None:
        self.start = self.now = self.count = 0
        self._is_last = bytearray()  # of the ticks from start + 1 on

    def use(self, last: int, key_count: int) -> None:
        """The next tick, of a key whose last use was that one."""
        if last > self.start:
            self.forget(last)
        self.now += 1
        self._is_last.append(1)
        self.count += 1
        if len(self._is_last) > _WINDOW_SHARE * (key_count + _DROPPED_AT_ONCE):
            self._drop()

    def forget(self, last: int) -> None:
        if last > self.start and self._is_last[last - self.start - 1]:
            self._is_last[last - self.start - 1] = 0
            self.count -= 1

    def shrink(self, key_count: int) -> None:
        for _ in range(_DROPPED_AT_ONCE):
            if self.count <= key_count:
                break
            self._drop()

    def _drop(self) -> None:
        self.count -= self._is_last[0]
        del self._is_last[0]  # moves nothing
        self.start += 1
