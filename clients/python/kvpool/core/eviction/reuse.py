"""Learns online how soon keys of a rank are used again, and so what a place in the cache is worth to them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic

import numpy as np

from kvpool.core.eviction.place_values import AGE_BUCKETS, age_bucket, age_buckets, place_values
from kvpool.core.eviction.port import K

_SAMPLES = 8192  # keys that are watched at a time, some 250 bytes each; with twice as many it chose no better
_TURNOVERS = 4  # of the cache, that keys are watched at least: what comes back later is out of reach of any policy
_MEMORY = 16  # counts are halved when there are this many times _SAMPLES: old habits fade

_RANK_BITS = 8
_RANK = (1 << _RANK_BITS) - 1


class ReuseModel(Generic[K]):
    """What a sample of keys does, inside or not: those inside alone would show no reuse later than they stay.

    It counts, of every rank and age, how many watched keys were used again then, and how many reached it unused.
    """

    def __init__(self, rank_count: int, heats: int) -> None:
        """heats: as `place_values` wants it."""
        self.values: list[list[float]] = []
        """By rank and age bucket: hits that a place given to such a key brings, for each use of the cache."""
        self.watched: OrderedDict[K, int] = OrderedDict()
        """Last use and rank in one number, the longest unused first; for looking only."""
        self.stride = 1
        """One new key in so many is to be watched."""
        self.pass_over = 0
        """New keys until the next one that is; the caller counts them down, which costs it less than a call."""
        self._heats = heats
        self._reused = np.zeros((rank_count, AGE_BUCKETS))
        self._lost = np.zeros((rank_count, AGE_BUCKETS))  # no longer watched at that age
        self.rebuild(0, 0)

    def use(self, key: K, now: int, rank: int) -> None:
        """A key was used, which is watched from now on if it was not, and is of this rank."""
        watched = self.watched
        seen = watched.get(key)
        if seen is not None:
            self._reused[seen & _RANK, age_bucket(now - (seen >> _RANK_BITS))] += 1
            watched.move_to_end(key)
        elif len(watched) >= _SAMPLES:
            _, seen = watched.popitem(last=False)
            self._lost[seen & _RANK, age_bucket(now - (seen >> _RANK_BITS))] += 1
        watched[key] = now << _RANK_BITS | rank

    def reclassify(self, key: K, rank: int) -> None:
        """More is known of a key that is watched than when it was used."""
        self.watched[key] = self.watched[key] & ~_RANK | rank

    def rebuild(self, now: int, key_count: int) -> None:
        """Compute `values` from what was seen so far. key_count: keys that the cache holds."""
        self.stride = max(1, _TURNOVERS * key_count // _SAMPLES)
        seen = np.fromiter(self.watched.values(), np.int64, len(self.watched))
        waiting = np.zeros_like(self._lost)
        np.add.at(waiting, (seen & _RANK, age_buckets(now - (seen >> _RANK_BITS))), 1)
        self.values = place_values(self._reused, self._lost + waiting, self._heats).tolist()
        if self._reused.sum() + self._lost.sum() > _MEMORY * _SAMPLES:
            self._reused /= 2
            self._lost /= 2
