"""Time as a value that is handed in, so that everything which depends on it can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where a component gets its time from."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back. For durations and deadlines."""
        ...

    def wall_us(self) -> int:
        """Microseconds since the epoch. For incarnations and retention; may jump."""
        ...


class SystemClock:
    """The machine's clocks. The only place of the code base that reads them."""

    __slots__ = ()

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_us(self) -> int:
        return time.time_ns() // 1000
