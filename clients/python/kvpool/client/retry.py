"""Waiting between attempts, and repeating calls that may be repeated."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvpool.core.errors import (
    DeadlineExceeded,
    Draining,
    KvPoolError,
    Overloaded,
    ServiceUnavailable,
    StoreUnavailable,
    WireVersionRefused,
)

ResultT = TypeVar("ResultT")

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


async def call_with_retry(
    attempt: Callable[[float], Awaitable[ResultT]],
    *,
    timeout_s: float,
    backoff: Backoff,
    retry_on: tuple[type[KvPoolError], ...] = TRANSIENT,
    give_up: Callable[[], bool] = lambda: False,
) -> ResultT:
    """Await `attempt(remaining seconds)` until it succeeds, fails for good, or another pause would pass the deadline.

    give_up: asked after a failure whether there is no use in another attempt. Only for calls that may be carried out
    twice. Raises the last attempt's error.
    """
    ends_at_s = time.monotonic() + timeout_s
    while True:
        remaining_s = ends_at_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s")
        try:
            return await attempt(remaining_s)
        except retry_on:
            pause_s = backoff.next_s()
            if give_up() or time.monotonic() + pause_s >= ends_at_s:
                raise
        await asyncio.sleep(pause_s)
