"""Which way a burst of pages takes between an engine's cache and page memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

# From this run length on the copy engine alone keeps about 0.87 of the link (measured on an H200: runs of 64 KiB at
# 47.7 of 55 GB/s, of 32 KiB at 42, of 256 KiB at 53), and disturbs an engine's kernels least.
LONG_RUN_BYTES = 64 << 10
# Below it one descriptor a run costs more than a kernel, whatever else the GPU does.
SHORTEST_RUN_BYTES = 16 << 10

_TRIAL_INTERVAL = 64  # every so many bursts the way that lost is measured again: engines come and go
_WEIGHT = 0.25  # of a new measurement
_WORTH_CHANGING = 1.05  # a way must be so much faster than the preferred one to be taken instead
_SMALLEST_MEASURED_BYTES = 4 << 20  # smaller bursts measure latency


class Way(Enum):
    """How bytes get from or to an engine's cache."""

    RUNS = "runs"  # the copy engine moves run by run; no kernel; sums on the CPU
    BURSTS = "bursts"  # a kernel of the agent gathers into GPU scratch, the copy engine moves whole pages
    ENGINE = "engine"  # the same, the kernel launched by the engine's own process


class WayChooser:
    """One direction of one cache. Begins with the rule by run length and follows what is measured."""

    def __init__(self, run_bytes: int, *, copies_bytes: bool, engine_launches: bool) -> None:
        """copies_bytes: the payload holds rows as the cache does. engine_launches: the engine offered to launch."""
        kernels = [Way.ENGINE] if engine_launches else []
        kernels.append(Way.BURSTS)
        if not copies_bytes or run_bytes < SHORTEST_RUN_BYTES:
            self._ways = kernels
        elif run_bytes >= LONG_RUN_BYTES:
            self._ways = [Way.RUNS, *kernels]
        else:
            self._ways = [*kernels, Way.RUNS]
        self._bytes_per_s: dict[Way, float] = {}
        self._count = 0
        self._pinned: Way | None = None

    @property
    def ways(self) -> Sequence[Way]:
        """Ways that can be taken, the preferred one first."""
        return tuple(self._ways)

    def pin(self, way: Way | None) -> None:
        """Take this way only, whatever was measured; None: choose again."""
        self._pinned = way

    def choose(self) -> Way:
        """The way of the next burst."""
        if self._pinned is not None:
            return self._pinned
        self._count += 1
        best = self._ways[0]
        for way in self._ways[1:]:
            if self._bytes_per_s.get(way, 0.0) > _WORTH_CHANGING * self._bytes_per_s.get(best, float("inf")):
                best = way
        others = [way for way in self._ways if way is not best]
        if others and self._count % _TRIAL_INTERVAL == 0:
            return others[self._count // _TRIAL_INTERVAL % len(others)]
        return best

    def keep(self, ways: Collection[Way]) -> None:
        """Take only these from now on: no scratch, or an engine that stopped launching.

        raises: ValueError if none is left.
        """
        left = [way for way in self._ways if way in ways]
        if not left:
            raise ValueError(f"of {self._ways} none is among {ways}")
        self._ways = left

    def record(self, way: Way, size_bytes: int, duration_s: float) -> None:
        """A burst took so long, counted only while the lane was busy."""
        if size_bytes < _SMALLEST_MEASURED_BYTES or duration_s <= 0:
            return
        rate = size_bytes / duration_s
        known = self._bytes_per_s.get(way)
        self._bytes_per_s[way] = rate if known is None else known + _WEIGHT * (rate - known)
