"""What clients saw of a rollout, from what the load's Job writes down."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SOURCES = ("staging", "disk", "remote")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Requests of one span of time. hit_share: of prompt tokens, of prompts that were asked before."""

    requests: int
    failed: int
    wrong_tokens: int
    degraded: int  # answered, and right, though kvpool could not help to the end
    hit_share: float
    median_s: float
    longest_s: float

    def document(self) -> dict[str, Any]:
        return asdict(self)


class LoadLog:
    """What the load's Job writes, as it comes."""

    def __init__(self, namespace: str, path: Path) -> None:
        """path: where it is kept."""
        self.requests: list[dict[str, Any]] = []
        with path.open("wb") as written:
            self._process = subprocess.Popen(
                ["kubectl", "-n", namespace, "logs", "-f", "job/kvpool-load"], stdout=written
            )
        self._read, self._rest = path.open(), ""

    def refresh(self) -> None:
        """Take in what has come since."""
        *lines, self._rest = (self._rest + self._read.read()).split("\n")
        self.requests += [json.loads(line) for line in lines if line.startswith("{")]

    def seen(self, from_s: float, to_s: float) -> Seen:
        """By clients, in a span of time."""
        self.refresh()
        return seen(self.requests, from_s, to_s)

    def faults(self, since_s: float) -> list[dict[str, Any]]:
        """The first requests that failed, or had wrong tokens, since then."""
        late = (one for one in self.requests if one["at_s"] >= since_s)
        return [one for one in late if "error" in one or one["wrong_tokens"]][:5]

    def close(self) -> None:
        """Stop following."""
        self._process.terminate()
        self._process.wait()
        self._read.close()


def seen(requests: Sequence[dict[str, Any]], from_s: float, to_s: float) -> Seen:
    """Of those that ended in a span; at_s counts from the epoch, on the clock of the cluster's nodes."""
    ended = [one for one in requests if from_s <= one["at_s"] + one["seconds"] < to_s]
    shared = [one for one in ended if not one["plain"]]
    answered = [one for one in shared if "error" not in one]
    known = [one["sources"] for one in answered if not one["fresh"]]
    prompt = sum(sum(sources.values()) for sources in known)
    seconds = sorted(one["seconds"] for one in shared)
    return Seen(
        requests=len(ended),
        failed=sum("error" in one for one in ended),
        wrong_tokens=sum(one["wrong_tokens"] for one in answered),
        degraded=sum(bool(one["failure"]) for one in answered),
        hit_share=round(sum(sources[name] for sources in known for name in SOURCES) / prompt, 4) if prompt else 0.0,
        median_s=seconds[len(seconds) // 2] if seconds else 0.0,
        longest_s=seconds[-1] if seconds else 0.0,
    )
