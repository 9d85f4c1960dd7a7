"""How far the clock of another machine is off, as far as one question can tell."""

from __future__ import annotations


def lead_s(first_s: float, last_s: float, *, began_s: float, ended_s: float) -> float:
    """Seconds that a clock is ahead of ours at the least; below zero: behind; 0 where nothing speaks against it.

    It showed something from first_s to last_s when it was asked, some time from began_s to ended_s by ours: however
    long the answer took, or either machine stood still, says nothing of its clock.
    """
    return max(0.0, first_s - ended_s) + min(0.0, last_s - began_s)
