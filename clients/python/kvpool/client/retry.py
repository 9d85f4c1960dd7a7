"""Waiting between attempts, and which errors are worth another one."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvpool.core.errors import (
    DeadlineExceeded,
    Draining,
    KvPoolError,
    Overloaded,
    ServiceUnavailable,
    StoreUnavailable,
    WireVersionRefused,
)

TRANSIENT: tuple[type[KvPoolError], ...] = (ServiceUnavailable, Draining, Overloaded)
"""Errors after which the same call may succeed soon. Not StoreUnavailable: engines recompute at once instead."""


LATER: tuple[type[KvPoolError], ...] = (*TRANSIENT, DeadlineExceeded, StoreUnavailable, WireVersionRefused)
"""The cluster cannot be reached now, but may be later; any other error asks for another configuration."""


class Backoff:
    """Growing, jittered pauses: each is drawn from [half, whole] of a limit that doubles up to `max_s`."""

    __slots__ = ("_initial_s", "_limit_s", "_max_s", "_random")

    def __init__(
        self, initial_s: float, max_s: float, uniform: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._initial_s = initial_s
        self._max_s = max_s
        self._limit_s = initial_s
        self._random = uniform

    def next_s(self) -> float:
        """The next pause in seconds."""
        pause_s = self._random(self._limit_s / 2, self._limit_s)
        self._limit_s = min(self._max_s, 2 * self._limit_s)
        return pause_s

    def reset(self) -> None:
        """Begin again with short pauses: something succeeded."""
        self._limit_s = self._initial_s
