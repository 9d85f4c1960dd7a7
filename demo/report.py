"""What the demo found: phases, the table, the result file, and whether it is a success."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpool.client.engine_items import RequestStats
from kvpool_cli.output import as_text, table

PHASES = ("cold", "shared", "restart", "reference")
HIT_PHASES = ("shared", "restart")  # these engines hold nothing of their own when they start


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """One request of a phase."""

    conversation: str
    turn: int  # counted from 0
    ttft_ms: float
    prompt_tokens: RequestStats
    prompt: tuple[int, ...]  # token ids
    reply: tuple[int, ...]  # token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """All requests of a phase, in order."""

    name: str
    turns: tuple[TurnResult, ...]

    @property
    def ttft_ms_median(self) -> float:
        """Over the first turns: the same requests in every phase."""
        return statistics.median(turn.ttft_ms for turn in self.turns if turn.turn == 0)

    @property
    def prompt_tokens(self) -> RequestStats:
        """Of all turns."""
        return sum((turn.prompt_tokens for turn in self.turns), RequestStats())

    @property
    def loaded_tokens(self) -> int:
        """That came from the cluster."""
        tokens = self.prompt_tokens
        return tokens.staging + tokens.disk + tokens.remote

    def replies_equal(self, other: PhaseResult) -> bool:
        """Whether each request has the same generated tokens."""
        return [(turn.conversation, turn.turn, turn.reply) for turn in self.turns] == [
            (turn.conversation, turn.turn, turn.reply) for turn in other.turns
        ]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The phases of one run; the last one is the reference."""

    phases: tuple[PhaseResult, ...]

    def tokens_equal(self, phase: PhaseResult) -> bool:
        """Whether the phase generated what the reference did."""
        return phase.replies_equal(self.phases[-1])

    def complaints(self) -> list[str]:
        """Why the demo failed; empty if it did not."""
        found = [
            f"{phase.name}: generated tokens differ from the reference"
            for phase in self.phases
            if not self.tokens_equal(phase)
        ]
        found += [
            f"{phase.name}: not one prompt token came from the cluster"
            for phase in self.phases
            if phase.name in HIT_PHASES and not phase.loaded_tokens
        ]
        return found

    def document(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "phases": [
                {
                    "name": phase.name,
                    "ttft_ms_median": round(phase.ttft_ms_median, 2),
                    "prompt_tokens": _by_source(phase.prompt_tokens),
                    "tokens_equal": self.tokens_equal(phase),
                }
                for phase in self.phases
            ]
        }

    def write(self, path: Path) -> None:
        """The result file, in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.document(), indent=2) + "\n")
        scratch.replace(path)

    def render(self) -> str:
        """The table."""
        cold_ms = self.phases[0].ttft_ms_median
        rows = []
        for phase in self.phases:
            tokens = phase.prompt_tokens
            rows.append(
                [
                    phase.name,
                    *(f"{count:,}" for count in _by_source(tokens).values()),
                    f"{phase.ttft_ms_median:.1f}",
                    f"{phase.ttft_ms_median / cold_ms:.2f}",
                    "yes" if self.tokens_equal(phase) else "NO",
                ]
            )
        headers = ["phase", *_by_source(RequestStats()), "TTFT ms", "x cold", "tokens equal"]
        return as_text(table(headers, rows, right=range(1, len(headers) - 1)))


def _by_source(tokens: RequestStats) -> dict[str, int]:
    """Without other engines' GPUs: the demo has one engine at a time."""
    return {source: count for source, count in asdict(tokens).items() if source != "gpu"}


def phase_from_document(name: str, document: dict[str, Any]) -> PhaseResult:
    """What an engine process wrote. Raises KeyError, TypeError for anything else."""
    turns = tuple(
        TurnResult(
            conversation=turn["conversation"],
            turn=turn["turn"],
            ttft_ms=turn["ttft_ms"],
            prompt_tokens=RequestStats(**turn["prompt_tokens"]),
            prompt=tuple(turn["prompt"]),
            reply=tuple(turn["reply"]),
        )
        for turn in document["turns"]
    )
    return PhaseResult(name=name, turns=turns)


def phase_to_document(turns: list[TurnResult]) -> dict[str, Any]:
    """The inverse."""
    return {"turns": [asdict(turn) for turn in turns]}
