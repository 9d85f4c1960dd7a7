"""Learns online how soon keys of a rank are used again, and so what a place in the cache is worth to them."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import Generic

import numpy as np

from kvpool.core.eviction.place_values import AGE_BUCKETS, age_bucket, age_buckets, place_values
from kvpool.core.eviction.port import K

_SAMPLES = 8192  # keys that are watched at a time, some 250 bytes each; with twice as many it chose no better
_TURNOVERS = 4  # of the cache, that keys are watched at least: what comes back later is out of reach of any policy
_MEMORY = 16  # counts are halved when there are this many times _SAMPLES: old habits fade


class ReuseModel(Generic[K]):
    """What a sample of keys does, inside or not: those inside alone would show no reuse later than they stay.

    It counts, of every rank and age, how many watched keys were used again then, and how many reached it unused.
    """

    def __init__(self, rank_count: int, heats: int) -> None:
        """heats: as `place_values` wants it."""
        self.values: list[list[float]] = []
        """By rank and age bucket: hits that a place given to such a key brings, for each use of the cache."""
        self._heats = heats
        self._watched: OrderedDict[K, tuple[int, int]] = OrderedDict()  # last use, rank; the longest unused first
        self._reused = np.zeros((rank_count, AGE_BUCKETS))
        self._lost = np.zeros((rank_count, AGE_BUCKETS))  # no longer watched at that age
        self._pass_over = 0  # new keys until the next one is watched
        self._stride = 1  # one new key in so many is watched
        self.rebuild(0, 0)

    @property
    def watched_count(self) -> int:
        """Keys watched now."""
        return len(self._watched)

    def observe(self, key: K, now: int, rank: int, *, is_new: bool) -> bool:
        """A key was used, and is of this rank from now on. True if it is watched. is_new: it was not inside."""
        seen = self._watched.get(key)
        if seen is not None:
            self._reused[seen[1], age_bucket(now - seen[0])] += 1
            self._watched[key] = (now, rank)
            self._watched.move_to_end(key)
            return True
        if not is_new:
            return False
        if self._pass_over:
            self._pass_over -= 1
            return False
        self._pass_over = self._stride - 1
        if len(self._watched) >= _SAMPLES:
            _, (last_use, its_rank) = self._watched.popitem(last=False)
            self._lost[its_rank, age_bucket(now - last_use)] += 1
        self._watched[key] = (now, rank)
        return True

    def reclassify(self, key: K, rank: int) -> None:
        """More is known of a key than when it was used."""
        seen = self._watched.get(key)
        if seen is not None:
            self._watched[key] = (seen[0], rank)

    def rebuild(self, now: int, key_count: int) -> None:
        """Compute `values` from what was seen so far. key_count: keys that the cache holds."""
        self._stride = max(1, _TURNOVERS * key_count // _SAMPLES)
        seen = np.fromiter(chain.from_iterable(self._watched.values()), np.int64, 2 * len(self._watched)).reshape(-1, 2)
        waiting = np.zeros_like(self._lost)
        np.add.at(waiting, (seen[:, 1], age_buckets(now - seen[:, 0])), 1)
        self.values = place_values(self._reused, self._lost + waiting, self._heats).tolist()
        if self._reused.sum() + self._lost.sum() > _MEMORY * _SAMPLES:
            self._reused /= 2
            self._lost /= 2
