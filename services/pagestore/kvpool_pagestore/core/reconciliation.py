"""What is told about the comparison of this node with the index."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileFigures:
    """How the comparison of this node with the index goes."""

    age_s: float
    last_round_s: float
    round_count: int
    replaced_ranges: int
