"""What a place in the cache is worth to a key, from how many such keys were used again at which age."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

AGE_BUCKETS = 160  # four for each doubling: ages up to 2**39 uses

# What is believed before much was seen. Reuses are of keys, and those of one chain come together, a dozen or more at a
# time: 200 reuses are little more than ten chains.
_LOG_UNIFORM = 0.2  # chance of a reuse while the age grows by a factor of e: about equal for all ages
_LOG_UNIFORM_REUSES = 1.0  # so many reuses seen at an age weigh as much as that
_SHRINK_REUSES = 200.0  # and so many of a rank as the belief that it is like others
_MOST_HAZARD = 600.0  # the chance to remain unused stays above the smallest float

Floats = npt.NDArray[np.float64]


def age_bucket(age: int) -> int:
    """Four buckets for each doubling of the age: 2**n begins bucket 4 * n + 4."""
    if age < 4:
        return (0, 4, 8, 11)[age]
    length = age.bit_length()
    return min(4 * length + (age >> (length - 3) & 3), AGE_BUCKETS - 1)


def age_buckets(ages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same for many."""
    return np.searchsorted(EDGES[:AGE_BUCKETS], ages, side="right") - 1


def _edges() -> Floats:
    """Where each bucket begins, and where the last one ends."""
    edges = [quarter / 4 for quarter in range(12)]
    while len(edges) <= AGE_BUCKETS:
        octave = 2.0 ** (len(edges) // 4 - 1)
        edges += [octave, 1.25 * octave, 1.5 * octave, 1.75 * octave]
    return np.array(edges[: AGE_BUCKETS + 1])


EDGES = _edges()
_WIDTHS = np.diff(EDGES)
_SMOOTHING = np.array([1.0, 2.0, 3.0, 2.0, 1.0]) / 9  # ages that differ by a fifth or so are alike
_UNINFORMED = _LOG_UNIFORM / (EDGES[:-1] + 1.0)


def place_values(reused: Floats, lost: Floats, heats: int) -> Floats:
    """Value of a place [R, B] from counts [R, B] of keys used again, or lost from sight, at each age.

    It is the best ratio, over all times for which one might go on waiting, of the chance of a reuse to the time that
    the place is taken: the Gittins index of the key.

    heats: ranks in a row that differ by heat; the first row is of keys without children, the others of lengths.
    """
    ended = reused + lost
    last = min(int(np.flatnonzero(ended.any(axis=0)).max(initial=0)) + 8, AGE_BUCKETS)
    reached = ended[:, ::-1].cumsum(axis=1)[:, ::-1]
    exposure = (reached - ended / 2) * _WIDTHS
    rates = reuse_rates(reused[:, :last], exposure[:, :last], heats)
    values = np.empty_like(reused)
    values[:, :last] = _gittins(rates, _WIDTHS[:last])
    # Older than anything seen: the older the less.
    values[:, last:] = values[:, last - 1 : last] * (EDGES[last - 1] + 1.0) / (EDGES[last:-1] + 1.0)
    return values


def reuse_rates(reused: Floats, exposure: Floats, heats: int) -> Floats:
    """Chance of reuse [R, B] in a unit of time, from reuses and the time spent [R, B] at each age.

    A rank is believed to age like all ranks together, but for one factor; and the factor to be that of its heat times
    that of its length; as long as it has not shown otherwise.
    """
    seen = np.convolve(reused.sum(axis=0), _SMOOTHING, "same")
    spent = np.convolve(exposure.sum(axis=0), _SMOOTHING, "same")
    uninformed = _UNINFORMED[: len(seen)]
    usual = (seen + _LOG_UNIFORM_REUSES) / (spent + _LOG_UNIFORM_REUSES / uninformed)
    events = reused.sum(axis=1).reshape(-1, heats)
    expected = (exposure @ usual).reshape(-1, heats)
    factor = (events + 5.0) / (expected + 5.0)
    events, expected = events[1:], expected[1:]
    of_length = np.ones((len(events), 1))
    for _ in range(3):  # they explain each other; this is enough to settle
        of_heat = _shrunk(events.sum(axis=0), (expected * of_length).sum(axis=0))
        of_length = _shrunk(events.sum(axis=1), (expected * of_heat).sum(axis=1))[:, None]
    believed = of_heat * of_length
    factor[1:] = believed * _shrunk(events, expected * believed)
    prior = factor.reshape(-1, 1) * usual
    rates: Floats = (reused + _SHRINK_REUSES) / (exposure + _SHRINK_REUSES / prior)
    return rates


def _shrunk(events: Floats, expected: Floats) -> Floats:
    return (events + _SHRINK_REUSES) / (expected + _SHRINK_REUSES)


def _gittins(rates: Floats, widths: Floats) -> Floats:
    """The index [R, B] at the beginning of each bucket, from the rates in it."""
    hazard = np.minimum(np.cumsum(rates * widths, axis=1), _MOST_HAZARD)
    alive = np.exp(-np.concatenate([np.zeros((len(rates), 1)), hazard], axis=1))  # [R, B + 1]
    taken = (alive[:, :-1] + alive[:, 1:]) / 2 * widths
    to_come = np.zeros_like(alive)
    to_come[:, :-1] = taken[:, ::-1].cumsum(axis=1)[:, ::-1]
    index = np.empty_like(rates)
    for bucket in range(rates.shape[1]):  # until the beginning of any later one; all pairs at once are slower
        gain = alive[:, bucket, None] - alive[:, bucket + 1 :]
        cost = to_come[:, bucket, None] - to_come[:, bucket + 1 :]
        index[:, bucket] = (gain / np.maximum(cost, np.finfo(np.float64).tiny)).max(axis=1)
    return index
