"""An arena segment as whoever maps it sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class MappedSegment:
    """All bytes of a new mapping, and the file behind them. Neither may be kept: what needs the file duplicates it."""

    view: memoryview
    descriptor: int
