"""What a phase measures, one number each; phases of several processes are merged by them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_SAMPLE, _NOTE = "sample", "note"


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
    """Prints what a phase measures, a line each, at once: a phase may be cut off."""

    def add(self, name: str, kind: str, value: float, *, key: int = 0, run: int = 0, **more: Any) -> None:
        """One sample."""
        sample = Sample(name=name, kind=kind, value=round(value, 4), key=key, run=run, more=more)
        print(json.dumps({_SAMPLE: asdict(sample)}), flush=True)

    def note(self, name: str, value: Any) -> None:
        """Something that is not a number."""
        print(json.dumps({_NOTE: name, "is": value}), flush=True)


@dataclass(slots=True)
class Collected:
    """What the lines of phases said. Lines of other programs are not taken in."""

    samples: list[Sample] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def take(self, line: str) -> bool:
        """Whether it is a recorder's line."""
        try:
            said = json.loads(line)
        except ValueError:
            return False
        if not isinstance(said, dict) or not (_SAMPLE in said or _NOTE in said):
            return False
        if _SAMPLE in said:
            self.samples.append(Sample(**said[_SAMPLE]))
        else:
            self.notes[said[_NOTE]] = said["is"]
        return True


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

    def paired(self, name: str, kind: str, baseline: str) -> float | None:
        """The median of the ratios of samples with the same run and key: those were measured one after the other."""
        found = {
            one: {(sample.key, sample.run): sample.value for sample in self._samples if self._is(sample, name, one)}
            for one in (kind, baseline)
        }
        ratios = [value / found[baseline][at] for at, value in found[kind].items() if found[baseline].get(at)]
        return statistics.median(ratios) if ratios else None

    def _is(self, sample: Sample, name: str, kind: str) -> bool:
        return sample.name == name and sample.kind == kind

    def names(self, start: str) -> set[str]:
        """All names that begin so."""
        return {sample.name for sample in self._samples if sample.name.startswith(start)}

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
