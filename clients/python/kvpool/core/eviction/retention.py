"""Pins, priorities and ends of life of those keys that have any."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic

from kvpool.core.eviction.port import EXPIRED_PRIORITY, PLAIN, K, Retention

_SLACK = 64  # entries that a heap may have too many before it is built anew


class RetentionBook(Generic[K]):
    """Only keys whose retention is not plain are in it, so that it costs nothing where nobody asks for any."""

    def __init__(self) -> None:
        self.retentions: dict[K, Retention] = {}  # for looking only
        self._pinned: set[K] = set()
        self._expired: set[K] = set()
        self._due: list[tuple[int, int, K]] = []  # when to look at a key again
        self._count = 0  # makes entries of the heap comparable

    def __len__(self) -> int:
        return len(self.retentions)

    def note(self, key: K, retention: Retention) -> None:
        """From now on this; pinned until `advance` is told a later time."""
        self.forget(key)
        if retention == PLAIN:
            return
        self.retentions[key] = retention
        if retention.pinned_until_us:
            self._pinned.add(key)
            self._push(retention.pinned_until_us, key)
        if retention.expires_us:
            self._push(retention.expires_us, key)

    def forget(self, key: K) -> None:
        """The key is gone."""
        if self.retentions.pop(key, None) is not None:
            self._pinned.discard(key)
            self._expired.discard(key)

    def pinned(self, key: K) -> bool:
        """Whether the key must stay."""
        return key in self._pinned

    def priority(self, key: K) -> int:
        """What it counts as now: EXPIRED_PRIORITY once its time has passed."""
        if key in self._expired:
            return EXPIRED_PRIORITY
        retention = self.retentions.get(key)
        return 0 if retention is None else retention.priority

    def advance(self, now_us: int) -> list[K]:
        """Keys whose pin or life has ended by now."""
        changed: list[K] = []
        while self._due and self._due[0][0] <= now_us:
            _, _, key = heappop(self._due)
            retention = self.retentions.get(key)
            if retention is None:
                continue
            if key in self._pinned and retention.pinned_until_us <= now_us:
                self._pinned.discard(key)
                changed.append(key)
            if 0 < retention.expires_us <= now_us and key not in self._expired:
                self._expired.add(key)
                changed.append(key)
        return changed

    def _push(self, at_us: int, key: K) -> None:
        if len(self._due) > 4 * len(self.retentions) + _SLACK:  # pins that were renewed again and again
            self._due = [entry for entry in self._due if self._is_current(entry)]
            heapify(self._due)
        self._count += 1
        heappush(self._due, (at_us, self._count, key))

    def _is_current(self, entry: tuple[int, int, K]) -> bool:
        retention = self.retentions.get(entry[2])
        return retention is not None and entry[0] in (retention.pinned_until_us, retention.expires_us)
