"""Whether loading a prefix is quicker than computing it, and how much of it to load. Learns from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.core.errors import InvalidRequest

DEFAULT_BYTES_PER_S = 1e9
"""Of loads that have begun, until one was measured: little for any medium that is worth a cache."""
_SAMPLE_WEIGHT = 0.3  # of the newest measurement
_MARGIN = 0.9  # loading has to take less than this share of the time of computing
# Loads that were measured slow are not slow for ever: as long as they are passed over, it is believed less and less.
_FORGET = 0.9
_FORGET_EVERY_S = 1.0


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

    compute_ms_per_token: of prefills; 0 if none was measured.
    load_bytes_per_s:     of whole loads after the first, as the engine saw them; 0 if none was measured.
    overhead_ms:          of a load beyond its bytes: until it begins, and until the engine has noticed its end.
    """

    compute_ms_per_token: float = 0.0
    load_bytes_per_s: float = 0.0
    overhead_ms: float = 0.0
    warmed_up: bool = False
    forgot_at_s: float | None = None

    def note_prefill(self, token_count: int, duration_s: float) -> None:
        """An engine step that computed so many tokens of prompts, and little else."""
        if token_count > 0 and duration_s > 0:
            self.compute_ms_per_token = _mixed(self.compute_ms_per_token, duration_s * 1e3 / token_count)

    def note_load(self, size_bytes: int, duration_s: float, estimated_ms: float, queued_bytes: int = 0) -> None:
        """A load that came in whole. duration_s: from its decision until the engine knew of its end.

        estimated_ms: without the loads before it, which had queued_bytes; 0 if there was no estimate. The first load of
        a process connects and maps: it says nothing of later ones.
        """
        if size_bytes <= 0 or duration_s <= 0:
            return
        if not self.warmed_up:
            self.warmed_up = True
            return
        if estimated_ms:
            expected_ms = estimated_ms + self._queue_ms(queued_bytes)
            self.overhead_ms = _mixed(self.overhead_ms, max(0.0, duration_s * 1e3 - expected_ms))
        self.load_bytes_per_s = _mixed(self.load_bytes_per_s, (queued_bytes + size_bytes) / duration_s)

    def passed_over(self, now_s: float) -> None:
        """Loads were to be had and computing was taken to be quicker. now_s: of any clock."""
        if self.forgot_at_s is not None and now_s - self.forgot_at_s < _FORGET_EVERY_S:
            return
        self.forgot_at_s = now_s
        self.overhead_ms *= _FORGET
        if self.load_bytes_per_s < DEFAULT_BYTES_PER_S:
            self.load_bytes_per_s /= _FORGET

    def _queue_ms(self, queued_bytes: int) -> float:
        return queued_bytes / (self.load_bytes_per_s or DEFAULT_BYTES_PER_S) * 1e3

    def compute_ms(self, token_count: int) -> float:
        """0 if not known."""
        return self.compute_ms_per_token * token_count

    def load_ms(self, run: LoadRun) -> float:
        """Without the overhead, which a load has once. 0 if nothing is known of any: it is tried, as nothing else would
        ever measure it."""
        if run.estimated_ms or not self.load_bytes_per_s:
            return run.estimated_ms
        return run.size_bytes / self.load_bytes_per_s * 1e3

    def worthwhile_chunks(self, runs: Sequence[LoadRun], queued_bytes: int = 0) -> int:
        """How many leading chunks to load, so that the time gained over computing them is greatest; 0: none.

        queued_bytes: of loads that have begun and will come before.
        """
        if queued_bytes < 0:
            raise InvalidRequest(f"queued_bytes must be >= 0, got {queued_bytes}")
        if not self.compute_ms_per_token:
            return sum(run.chunk_count for run in runs)
        gain_ms, best_gain_ms = -(self.overhead_ms + self._queue_ms(queued_bytes)), 0.0
        chunks = best_chunks = 0
        for run in runs:
            chunks += run.chunk_count
            gain_ms += _MARGIN * self.compute_ms(run.token_count) - self.load_ms(run)
            if gain_ms > best_gain_ms:
                best_chunks, best_gain_ms = chunks, gain_ms
        return best_chunks

    def deadline_s(self, token_count: int, lowest_s: float, otherwise_s: float) -> float:
        """How long a load may take: as computing would, lowest_s at least; otherwise_s as long as that is unknown."""
        if not self.compute_ms_per_token:
            return otherwise_s
        return max(lowest_s, self.compute_ms(token_count) / 1e3)


def _mixed(known: float, sample: float) -> float:
    return sample if not known else known + _SAMPLE_WEIGHT * (sample - known)
