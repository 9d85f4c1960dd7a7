"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic

from kvpool.core.eviction.port import K
from kvpool.core.eviction.queued import QueuedPolicy


class _LruQueue(Generic[K]):
    """Keys with their last use, the longest unused first."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, int] = OrderedDict()

    def add(self, key: K, at: int) -> None:
        self._order[key] = at

    def put_back(self, key: K, at: int) -> None:
        self._order[key] = at
        self._order.move_to_end(key, last=False)

    def touch(self, key: K, at: int) -> None:
        self._order[key] = at
        self._order.move_to_end(key)

    def discard(self, key: K) -> int:
        return self._order.pop(key)

    def oldest(self) -> int | None:
        return next(iter(self._order.values()), None)

    def take(self) -> tuple[K, int]:
        return self._order.popitem(last=False)

    def gone(self, key: K) -> None:
        """Nothing is remembered."""


class LruPolicy(QueuedPolicy[K]):
    """The key whose last use is longest ago goes."""

    def __init__(self) -> None:
        super().__init__(_LruQueue)
