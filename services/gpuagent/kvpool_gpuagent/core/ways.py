"""Which way a burst of pages takes between an engine's cache and page memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

# From this run length on the copy engine alone keeps the link busy: measured on an H200, runs of 64 KiB reach 54 of 55
# GB/s, of 16 KiB 45, of 4 KiB 14.
LONG_RUN_BYTES = 64 << 10
# Below it one descriptor a run costs more than a kernel, whatever else the GPU does.
SHORTEST_RUN_BYTES = 16 << 10

# Kernels that wait longer for their turn share the GPU with an engine whose kernels fill it: one bf16 matrix product of
# 8192 takes an H200 1.6 ms. A loop of small kernels, as in decoding, leaves gaps enough for bursts.
CONTENDED_TURN_S = 1e-3
_TRIAL_INTERVAL = 64  # every so many transfers beside a busy engine kernels of ours are tried: is it still busy?


class Way(Enum):
    """How bytes get from or to an engine's cache."""

    RUNS = "runs"  # the copy engine moves run by run; no kernel; sums on the CPU
    BURSTS = "bursts"  # a kernel of the agent gathers into GPU scratch, the copy engine moves whole pages
    ENGINE = "engine"  # the same, the kernel launched by the engine's own process


class WayChooser:
    """One direction of one cache.

    On a GPU that is otherwise idle, kernels are the fastest way for any layout and cost nobody anything. Kernels of two
    processes take turns, though: beside a busy engine each burst takes the engine's time and waits for its own. There
    the copy engine moves runs if they are long, else the engine launches the kernels itself if it offered to.
    """

    def __init__(self, run_bytes: int, *, copies_bytes: bool, engine_launches: bool) -> None:
        """copies_bytes: the payload holds rows as the cache does. engine_launches: the engine offered to launch."""
        launched = [Way.ENGINE] if engine_launches else []
        runs = [Way.RUNS] if copies_bytes else []
        is_long, is_short = run_bytes >= LONG_RUN_BYTES, run_bytes < SHORTEST_RUN_BYTES
        self._beside_idle = [Way.BURSTS, *launched, *runs]
        self._beside_busy = [*runs, *launched] if is_long else [*launched, *([] if is_short else runs)]
        self._beside_busy += [way for way in self._beside_idle if way not in self._beside_busy]
        self._count = 0
        self._pinned: Way | None = None

    @property
    def ways(self) -> Sequence[Way]:
        """Ways that can be taken, the one beside a busy engine first."""
        return tuple(self._beside_busy)

    def pin(self, way: Way | None) -> None:
        """Take this way only, whatever was measured; None: choose again."""
        self._pinned = way

    def choose(self, turn_s: float, *, sums_are_fast: bool) -> Way:
        """The way of the next transfer.

        turn_s: how long kernels of ours lately waited for their turn. sums_are_fast: the CPU sums at the link's speed;
        otherwise runs, which it must sum, are slower than waiting.
        """
        if self._pinned is not None:
            return self._pinned
        if turn_s <= CONTENDED_TURN_S:
            return self._beside_idle[0]
        self._count += 1
        if self._count % _TRIAL_INTERVAL == 0:
            return self._beside_idle[0]
        return next((way for way in self._beside_busy if way is not Way.RUNS or sums_are_fast), self._beside_idle[0])

    def keep(self, ways: Collection[Way]) -> None:
        """Take only these from now on: no scratch, or an engine that stopped launching.

        raises: ValueError if none is left.
        """
        idle, busy = ([way for way in order if way in ways] for order in (self._beside_idle, self._beside_busy))
        if not idle:
            raise ValueError(f"of {[way.value for way in self._beside_idle]} none is among {ways}")
        self._beside_idle, self._beside_busy = idle, busy
        if self._pinned not in idle:
            self._pinned = None
