"""A clock that only the test moves."""

from __future__ import annotations


class ManualClock:
    """A kvpool.core.clock.Clock. Starts at 1000 s monotonic and at a wall time in 2001; both advance together."""

    __slots__ = ("_monotonic_s", "_wall_us")

    def __init__(self, monotonic_s: float = 1000.0, wall_us: int = 1_000_000_000_000_000) -> None:
        self._monotonic_s = monotonic_s
        self._wall_us = wall_us

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def wall_us(self) -> int:
        return self._wall_us

    def advance(self, duration_s: float) -> None:
        """Let time pass. Raises ValueError for a negative duration: monotonic time never goes back."""
        if duration_s < 0:
            raise ValueError(f"time cannot go back by {-duration_s} s; use jump_wall for a wall clock that jumps")
        self._monotonic_s += duration_s
        self._wall_us += round(duration_s * 1e6)

    def jump_wall(self, duration_s: float) -> None:
        """Move only the wall clock, either way, as an operator or NTP would."""
        self._wall_us += round(duration_s * 1e6)
