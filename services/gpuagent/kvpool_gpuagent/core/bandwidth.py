"""Measured bandwidth per source, for load estimates."""

from __future__ import annotations

from enum import IntEnum


class LoadSource(IntEnum):
    """Where a page came from; the numbers of kvpool.v1 Source and EngineSource."""

    STAGING = 1
    DISK = 2
    REMOTE = 3


class Bandwidths:
    """Exponentially weighted bytes per second, one figure per source.

    A sample's weight grows with its bytes, so that a burst of tiny loads does not outvote a large one.
    """

    def __init__(self, full_weight_bytes: int = 64 << 20) -> None:
        self._full_weight_bytes = full_weight_bytes
        self._bytes_per_s: dict[LoadSource, float] = {}

    def record(self, source: LoadSource, size_bytes: int, duration_s: float) -> None:
        """Add a sample; nonsense (no bytes, no time) is ignored."""
        if size_bytes <= 0 or duration_s <= 0:
            return
        sample = size_bytes / duration_s
        weight = min(0.5, size_bytes / self._full_weight_bytes)
        known = self._bytes_per_s.get(source)
        self._bytes_per_s[source] = sample if known is None else known + weight * (sample - known)

    def bytes_per_s(self, source: LoadSource) -> float:
        """0.0 if nothing was measured yet."""
        return self._bytes_per_s.get(source, 0.0)

    def estimate_ms(self, source: LoadSource, size_bytes: int) -> float:
        """Milliseconds to load size_bytes; 0.0 if nothing was measured yet."""
        known = self.bytes_per_s(source)
        return size_bytes / known * 1e3 if known else 0.0
