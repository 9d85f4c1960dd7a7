"""Many measured values in little memory: counts in buckets that grow by one per cent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

_GROWTH = 1.01  # a percentile is off by half of that at most
_SMALLEST = 1e-6  # what is below counts as this: a microsecond, where values are seconds
_LOG_GROWTH = math.log(_GROWTH)
_LARGEST_BUCKET = 4_000  # 1e-6 * 1.01 ** 4000 is above 1e11
PERCENTILES = (50, 90, 99)


class Distribution:
    """Values >= 0. Count, mean, smallest and largest are exact; memory is bounded whatever is added."""

    __slots__ = ("_buckets", "_maximum", "_minimum", "_sum", "count")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self._sum = 0.0
        self._minimum = math.inf
        self._maximum = 0.0

    def add(self, value: float) -> None:
        """One value; what is negative, as rounding can make it, counts as 0."""
        value = max(0.0, value)
        bucket = math.ceil(math.log(value / _SMALLEST) / _LOG_GROWTH) if value > _SMALLEST else 0
        bucket = min(bucket, _LARGEST_BUCKET)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self._sum += value
        self._minimum = min(self._minimum, value)
        self._maximum = max(self._maximum, value)

    @property
    def mean(self) -> float:
        """0 where there is nothing."""
        return self._sum / self.count if self.count else 0.0

    @property
    def minimum(self) -> float:
        """0 where there is nothing."""
        return self._minimum if self.count else 0.0

    @property
    def maximum(self) -> float:
        """0 where there is nothing."""
        return self._maximum

    def percentile(self, percent: float) -> float:
        """The smallest value that at least `percent` of all do not exceed (nearest rank); 0 where there is nothing."""
        rank = max(1, math.ceil(self.count * percent / 100))
        if rank >= self.count:
            return self.maximum  # the last value is known exactly
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(max(_middle(bucket), self.minimum), self.maximum)
        return self.maximum

    def steps(self) -> Iterator[tuple[float, float]]:
        """(value, share of all that do not exceed it), ascending: the cumulative distribution."""
        if not self.count:
            return
        yield self.minimum, 0.0
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            yield min(max(_middle(bucket), self.minimum), self.maximum), seen / self.count

    def to_document(self) -> dict[str, Any]:
        """What `from_document` reads; percentiles are there for people and other programs."""
        document: dict[str, Any] = {
            "count": self.count,
            "mean": self.mean,
            "min": self.minimum,
            "max": self.maximum,
            **{f"p{percent}": self.percentile(percent) for percent in PERCENTILES},
        }
        document["buckets"] = {str(bucket): self._buckets[bucket] for bucket in sorted(self._buckets)}
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Distribution:
        """Raises ValueError, KeyError, TypeError or AttributeError where it is none."""
        made = cls()
        made._buckets = {int(bucket): int(count) for bucket, count in document["buckets"].items()}
        if any(not 0 <= bucket <= _LARGEST_BUCKET or count < 1 for bucket, count in made._buckets.items()):
            raise ValueError("a bucket is out of range")
        made.count = sum(made._buckets.values())
        made._sum = float(document["mean"]) * made.count
        if made.count:
            made._minimum, made._maximum = float(document["min"]), float(document["max"])
        return made


def _middle(bucket: int) -> float:
    return _SMALLEST * _GROWTH ** (bucket - 0.5) if bucket else _SMALLEST
