"""Whether loading a prefix is quicker than computing it, and how much of it to load. Learns from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from kvpool.core.errors import InvalidRequest
from kvpool.core.prefill_times import LEAST_TOKENS, PrefillTimes

DEFAULT_BYTES_PER_S = 1e9
"""Of loads that have begun, until one was measured: little for any medium that is worth a cache."""
_SAMPLE_WEIGHT = 0.3  # of the newest measurement
_SAMPLES = 5  # of estimates beside what was measured, the newest; the median counts: one host that stood still does not
_MARGIN = 0.9  # loading has to take less than this share of the time of computing
# Loads that were measured or estimated slow are not slow for ever: as long as they are passed over, it is believed less
# and less, until one is tried. The more of those were slow indeed, the longer it takes.
_BELIEF, _BELIEF_LEAST = 0.9, 1e-9
_PATIENCE, _PATIENCE_MAX = (
    1,
    64,
)  # seconds and passes from one doubt to the next: few requests are not to be mostly tries
# Computing is tried only where it brings much to learn, and not much more: so many times what was measured of it.
_GROWTH, _GROWTH_MAX = 2, 16
_GROWTH_LOADS = 6  # the least that brings something is tried though it may take so many times as long as the load


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Consecutive chunks. estimated_ms: of whoever would load them; 0 if unknown. token_count: to be computed else."""

    chunk_count: int
    token_count: int
    size_bytes: int
    estimated_ms: float


@dataclass(slots=True)
class LoadCost:
    """Of one engine. Knows nothing at first: then what can be loaded is loaded, and deadlines bound the wait.

    prefill:              what computing takes.
    load_bytes_per_s:     of whole loads after the first, as the engine saw them; 0 if none was measured.
    overhead_ms:          of a load beyond its estimate: until it begins, and until the engine has noticed its end.
    share:                of its estimate that a load takes; below 1 where estimates are too long, say because of one
                          load long ago that was stuck.
    belief:               share of a load's time that is believed in, the less the longer loads are passed over.
    patience:             so many seconds, and so many loads passed over, until it is believed less.
    """

    prefill: PrefillTimes = field(default_factory=PrefillTimes)
    load_bytes_per_s: float = 0.0
    overhead_ms: float = 0.0
    share: float = 1.0
    warmed_up: bool = False
    belief: float = 1.0
    patience: int = _PATIENCE
    doubted_at_s: float = -inf
    passes: int = 0
    _errors: list[tuple[float, float]] = field(default_factory=list)  # (overhead, share) of loads, oldest first
    _on_trial: bool = False  # the next load that comes in shows what is true of those that were passed over

    def note_prefill(self, token_count: int, duration_s: float, now_s: float) -> None:
        """An engine step that computed so many tokens of prompts, and little else. now_s: of any clock."""
        self.prefill.note(token_count, duration_s, now_s)

    def note_load(self, size_bytes: int, duration_s: float, estimated_ms: float, queued_bytes: int = 0) -> None:
        """A load that came in whole. duration_s: from its decision until the engine knew of its end.

        estimated_ms: without the loads before it, which had queued_bytes; 0 if there was no estimate. The first load of
        a process connects and maps: it says nothing of later ones. Nonsense is ignored.
        """
        if size_bytes <= 0 or not 0 < duration_s < inf:
            return
        if not self.warmed_up:
            self.warmed_up = True
            return
        if estimated_ms:
            expected_ms = estimated_ms + self._queue_ms(queued_bytes)
            self._note_error(duration_s * 1e3, expected_ms)
        self.load_bytes_per_s = _mixed(self.load_bytes_per_s, (queued_bytes + size_bytes) / duration_s)

    def passed_over(self, now_s: float) -> None:
        """Loads were to be had and computing was taken to be quicker. now_s: of the same clock."""
        self.passes += 1
        if now_s - self.doubted_at_s >= self.patience <= self.passes:
            self.doubted_at_s, self.passes = now_s, 0
            self.belief = max(_BELIEF_LEAST, _BELIEF * self.belief)

    def load_begun(self) -> None:
        """A load that was taken to be quicker has begun: it shows what is true."""
        self.patience = min(2 * self.patience, _PATIENCE_MAX) if self.belief < 1.0 else _PATIENCE
        self._on_trial |= self.belief < 1.0
        self.belief = 1.0

    def _note_error(self, measured_ms: float, expected_ms: float) -> None:
        if self._on_trial:
            self._errors.clear()
            self._on_trial = False
        self._errors.append((max(0.0, measured_ms - expected_ms), min(1.0, measured_ms / expected_ms)))
        del self._errors[:-_SAMPLES]
        middle, odd = divmod(len(self._errors), 2)
        self.overhead_ms = sorted(overhead_ms for overhead_ms, _ in self._errors)[middle - 1 + odd]
        self.share = sorted(share for _, share in self._errors)[middle]

    def _queue_ms(self, queued_bytes: int) -> float:
        return queued_bytes / (self.load_bytes_per_s or DEFAULT_BYTES_PER_S) * 1e3

    def compute_us_per_token(self, token_count: int) -> float:
        """That each of so many tokens costs if it is computed; 0 if not known."""
        return self.prefill.saved_ms(token_count) * 1e3 / token_count if token_count > 0 else 0.0

    def load_ms(self, run: LoadRun) -> float:
        """Without the overhead, which a load has once. 0 if nothing is known of any: it is tried, as nothing else would
        ever measure it."""
        if run.estimated_ms or not self.load_bytes_per_s:
            return self.share * run.estimated_ms
        return run.size_bytes / self.load_bytes_per_s * 1e3

    def worthwhile_chunks(self, runs: Sequence[LoadRun], queued_bytes: int = 0) -> int:
        """How many leading chunks to load, so that the time gained over computing them is greatest; 0: none.

        queued_bytes: of loads that have begun and will come before.
        """
        if queued_bytes < 0:
            raise InvalidRequest(f"queued_bytes must be >= 0, got {queued_bytes}")
        if not self.prefill.known:
            return sum(run.chunk_count for run in runs)
        queue_ms, loads_ms, best_gain_ms = self._queue_ms(queued_bytes), self.overhead_ms, 0.0
        tokens = chunks = best_chunks = 0
        for run in runs:
            chunks, tokens = chunks + run.chunk_count, tokens + run.token_count
            loads_ms += self.load_ms(run)
            gain_ms = _MARGIN * self.prefill.saved_ms(tokens) - queue_ms - self.belief * loads_ms
            if gain_ms > best_gain_ms:
                best_chunks, best_gain_ms = chunks, gain_ms
        return best_chunks

    def chunks_to_learn_from(self, runs: Sequence[LoadRun], rest_tokens: int) -> int:
        """How many of the last chunks of runs that are worth a load to compute all the same, as nobody knows whether
        computing so many tokens is not quicker still: as many as take no longer than the load, at most. Where that
        brings nothing, and prefills look as if they took the same however many their tokens, it may be a few loads.

        rest_tokens: that are computed after the runs in any case.
        """
        tokens, chunks = sum(run.token_count for run in runs), sum(run.chunk_count for run in runs)
        if not self.prefill.known or tokens <= self.prefill.measured_tokens:
            return 0
        loads_ms = self.overhead_ms + sum(self.load_ms(run) for run in runs)
        if self.prefill.saved_at_least_ms(tokens) >= loads_ms:
            return 0
        chunk_tokens, chunk_ms = tokens / chunks, self.prefill.saved_ms(tokens) / chunks
        least = ceil((_GROWTH * self.prefill.measured_tokens - rest_tokens) / chunk_tokens)
        most = int(_GROWTH_MAX * max(self.prefill.measured_tokens, LEAST_TOKENS) / chunk_tokens)
        affordable = int(loads_ms / chunk_ms)
        promising = self.prefill.looks_fixed or self.prefill.measured_tokens <= chunk_tokens  # else only a rest was
        if promising and least * chunk_ms <= _GROWTH_LOADS * loads_ms:
            affordable = max(affordable, least)
        learnt = min(chunks, affordable, most)
        return learnt if learnt >= least else 0

    def deadline_s(self, token_count: int, lowest_s: float, otherwise_s: float) -> float:
        """How long a load may take: as computing would, lowest_s at least; otherwise_s as long as that is unknown."""
        if not self.prefill.known:
            return otherwise_s
        return max(lowest_s, self.prefill.ms(token_count) / 1e3)


def leading(runs: Sequence[LoadRun], chunk_count: int) -> list[LoadRun]:
    """The first so many chunks of runs; the last run of them may be a part of one."""
    taken, left = [], chunk_count
    for run in runs:
        count = min(left, run.chunk_count)
        if count <= 0:
            break
        share = count / run.chunk_count
        tokens, size_bytes = round(run.token_count * share), round(run.size_bytes * share)
        taken.append(run if share == 1 else LoadRun(count, tokens, size_bytes, run.estimated_ms * share))
        left -= count
    return taken


def estimate_ms(runs: Sequence[LoadRun]) -> float:
    """Of all runs; 0 if there is none for some."""
    return sum(run.estimated_ms for run in runs) if all(run.estimated_ms for run in runs) else 0.0


def _mixed(known: float, sample: float) -> float:
    return sample if not known else known + _SAMPLE_WEIGHT * (sample - known)
