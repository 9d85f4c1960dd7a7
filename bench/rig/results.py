"""What benches find: samples beside their baselines, one document, one table."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpool_cli.errors import CommandFailed
from kvpool_cli.output import as_text, print_json, table


@dataclass(slots=True)
class Case:
    """One question. `baseline` says in words what the samples are compared with."""

    unit: str
    baseline: str
    values: list[float] = field(default_factory=list)
    baselines: list[float] = field(default_factory=list)

    @property
    def value(self) -> float:
        """Median of the samples."""
        return statistics.median(self.values)

    @property
    def baseline_value(self) -> float:
        """Median of the baseline's samples; 0 if there is no baseline."""
        return statistics.median(self.baselines) if self.baselines else 0.0

    @property
    def ratio(self) -> float:
        """value / baseline: for speeds larger is better, for times smaller; 0 without a baseline."""
        return self.value / self.baseline_value if self.baselines else 0.0


class Results:
    """Cases by name, in the order in which they came up."""

    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}

    def add(self, name: str, unit: str, value: float, baseline: float | None, against: str) -> None:
        """One sample, with the sample of its baseline that was taken beside it."""
        case = self._cases.setdefault(name, Case(unit, against))
        case.values.append(value)
        if baseline is not None:
            case.baselines.append(baseline)

    def __getitem__(self, name: str) -> Case:
        """A case that has samples. Raises KeyError."""
        return self._cases[name]

    def document(self) -> dict[str, dict[str, Any]]:
        """{"case name": {"value": n, "unit": "GB/s", "baseline": n, "ratio": n}}."""
        return {
            name: {
                "value": round(case.value, 4),
                "unit": case.unit,
                "baseline": round(case.baseline_value, 4),
                "ratio": round(case.ratio, 4),
            }
            for name, case in self._cases.items()
        }

    def render(self) -> str:
        """A table for people."""
        rows = [
            [
                name,
                f"{case.value:.2f} {case.unit}",
                f"{min(case.values):.2f} to {max(case.values):.2f}",
                f"{case.baseline_value:.2f} {case.unit}" if case.baselines else "-",
                f"{case.ratio:.2f}" if case.baselines else "-",
                case.baseline,
            ]
            for name, case in self._cases.items()
        ]
        return as_text(table(["case", "median", "range", "baseline", "ratio", "against"], rows, right=[1, 2, 3, 4]))

    def write(self, path: Path) -> None:
        """Write the document. Raises CommandFailed."""
        try:
            path.write_text(json.dumps(self.document(), indent=2) + "\n")
        except OSError as error:
            raise CommandFailed(f"{path} cannot be written: {error.strerror}") from error


def progress(text: str) -> None:
    """Tell a person at a terminal what is being done; silent elsewhere."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}" if text else "\r\033[K")
        sys.stderr.flush()


def write_result(document: dict[str, Any], json_name: str | None, text: str) -> None:
    """For people on stdout, unless the JSON goes there. Raises CommandFailed."""
    if json_name == "-":
        print_json(document)
        return
    print(text)
    if json_name:
        try:
            Path(json_name).write_text(json.dumps(document, indent=2) + "\n")
        except OSError as error:
            raise CommandFailed(f"{json_name} cannot be written: {error.strerror or error}") from error
