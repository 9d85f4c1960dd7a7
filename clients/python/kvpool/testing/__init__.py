"""Helpers for tests of kvpool and of what uses it: time that is moved by hand, waiting with a deadline."""

from kvpool.testing.clock import ManualClock
from kvpool.testing.waiting import eventually, eventually_sync

__all__ = ["ManualClock", "eventually", "eventually_sync"]
