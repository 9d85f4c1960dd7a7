"""How large bursts of pages are: kernels of two processes take turns, so each launch may wait for its turn."""

from __future__ import annotations

_WEIGHT = 0.25  # of a new measurement
# A burst's copy must outlast the kernels of the next one, their turn included, or the link runs dry; twice, as turns
# vary.
_COPIES_PER_TURN = 2.0
_LINK_BYTES_PER_S = 55e9  # of PCIe 5 x16: on a slower link bursts are larger than they need be, no harm

FIRST_BYTES = 8 << 20  # on the link as long as the next burst takes to be enqueued
IDLE_BYTES = 32 << 20  # on an idle GPU: larger ones leave too few for both directions at once


class BurstSizer:
    """Of one direction. Small bursts on an idle GPU (what is exposed before the first copy and after the last one is
    short), large ones beside a busy engine: on an H200 beside matrix products, bursts of 16 MiB reach 15 GB/s, of 128
    MiB 53 of 55."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self.turn_s = 0.0  # lately
        self._last_bytes = 0

    def next_bytes(self, *, continuing: bool) -> int:
        """Bytes of the next burst at most. continuing: an earlier one is still in flight; sizes double then."""
        wanted = max(int(_COPIES_PER_TURN * self.turn_s * _LINK_BYTES_PER_S), FIRST_BYTES)
        if continuing:
            wanted = max(wanted, min(2 * self._last_bytes, IDLE_BYTES))
        self._last_bytes = min(wanted, self._largest_bytes)
        return self._last_bytes

    def record(self, *, turn_s: float) -> None:
        """turn_s: how long a burst's kernels, their turn included, were waited for; 0 if not at all."""
        self.turn_s += _WEIGHT * (turn_s - self.turn_s)
