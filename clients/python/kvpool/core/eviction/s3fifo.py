"""S3-FIFO: a small queue on probation, a main queue with second chances, ghosts (Yang and others, SOSP 2023)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic

from kvpool.core.eviction.port import K
from kvpool.core.eviction.queued import QueuedPolicy

_SMALL_SHARE = 10  # one key in this many is on probation: the paper's choice, which its authors found to fit everywhere
_MAX_USES = 3  # counted, as in the paper: two bits
_PROMOTING_USES = 2  # during probation, that lead to the main queue


class _S3FifoQueue(Generic[K]):
    """Values in `small` and `main` are the time of arrival and the uses since."""

    def __init__(self) -> None:
        self._small: OrderedDict[K, list[int]] = OrderedDict()
        self._main: OrderedDict[K, list[int]] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        self._taken_small = False

    def add(self, key: K, at: int) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = [at, 0]
        else:
            self._small[key] = [at, 0]

    def put_back(self, key: K, at: int) -> None:
        queue = self._small if self._taken_small else self._main
        queue[key] = [at, 0]
        queue.move_to_end(key, last=False)

    def touch(self, key: K, at: int) -> None:
        entry = self._small.get(key) or self._main[key]
        entry[1] = min(entry[1] + 1, _MAX_USES)

    def discard(self, key: K) -> int:
        entry = self._small.pop(key, None) or self._main.pop(key)
        return entry[0]

    def oldest(self) -> int | None:
        queue = self._small or self._main
        return next(iter(queue.values()))[0] if queue else None

    def take(self) -> tuple[K, int]:
        size = len(self._small) + len(self._main)
        while True:
            self._taken_small = bool(self._small) and (not self._main or len(self._small) * _SMALL_SHARE >= size)
            key, (at, uses) = (self._small if self._taken_small else self._main).popitem(last=False)
            if self._taken_small and uses >= _PROMOTING_USES:
                self._main[key] = [at, 0]
            elif not self._taken_small and uses:
                self._main[key] = [at, uses - 1]
            else:
                return key, at

    def gone(self, key: K) -> None:
        if self._taken_small:
            self._ghosts[key] = None
        while len(self._ghosts) > len(self._small) + len(self._main):
            self._ghosts.popitem(last=False)


class S3FifoPolicy(QueuedPolicy[K]):
    """Keys that are not used again soon go quickly; those that come back after that stay long."""

    def __init__(self) -> None:
        super().__init__(_S3FifoQueue)
