"""Learns online how soon keys of a class are used again, and what a place in the cache is worth to them at each age."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import Generic

import numpy as np
import numpy.typing as npt

from kvpool.core.eviction.port import K

AGE_BUCKETS = 80  # two for each doubling: ages up to 2**39 uses
_SAMPLES = 8192  # keys that are watched at a time; some 250 bytes each
_TURNOVERS = 4  # of the cache, that keys are watched at least: what comes back later is out of reach of any policy
_PRIOR_REUSES = 20.0
"""A rank is believed to age like all ranks together until it has shown about so many reuses at an age."""
_MEMORY = 16  # counts are halved when there are this many times _SAMPLES: old habits fade

Floats = npt.NDArray[np.float64]


def age_bucket(age: int) -> int:
    """Two buckets for each doubling of the age: 2**n begins bucket 2 * n + 2."""
    length = age.bit_length()
    if length < 2:
        return length * 2
    return min(2 * length + (age >> (length - 2) & 1), AGE_BUCKETS - 1)


def _edges() -> Floats:
    """Where each bucket begins, and where the last one ends."""
    edges = [0.0, 0.5, 1.0, 1.5]
    while len(edges) <= AGE_BUCKETS:
        octave = 2.0 ** (len(edges) // 2 - 1)
        edges += [octave, 1.5 * octave]
    return np.array(edges[: AGE_BUCKETS + 1])


_EDGES = _edges()
_WIDTHS = np.diff(_EDGES)


class ReuseModel(Generic[K]):
    """What a sample of keys does, inside or not: those inside alone would show no reuse later than they stay.

    It counts, of every rank and age, how many watched keys were used again then, and how many reached it unused.
    """

    def __init__(self, rank_count: int) -> None:
        self.values: list[list[float]] = []
        """By rank and age bucket: hits that a place given to such a key brings, for each use of the cache."""
        self._watched: OrderedDict[K, tuple[int, int]] = OrderedDict()  # last use, rank; the longest unused first
        self._reused = np.zeros((rank_count, AGE_BUCKETS))
        self._lost = np.zeros((rank_count, AGE_BUCKETS))  # no longer watched at that age
        self._pass_over = 0  # new keys until the next one is watched
        self._stride = 1  # one new key in so many is watched
        self.rebuild(0, 0)

    def observe(self, key: K, now: int, rank: int, *, is_new: bool) -> None:
        """A key was used, and is of this rank from now on. is_new: it was not inside."""
        seen = self._watched.get(key)
        if seen is not None:
            self._reused[seen[1], age_bucket(now - seen[0])] += 1
            self._watched[key] = (now, rank)
            self._watched.move_to_end(key)
        elif is_new:
            if self._pass_over:
                self._pass_over -= 1
                return
            self._pass_over = self._stride - 1
            if len(self._watched) >= _SAMPLES:
                _, (last_use, its_rank) = self._watched.popitem(last=False)
                self._lost[its_rank, age_bucket(now - last_use)] += 1
            self._watched[key] = (now, rank)

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
        buckets = np.searchsorted(_EDGES[:AGE_BUCKETS], now - seen[:, 0], side="right") - 1
        np.add.at(waiting, (seen[:, 1], buckets), 1)
        self.values = place_values(self._reused, self._lost + waiting).tolist()
        if self._reused.sum() + self._lost.sum() > _MEMORY * _SAMPLES:
            self._reused /= 2
            self._lost /= 2


def place_values(reused: Floats, lost: Floats) -> Floats:
    """Value of a place [R, B] from counts [R, B] of keys used again, or lost from sight, at each age.

    It is the best ratio, over all times for which one might go on waiting, of the chance of a reuse to the time that
    the place is taken: the Gittins index of the key.
    """
    ended = reused + lost
    reached = ended[:, ::-1].cumsum(axis=1)[:, ::-1]
    exposure = (reached - ended / 2) * _WIDTHS
    # Where nothing was seen yet the longest unused is worth least, so that it begins as LRU does.
    usual = (reused.sum(axis=0) + 1e-3) / (exposure.sum(axis=0) + _EDGES[:-1] + 1.0)
    # A rank is at first believed to differ from the others by one factor at all ages.
    factor = (reused.sum(axis=1) + 5.0) / (exposure @ usual + 5.0)
    prior = factor[:, None] * usual
    rates = (reused + _PRIOR_REUSES) / (exposure + _PRIOR_REUSES / prior)
    chances = -np.expm1(-rates * _WIDTHS)
    values = np.zeros_like(reused)
    last = min(int(np.flatnonzero(ended.any(axis=0)).max(initial=0)) + 4, AGE_BUCKETS)
    waits = chances[:, :last], _WIDTHS[:last]
    for bucket in range(last):
        values[:, bucket] = _best_ratio(waits[0][:, bucket:], waits[1][bucket:])
    # Older than anything seen: the older the less.
    values[:, last:] = values[:, last - 1 : last] * (_EDGES[last - 1] + 1.0) / (_EDGES[last:-1] + 1.0)
    return values


def _best_ratio(chances: Floats, widths: Floats) -> Floats:
    alive = np.cumprod(1 - chances, axis=1)
    alive = np.concatenate([np.ones((len(alive), 1)), alive[:, :-1]], axis=1)
    gain = np.cumsum(alive * chances, axis=1)
    taken = np.cumsum(alive * (1 - chances / 2) * widths, axis=1)
    best: Floats = (gain / taken).max(axis=1)
    return best
