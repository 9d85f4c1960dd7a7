"""When a pull that does not move is worth starting again elsewhere."""

from __future__ import annotations

from collections import deque
from math import ceil

_SAMPLES = 128
_SAMPLES_MIN = 16
_SLOWER = 2.0  # than nearly all others: so many times the 95th percentile


class HedgeDelay:
    """How long a pull may bring nothing: twice what 95 of 100 pages took lately, within bounds.

    least_s: 0 never hedges. most_s: what a slow network cannot raise it beyond.
    """

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s = least_s
        self._most_s = max(least_s, most_s)
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    @property
    def enabled(self) -> bool:
        return self._least_s > 0

    def note(self, waited_s: float) -> None:
        """A page came so long after the one before it, or after the start of its pull."""
        self._samples.append(waited_s)

    @property
    def delay_s(self) -> float:
        """Seconds without a page after which another source is asked."""
        if len(self._samples) < _SAMPLES_MIN:
            return self._least_s
        ordered = sorted(self._samples)
        p95_s = ordered[ceil(len(ordered) * 0.95) - 1]
        return min(self._most_s, max(self._least_s, _SLOWER * p95_s))
