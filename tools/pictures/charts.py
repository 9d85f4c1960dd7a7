"""What a chart shows, without how it is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto


class Color(StrEnum):
    """Roles of colours; each theme has one for each."""

    KVPOOL = auto()
    BASELINE = auto()  # what kvpool is compared with
    THIRD = auto()
    FOURTH = auto()


@dataclass(frozen=True, slots=True)
class Series:
    """name: for the legend."""

    name: str
    color: Color


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """rows: a label, and a value for each series. line: a value that is marked, as what all is compared with."""

    title: str
    note: str  # one line below the title
    series: tuple[Series, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    unit: str = ""  # behind each value
    digits: int = 2
    line: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Curves over the same places, which stand at equal distances."""

    title: str
    note: str
    series: tuple[Series, ...]
    places: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]  # shares, of each series
    across: str  # what the places are
    percent_max: int
