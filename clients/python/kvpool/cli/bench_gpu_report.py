"""What the GPU bench found: cases beside their baselines, in one table a section."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpool.cli.bench_results import Results
from kvpool.cli.output import CommandFailed, table


@dataclass(slots=True)
class Section:
    """A table of its own; columns of `left` are words."""

    title: str
    headers: Sequence[str]
    left: Sequence[int]
    rows: list[list[str]] = field(default_factory=list)

    def render(self) -> str:
        """Title and table; a note if nothing was measured."""
        right = [column for column in range(len(self.headers)) if column not in self.left]
        body = table(self.headers, self.rows, right=right) if self.rows else "nothing was measured"
        return f"\n{self.title}\n\n{body}"


class GpuReport:
    """about: what was measured, where and when. notes: what was left out or failed. failed: whether anything did."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.results = Results()
        self.details: dict[str, dict[str, Any]] = {}
        self.sections: list[Section] = []
        self.notes: list[str] = []
        self.failed = False

    def section(self, title: str, headers: Sequence[str], left: Sequence[int]) -> Section:
        """A new section; fill its rows."""
        self.sections.append(Section(title, headers, left))
        return self.sections[-1]

    def add(self, name: str, unit: str, value: float, baseline: float | None, against: str, **details: object) -> None:
        """One sample; details: of the last sample of the case."""
        self.results.add(name, unit, value, baseline, against)
        self.details.setdefault(name, {}).update(details)

    def value(self, name: str) -> str:
        """Median, for a table."""
        return f"{self.results[name].value:.1f}"

    def ratio(self, name: str) -> str:
        """Of value and baseline, for a table."""
        return f"{self.results[name].ratio:.3f}"

    def document(self) -> dict[str, Any]:
        """{"about": {...}, "cases": {name: {value, unit, baseline, ratio, against, ...}}, "notes": [...]}."""
        cases = {
            name: case | {"against": self.results[name].baseline} | self.details.get(name, {})
            for name, case in self.results.document().items()
        }
        return {"about": self.about, "cases": cases, "notes": self.notes}

    def write(self, path: Path) -> None:
        """Write the document. Raises CommandFailed."""
        try:
            path.write_text(json.dumps(self.document(), indent=2) + "\n")
        except OSError as error:
            raise CommandFailed(f"{path} cannot be written: {error.strerror}") from error

    def header(self) -> str:
        """What was measured, line by line."""
        width = max(len(key) for key in self.about)
        return "\n".join(f"{key:<{width}}  {value}" for key, value in self.about.items())
