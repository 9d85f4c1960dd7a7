"""Whether loading a prefix is quicker than computing it, from moving averages of what both took.

load_ms    = latency_ms + (queued bytes + own bytes) / bandwidth of their source
compute_ms = tokens / prefill speed
load, if load_ms < 0.9 * compute_ms, or something of both is not known yet, or it is time to try again,
or the link would copy it in less than half of compute_ms, in less than compute_ms with the latency (at most 20 ms of
it), and copies lately reached a quarter of its speed
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from kvpool.core.errors import InvalidRequest

_WEIGHT = 0.3  # of the newest sample
_MARGIN = 0.9  # loading has to take less than this share of the time of computing
_LINK_SHARE, _HEALTHY_SHARE = 0.5, 0.25  # of computing, and of the link's speed
_LATENCY_MAX_MS = 20.0  # what a load has taken beyond its copy and this is a queue's or a busy machine's
_TRIAL_COUNT, _TRIAL_S = 32, 10.0  # times that something was passed over, and seconds, after which it is tried
_PREFILL_TOKENS = 256  # a smaller step takes about as long as one of these: it counts until there was a larger one
_SIZES = 2  # a load of at most so many times the size of those that were measured is taken to be as fast
_TIMEOUT_MIN_S, _TIMEOUT_LOADS, _TIMEOUT_COMPUTES = 1.0, 4.0, 2.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Consecutive chunks from one source. token_count: to be computed otherwise."""

    chunk_count: int
    token_count: int
    size_bytes: int
    source: Hashable = None


class Average:
    """A moving average of medians of three: a single sample that is far off changes nothing. What disturbs a
    measurement makes it worse, so of two the better one counts."""

    def __init__(self, *, larger_is_better: bool = False) -> None:
        self.value: float | None = None
        self._larger_is_better = larger_is_better
        self._last: list[float] = []

    def note(self, sample: float) -> None:
        """Nonsense is ignored."""
        if not isfinite(sample) or sample < 0:
            return
        self._last = [*self._last[-2:], sample]
        ranked = sorted(self._last, reverse=self._larger_is_better)
        middle = ranked[(len(ranked) - 1) // 2]
        self.value = middle if self.value is None else self.value + _WEIGHT * (middle - self.value)

    def restart(self) -> None:
        """The next sample replaces all earlier ones, however far off."""
        self.value, self._last = None, []


@dataclass(slots=True)
class Trials:
    """Whether it is time to try what estimates speak against: they may be of long ago. since_s: of any clock; None:
    from the first time that it is passed over."""

    since_s: float | None = None
    _count: int = 0

    def is_due(self, now_s: float) -> bool:
        """Count that it would be passed over once more."""
        self._count += 1
        if self.since_s is None:
            self.since_s = now_s
        return self._count >= _TRIAL_COUNT or now_s - self.since_s >= _TRIAL_S

    def restart(self, since_s: float | None = None) -> None:
        """It was tried."""
        self._count, self.since_s = 0, since_s


@dataclass(slots=True)
class _Source:
    """bytes_per_s: from the moment that copying could begin. largest_bytes: of the loads that it was measured with."""

    bytes_per_s: Average = field(default_factory=lambda: Average(larger_is_better=True))
    largest_bytes: int = 0

    def note(self, size_bytes: int, copy_s: float) -> None:
        """Small loads are mostly latency: they do not count beside larger ones."""
        if size_bytes > _SIZES * self.largest_bytes:
            self.bytes_per_s.restart()
        if _SIZES * size_bytes >= self.largest_bytes:
            self.bytes_per_s.note(size_bytes / copy_s)
            self.largest_bytes = max(self.largest_bytes, size_bytes)

    def copy_ms(self, size_bytes: int) -> float | None:
        """None for more than was measured: how fast that is, only a load of that size shows."""
        speed = self.bytes_per_s.value
        return size_bytes / speed * 1e3 if speed and size_bytes <= _SIZES * self.largest_bytes else None


@dataclass(slots=True)
class LoadCost:
    """Of one engine. Knows nothing at first: then what can be loaded is loaded, and timeouts bound the wait.

    latency_ms:   from the decision to load until the engine knows of the end, without copying.
    tokens_per_s: of steps that compute prompts and little else.
    link_bytes_per_s: of plain copies from this host's memory; 0 if not known. local_sources: what comes from there, or
                  by a link that is not slower.
    """

    latency_ms: Average = field(default_factory=Average)
    tokens_per_s: Average = field(default_factory=lambda: Average(larger_is_better=True))
    link_bytes_per_s: float = 0.0
    local_sources: Sequence[Hashable] = ()
    _sources: dict[Hashable, _Source] = field(default_factory=dict)
    _large_steps: bool = False
    _warmed_up: set[Hashable] = field(default_factory=set)  # sources
    _on_trial: bool = False
    _declined: Trials = field(default_factory=Trials)

    def note_prefill(self, token_count: int, duration_s: float) -> None:
        """A step computed so many tokens of prompts, and little else."""
        large = token_count >= _PREFILL_TOKENS
        if token_count <= 0 or not 0 < duration_s < inf or (self._large_steps and not large):
            return
        if large and not self._large_steps:
            self.tokens_per_s.restart()
            self._large_steps = True
        self.tokens_per_s.note(token_count / duration_s)

    def note_load(
        self, source: Hashable, size_bytes: int, duration_s: float, *, copy_s: float = 0.0, queued_bytes: int = 0
    ) -> None:
        """A load that came in whole from one source, after queued_bytes of others. duration_s: from its decision until
        the engine knew of its end; copy_s: that its copying took, 0 if that was not seen. The first load from a source
        connects and maps: it says nothing of later ones."""
        if size_bytes <= 0 or not 0 < duration_s < inf or not 0 <= copy_s < inf:
            return
        if source not in self._warmed_up:
            self._warmed_up.add(source)
            return
        if self._on_trial:
            self._on_trial = False
            self._sources.pop(source, None)
            self.latency_ms.restart()
        known, whole_bytes = self._sources.setdefault(source, _Source()), queued_bytes + size_bytes
        if copy_s > 0:
            known.note(size_bytes, copy_s)
        else:
            latency_s = (self.latency_ms.value or 0.0) / 1e3
            known.note(whole_bytes, max(duration_s - latency_s, duration_s / 2))
        self.latency_ms.note(max(0.0, duration_s * 1e3 - (known.copy_ms(whole_bytes) or 0.0)))

    def compute_ms(self, token_count: int) -> float | None:
        """None if not known."""
        speed = self.tokens_per_s.value
        return token_count / speed * 1e3 if speed else None

    def load_ms(self, runs: Sequence[LoadRun], queued_bytes: int = 0) -> float | None:
        """None if not known."""
        load_ms = self.latency_ms.value or 0.0
        by_source: dict[Hashable, int] = {}
        for run in runs:
            by_source[run.source] = by_source.get(run.source, queued_bytes if not by_source else 0) + run.size_bytes
        for source, size_bytes in by_source.items():
            copy_ms = self._sources.get(source, _Source()).copy_ms(size_bytes)
            if copy_ms is None:
                return None
            load_ms += copy_ms
        return load_ms

    def can_pay(self, token_count: int) -> bool:
        """Whether loading so many tokens could be quicker than computing them, however few bytes they are."""
        compute_ms = self.compute_ms(token_count)
        return compute_ms is None or self._least_ms < _MARGIN * compute_ms

    def chunks_to_load(self, runs: Sequence[LoadRun], queued_bytes: int = 0) -> int:
        """How many leading chunks to load, whole runs, so that most time is gained; 0: none.

        queued_bytes: of loads that come before.
        """
        if queued_bytes < 0:
            raise InvalidRequest(f"queued_bytes must be >= 0, got {queued_bytes}")
        best, best_gain_ms = 0, 0.0
        for count in range(1, len(runs) + 1):
            load_ms = self.load_ms(runs[:count], queued_bytes)
            compute_ms = self.compute_ms(sum(run.token_count for run in runs[:count]))
            gain_ms = inf if load_ms is None or compute_ms is None else _MARGIN * compute_ms - load_ms
            if gain_ms > 0 and gain_ms >= best_gain_ms:
                best, best_gain_ms = count, gain_ms
        return sum(run.chunk_count for run in runs[: max(best, self._runs_of_link(runs))])

    def _runs_of_link(self, runs: Sequence[LoadRun]) -> int:
        """Leading runs that the link would bring in half of the time of computing them: what else a load took lately,
        a busy machine or a queue, must not keep an engine from loads that pay. Computing has a queue, too: what one
        request computes all others wait for, while loads hold up nothing. What every load takes counts all the same."""
        if not self.link_bytes_per_s:
            return 0
        count = size_bytes = tokens = 0
        for number, run in enumerate(runs, 1):
            speed = self._sources.get(run.source, _Source()).bytes_per_s.value
            slow = speed is not None and speed < _HEALTHY_SHARE * self.link_bytes_per_s
            if run.source not in self.local_sources or slow:
                break
            size_bytes, tokens = size_bytes + run.size_bytes, tokens + run.token_count
            link_ms = size_bytes / self.link_bytes_per_s * 1e3
            compute_ms = self.compute_ms(tokens) or 0.0
            if link_ms < _LINK_SHARE * compute_ms and link_ms + self._least_ms < compute_ms:
                count = number
        return count

    @property
    def _least_ms(self) -> float:
        """What a load of no bytes takes on a machine with nothing else to do."""
        return min(self.latency_ms.value or 0.0, _LATENCY_MAX_MS)

    def tries_declined(self, now_s: float) -> bool:
        """A load was declined. Whether to do it all the same, as the last one was long ago: it replaces what is known.

        now_s: of any clock.
        """
        if not self._declined.is_due(now_s):
            return False
        self._on_trial = True
        self.load_begun()
        return True

    def load_begun(self) -> None:
        """A load shows how long loads take."""
        self._declined.restart()

    def timeout_s(self, load_ms: float | None, compute_ms: float | None, unknown_s: float) -> float:
        """For a load: generous, as one that is late but comes before computing would have ended is of use. unknown_s:
        as long as not both are known."""
        if load_ms is None or compute_ms is None:
            return unknown_s
        return max(_TIMEOUT_MIN_S, _TIMEOUT_LOADS * load_ms / 1e3, _TIMEOUT_COMPUTES * compute_ms / 1e3)


def leading(runs: Sequence[LoadRun], chunk_count: int) -> list[LoadRun]:
    """The first so many chunks of runs; the last run of them may be a part of one."""
    taken, left = [], chunk_count
    for run in runs:
        count = min(left, run.chunk_count)
        if count <= 0:
            break
        share = count / run.chunk_count
        tokens, size_bytes = round(run.token_count * share), round(run.size_bytes * share)
        taken.append(run if share == 1 else LoadRun(count, tokens, size_bytes, run.source))
        left -= count
    return taken
