"""Chunks that were seen in the cluster a moment ago: what need not be asked, and not be offered, again."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable


class KnownKeys:
    """Being wrong costs a load that is a miss, or a chunk that is stored only when it is offered after `known_s`."""

    def __init__(self, known_s: float, limit: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._known_s, self._limit, self._now_s = known_s, limit, now_s
        self._seen_s: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        seen_s = self._seen_s.get(key)
        return seen_s is not None and self._now_s() - seen_s <= self._known_s

    def add(self, keys: Iterable[bytes]) -> None:
        """The cluster has them now."""
        now_s = self._now_s()
        for key in keys:
            self._seen_s[key] = now_s
            self._seen_s.move_to_end(key)
        while len(self._seen_s) > self._limit:
            self._seen_s.popitem(last=False)

    def drop(self, keys: Iterable[bytes]) -> None:
        """The cluster does not have them after all."""
        for key in keys:
            self._seen_s.pop(key, None)

    def clear(self) -> None:
        self._seen_s.clear()
