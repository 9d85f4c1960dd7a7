"""Measured bandwidth per source, for load estimates."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class LoadSource(IntEnum):
    """Where a page came from; the numbers of kvpool.v1 Source and EngineSource."""

    STAGING = 1
    DISK = 2
    REMOTE = 3


@dataclass(slots=True)
class CopiedBytes:
    """What all loads of an agent have copied so far: they share its link. loads: begun so far."""

    total: int = 0
    loads: int = 0


@dataclass(slots=True)
class _Sums:
    size_bytes: float = 0.0
    duration_s: float = 0.0


class Bandwidths:
    """Bytes per second, one figure per source: sums of bytes and of time that fade as more bytes are moved.

    A sample counts by its bytes, so that one large load outvotes any number of tiny ones that came before.
    """

    def __init__(self, half_life_bytes: int = 256 << 20) -> None:
        """half_life_bytes: after so many more bytes a sample counts half."""
        self._half_life_bytes = half_life_bytes
        self._sums = {source: _Sums() for source in LoadSource}

    def record(self, source: LoadSource, size_bytes: int, duration_s: float) -> None:
        """Add a sample; nonsense (no bytes, no time) is ignored."""
        if size_bytes <= 0 or duration_s <= 0:
            return
        sums, fade = self._sums[source], 0.5 ** (size_bytes / self._half_life_bytes)
        sums.size_bytes = sums.size_bytes * fade + size_bytes
        sums.duration_s = sums.duration_s * fade + duration_s

    def bytes_per_s(self, source: LoadSource) -> float:
        """0.0 if nothing was measured yet."""
        sums = self._sums[source]
        return sums.size_bytes / sums.duration_s if sums.duration_s else 0.0

    def estimate_ms(self, source: LoadSource, size_bytes: int) -> float:
        """Milliseconds to load size_bytes; 0.0 if nothing was measured yet."""
        known = self.bytes_per_s(source)
        return size_bytes / known * 1e3 if known else 0.0
