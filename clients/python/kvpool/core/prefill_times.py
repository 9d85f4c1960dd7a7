"""How long an engine takes to compute tokens: a fixed part and a part for each token, of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

_SAMPLES = 5  # of one size, the newest
_GOOD_FOR_S = 600.0  # then a size that was not computed again is forgotten: the machine may do other things by now
# Sizes nearer to each other than this do not tell the fixed part from the other: their difference is noise.
_SPAN = 4
LEAST_TOKENS = 32
"""A pass for fewer takes about as long, as it reads all weights: it says nothing of the time for one of them."""
_FLAT = 0.5  # times that grow less than this share of what their tokens do have more of a fixed part than of the other
_DOUBT = 0.25  # of the time for a token, as much may be noise


@dataclass(slots=True)
class PrefillTimes:
    """Samples by size, each power of two for itself: however many short prompts come, long ones are not forgotten.

    Of one size the median counts, and no size is taken to last longer than a larger one: what disturbs a prefill makes
    it longer, never shorter. The very first sample counts only until there is another, as it loads and compiles.

    fixed_ms:         of any prefill, however few its tokens. 0 as long as sizes are too much alike to tell.
    ms_per_token:     beside it, up to `measured_tokens`; 0 if nothing was measured.
    looks_fixed:      whether of two sizes the larger one took hardly longer.
    measured_tokens:  of the largest size. More tokens may take the time of several such prefills.
    """

    fixed_ms: float = 0.0
    ms_per_token: float = 0.0
    measured_tokens: int = 0
    looks_fixed: bool = False
    _spans: bool = False
    _first: tuple[int, float] | None = None
    _samples: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # (tokens, ms) by size, oldest first
    _noted_at_s: dict[int, float] = field(default_factory=dict)  # by size

    def note(self, token_count: int, duration_s: float, now_s: float) -> None:
        """So many tokens were computed, and little else. now_s: of any clock; nonsense is ignored."""
        if token_count <= 0 or not 0 < duration_s < inf:
            return
        size, sample = token_count.bit_length(), (token_count, duration_s * 1e3)
        if self._first is not None:
            self._drop(self._first)
            self._first = None
        elif not self._samples:
            self._first = sample
        samples = self._samples.setdefault(size, [])
        samples.append(sample)
        del samples[:-_SAMPLES]
        self._noted_at_s[size] = now_s
        for old in [size for size, noted_at_s in self._noted_at_s.items() if now_s - noted_at_s > _GOOD_FOR_S]:
            del self._samples[old], self._noted_at_s[old]
        self._fit()

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self.measured_tokens > 0

    def ms(self, token_count: int) -> float:
        """Of a prefill, at most; 0 if nothing was measured."""
        if not self.known:
            return 0.0
        return self.fixed_ms + self.saved_ms(token_count)

    def saved_ms(self, token_count: int) -> float:
        """That a prefill is shorter, at most, for so many tokens that it need not compute: what it has to compute in
        any case costs the fixed part."""
        share = max(1.0, token_count / max(1, self.measured_tokens))
        return self.ms_per_token * token_count + self.fixed_ms * (share - 1.0)

    def saved_at_least_ms(self, token_count: int) -> float:
        """The same, as little as the measurements allow: more than was measured may cost nothing but the fixed part."""
        if token_count <= self.measured_tokens:
            return self.saved_ms(token_count)
        if not self._spans:
            return 0.0
        doubt = _DOUBT * (self.fixed_ms / self.measured_tokens + self.ms_per_token)
        return max(0.0, self.ms_per_token - doubt) * token_count

    def _drop(self, sample: tuple[int, float]) -> None:
        size = sample[0].bit_length()
        self._samples.pop(size, None)
        self._noted_at_s.pop(size, None)

    def _fit(self) -> None:
        points, least_ms = [], float("inf")
        for size in sorted(self._samples, reverse=True):
            token_count, duration_ms = _median(self._samples[size])
            least_ms = min(least_ms, duration_ms)
            points.append((token_count, least_ms))
        self.measured_tokens = points[0][0]
        (most_tokens, most_ms), (fewest_tokens, fewest_ms) = points[0], points[-1]
        self._spans = most_tokens >= _SPAN * fewest_tokens
        self.looks_fixed = len(points) > 1 and most_ms - fewest_ms < _FLAT * fewest_ms * (
            most_tokens / fewest_tokens - 1
        )
        if self._spans:
            self.fixed_ms, self.ms_per_token = _line(points)
        else:
            self.fixed_ms, self.ms_per_token = 0.0, points[0][1] / max(points[0][0], LEAST_TOKENS)


def _median(samples: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """The lower one of the times for a token."""
    return sorted(samples, key=lambda sample: sample[1] / sample[0])[(len(samples) - 1) // 2]


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fixed part and slope with the least squares, neither below 0, nor the fixed part above any point."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    fixed = min(max(0.0, mean_y - slope * mean_x), *(y for _, y in points))
    through_fixed = sum(x * (y - fixed) for x, y in points) / sum(x * x for x, _ in points)
    return fixed, through_fixed
