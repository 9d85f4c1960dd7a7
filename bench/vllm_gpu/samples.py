"""What a phase measures, one number each; phases of several processes are merged by them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """name: what was measured; kind: of which engine; key: tokens or the number of a round; run: of several."""

    name: str
    kind: str
    value: float
    key: int = 0
    run: int = 0
    more: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Collects the samples of one process, and prints each as a line at once: a run may be cut off."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.notes: dict[str, Any] = {}

    def add(self, name: str, kind: str, value: float, *, key: int = 0, run: int = 0, **more: Any) -> None:
        """Record and print one sample."""
        sample = Sample(name=name, kind=kind, value=round(value, 4), key=key, run=run, more=more)
        self.samples.append(sample)
        shown = {"sample": name, "kind": kind, "key": key, "run": run, "value": sample.value, **more}
        print(json.dumps({name: value for name, value in shown.items() if value or name == "value"}), flush=True)

    def note(self, name: str, value: Any) -> None:
        """Record and print something that is not a number."""
        self.notes[name] = value
        print(json.dumps({"note": name, "is": value}), flush=True)

    def write(self, path: Path) -> None:
        """As `read` takes it."""
        text = {"samples": [asdict(sample) for sample in self.samples], "notes": self.notes}
        path.write_text(json.dumps(text) + "\n")


def read(path: Path) -> tuple[list[Sample], dict[str, Any]]:
    """Samples and notes of a phase; none if it did not get to its end."""
    if not path.exists():
        return [], {}
    written = json.loads(path.read_text())
    return [Sample(**sample) for sample in written["samples"]], written["notes"]


class Samples:
    """All samples of a run, to be selected from."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = list(samples)

    def values(self, name: str, kind: str | Sequence[str], *, key: int | None = None) -> list[float]:
        """In the order in which they were measured."""
        kinds = (kind,) if isinstance(kind, str) else kind
        return [
            sample.value
            for sample in self._samples
            if sample.name == name and sample.kind in kinds and key in (None, sample.key)
        ]

    def median(self, name: str, kind: str | Sequence[str], *, key: int | None = None) -> float | None:
        """None if there is no such sample."""
        values = self.values(name, kind, key=key)
        return statistics.median(values) if values else None

    def keys(self, name: str) -> list[int]:
        """All keys of samples of that name, ascending."""
        return sorted({sample.key for sample in self._samples if sample.name == name})

    def kinds(self, name: str) -> list[str]:
        """All kinds of samples of that name."""
        return sorted({sample.kind for sample in self._samples if sample.name == name})

    def firsts(self, name: str, kind: str, *, key: int) -> list[float]:
        """Those that were the first of their key in an engine."""
        return [
            sample.value
            for sample in self._samples
            if (sample.name, sample.kind, sample.key) == (name, kind, key) and sample.more.get("first")
        ]
