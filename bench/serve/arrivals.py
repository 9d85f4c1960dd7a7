"""When requests are meant to start, in seconds after the first moment of the load."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from enum import StrEnum


class Arrival(StrEnum):
    """How starts follow each other at a given rate."""

    POISSON = "poisson"
    CONSTANT = "constant"


def intended_starts_s(arrival: Arrival, rate_per_s: float, seed: int) -> Iterator[float]:
    """Without end, ascending. The same row for the same seed, whatever the server does."""
    if arrival is Arrival.CONSTANT:
        yield from (number / rate_per_s for number in itertools.count())
        return
    rng = random.Random(f"{seed}/arrivals")
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate_per_s)
        yield at_s
