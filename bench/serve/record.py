"""What was measured: one outcome for each request, and what all of them come to in bounded memory."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.serve.distribution import Distribution

_SAMPLED_REQUESTS = 2_000
_TIMELINE_BINS = 400
_FIRST_BIN_S = 0.25
_EXAMPLES = 3
_ERROR_KINDS_MAX = 50  # a server that makes up status codes does not make us grow
_TURNS_APART = 16  # later turns count as this one
LIMITED = ("ttft", "tpot", "itl", "e2e")


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds of the loop's clock.

    intended_s: when it was meant to be sent; what a user would wait is counted from there.
    gaps_s: between events that carried tokens. error: kind of failure, or "".
    """

    intended_s: float
    sent_s: float
    turn: int = 0
    first_s: float | None = None
    last_s: float = 0.0  # when the last token came
    end_s: float = 0.0  # when the answer had ended, or failed
    gaps_s: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    counted_by_server: bool = False
    error: str = ""
    detail: str = ""

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return (self.first_s if self.first_s is not None else self.end_s) - self.intended_s

    @property
    def e2e_s(self) -> float:
        """Until the end of the answer."""
        return self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None where there is no second one."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def token_events(self) -> int:
        """Events that carried tokens."""
        return len(self.gaps_s) + (self.first_s is not None)

    def to_line(self, begin_s: float) -> dict[str, Any]:
        """For --log."""
        return {
            "intended_s": round(self.intended_s - begin_s, 6),
            "send_lag_s": round(self.sent_s - self.intended_s, 6),
            "ttft_s": None if self.first_s is None else round(self.ttft_s, 6),
            "e2e_s": round(self.e2e_s, 6),
            "turn": self.turn,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "error": self.error,
            "detail": self.detail,
        }


class Timeline:
    """Counts by time. Bins double in width when there would be too many of them."""

    FIELDS = ("started", "finished", "failed", "output_tokens", "ttft_sum_s", "ttft_count", "ttft_max_s")

    def __init__(self) -> None:
        self.bin_s = _FIRST_BIN_S
        self.bins: list[list[float]] = []

    def add(self, at_s: float, name: str, value: float = 1.0) -> None:
        """Count at a moment >= 0; `ttft_max_s` keeps the largest."""
        while at_s >= self.bin_s * _TIMELINE_BINS:
            self._double()
        index = int(max(0.0, at_s) / self.bin_s)
        while len(self.bins) <= index:
            self.bins.append([0.0] * len(self.FIELDS))
        column = self.FIELDS.index(name)
        row = self.bins[index]
        row[column] = max(row[column], value) if name == "ttft_max_s" else row[column] + value

    def _double(self) -> None:
        self.bin_s *= 2
        if len(self.bins) % 2:
            self.bins.append([0.0] * len(self.FIELDS))
        largest = self.FIELDS.index("ttft_max_s")
        self.bins = [
            [max(a, b) if column == largest else a + b for column, (a, b) in enumerate(zip(left, right, strict=True))]
            for left, right in zip(self.bins[::2], self.bins[1::2], strict=True)
        ]


class Recorder:
    """All outcomes. limits_s: what a request must keep to be good, by one of LIMITED. Only the loop's thread calls."""

    def __init__(self, limits_s: Mapping[str, float], discard_s: float, seed: int) -> None:
        self.limits_s, self.discard_s = dict(limits_s), discard_s
        self.begin_s = self.last_end_s = 0.0
        self.ok = self.failed = self.discarded = self.unfinished = self.good = 0
        self.abandoned_turns = self.stand_in_answers = 0
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0
        self.all_prompt_tokens = 0  # also of requests that are left out: servers count them too
        self.cached_known = self.uncounted = self.token_events = 0
        self.latency = {name: Distribution() for name in ("ttft", "itl", "tpot", "e2e", "send_lag", "loop_lag")}
        self.lengths = {name: Distribution() for name in ("prompt_tokens", "output_tokens")}
        self.ttft_by_turn: list[Distribution] = []
        self.errors: dict[str, int] = {}
        self.examples: dict[str, list[str]] = {}
        self.timeline = Timeline()
        self.sample: list[list[float | None]] = []
        self._rng = random.Random(f"{seed}/sample")

    def begin(self, at_s: float) -> None:
        """The load starts now."""
        self.begin_s = self.last_end_s = at_s

    @property
    def elapsed_s(self) -> float:
        """From the first moment that counts to the last end."""
        return max(0.0, self.last_end_s - self.begin_s - self.discard_s)

    def add(self, outcome: Outcome) -> None:
        """One request that has ended, well or not."""
        self.all_prompt_tokens += outcome.prompt_tokens
        if outcome.intended_s - self.begin_s < self.discard_s:
            self.discarded += 1
            return
        self.last_end_s = max(self.last_end_s, outcome.end_s)
        self.timeline.add(outcome.intended_s - self.begin_s, "started")
        self.latency["send_lag"].add(outcome.sent_s - outcome.intended_s)
        if outcome.error:
            self._add_error(outcome)
        else:
            self._add_good_end(outcome)

    # Inside

    def _add_error(self, outcome: Outcome) -> None:
        self.failed += 1
        kind = outcome.error
        if kind not in self.errors and len(self.errors) >= _ERROR_KINDS_MAX:
            kind = "other"
        self.errors[kind] = self.errors.get(kind, 0) + 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < _EXAMPLES and outcome.detail not in examples:
            examples.append(outcome.detail)
        self.timeline.add(outcome.end_s - self.begin_s, "failed")

    def _add_good_end(self, outcome: Outcome) -> None:
        self.ok += 1
        self._add_tokens(outcome)
        self.latency["ttft"].add(outcome.ttft_s)
        self.latency["e2e"].add(outcome.e2e_s)
        for gap_s in outcome.gaps_s:
            self.latency["itl"].add(gap_s)
        if outcome.tpot_s is not None:
            self.latency["tpot"].add(outcome.tpot_s)
        self.good += self._is_good(outcome)
        while len(self.ttft_by_turn) <= min(outcome.turn, _TURNS_APART - 1):
            self.ttft_by_turn.append(Distribution())
        self.ttft_by_turn[min(outcome.turn, _TURNS_APART - 1)].add(outcome.ttft_s)
        self._add_to_timeline(outcome)
        self._add_to_sample(outcome)

    def _add_tokens(self, outcome: Outcome) -> None:
        self.prompt_tokens += outcome.prompt_tokens
        self.output_tokens += outcome.output_tokens
        self.lengths["prompt_tokens"].add(outcome.prompt_tokens)
        self.lengths["output_tokens"].add(outcome.output_tokens)
        self.uncounted += not outcome.counted_by_server
        self.token_events += outcome.token_events
        if outcome.cached_tokens is not None:
            self.cached_known += 1
            self.cached_tokens += outcome.cached_tokens

    def _is_good(self, outcome: Outcome) -> bool:
        of = {
            "ttft": outcome.ttft_s,
            "tpot": outcome.tpot_s or 0.0,
            "itl": max(outcome.gaps_s, default=0.0),
            "e2e": outcome.e2e_s,
        }
        return all(of[name] <= limit_s for name, limit_s in self.limits_s.items())

    def _add_to_timeline(self, outcome: Outcome) -> None:
        started_s, ended_s = outcome.intended_s - self.begin_s, outcome.end_s - self.begin_s
        self.timeline.add(started_s, "ttft_sum_s", outcome.ttft_s)
        self.timeline.add(started_s, "ttft_count")
        self.timeline.add(started_s, "ttft_max_s", outcome.ttft_s)
        self.timeline.add(ended_s, "finished")
        # Spread evenly from the first token to the last, over a few points: enough for a plot of tokens a second.
        first_s = outcome.intended_s + outcome.ttft_s - self.begin_s
        points = min(8, max(1, outcome.output_tokens))
        for point in range(points):
            at_s = first_s + (outcome.last_s - self.begin_s - first_s) * (point + 0.5) / points
            self.timeline.add(at_s, "output_tokens", outcome.output_tokens / points)

    def _add_to_sample(self, outcome: Outcome) -> None:
        """Keep an even choice of all requests, however many there are."""
        row: list[float | None] = [
            round(outcome.intended_s - self.begin_s, 4),
            round(outcome.ttft_s, 5),
            round(outcome.e2e_s, 5),
            outcome.prompt_tokens,
            outcome.cached_tokens,
            outcome.output_tokens,
            outcome.turn,
        ]
        if len(self.sample) < _SAMPLED_REQUESTS:
            self.sample.append(row)
            return
        place = self._rng.randrange(self.ok)
        if place < _SAMPLED_REQUESTS:
            self.sample[place] = row
