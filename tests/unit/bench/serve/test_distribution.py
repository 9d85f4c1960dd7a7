"""Percentiles beside exact ones, and the way through a document."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.serve.distribution import Distribution


def filled(values: list[float]) -> Distribution:
    made = Distribution()
    for value in values:
        made.add(value)
    return made


def nearest_rank(values: list[float], percent: float) -> float:
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


@example([1.0] * 8 + [870_875.0, 875_317.0], 90)  # the last two are in one bucket
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=300), st.sampled_from([0, 1, 50, 90, 99, 99.9, 100]))
def test_percentiles_are_nearest_rank_within_half_a_per_cent(values: list[float], percent: float) -> None:
    exact = nearest_rank(values, percent)
    assert filled(values).percentile(percent) == pytest.approx(exact, rel=0.0051)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=50))
def test_count_mean_and_ends_are_exact(values: list[float]) -> None:
    made = filled(values)
    assert (made.count, made.minimum, made.maximum) == (len(values), min(values), max(values))
    assert made.mean == pytest.approx(sum(values) / len(values))
    assert made.percentile(100) == max(values)


def test_one_value_is_every_percentile() -> None:
    made = filled([0.25])
    assert [made.percentile(percent) for percent in (1, 50, 99)] == [0.25] * 3


def test_nothing_is_zero_everywhere() -> None:
    made = Distribution()
    assert (made.percentile(50), made.mean, made.minimum, made.maximum, list(made.steps())) == (0, 0, 0, 0, [])


def test_what_is_negative_by_rounding_counts_as_zero() -> None:
    made = filled([-1e-9, 0.0])
    assert (made.minimum, made.maximum, made.percentile(50)) == (0, 0, 0)


def test_memory_does_not_grow_with_values() -> None:
    made = filled([10.0**power * step for power in range(-12, 18) for step in range(1, 500)])
    assert len(json.dumps(made.to_document())) < 80_000
    assert made.count == 30 * 499


@given(st.lists(st.floats(0, 1e9), max_size=100))
def test_a_document_gives_the_same_figures(values: list[float]) -> None:
    made = filled(values)
    read = Distribution.from_document(json.loads(json.dumps(made.to_document())))
    assert read.to_document() == made.to_document() | {"mean": pytest.approx(made.mean)}
    assert list(read.steps()) == list(made.steps())


def test_steps_rise_to_all() -> None:
    steps = list(filled([0.1, 0.2, 0.2, 0.4]).steps())
    assert steps[0] == (0.1, 0.0) and steps[-1] == (0.4, 1.0)
    assert steps == sorted(steps)


@pytest.mark.parametrize("buckets", [{"x": 1}, {"-1": 1}, {"5": 0}, {"5000": 1}, {"5": "many"}, [1], None], ids=repr)
def test_damaged_documents_are_refused(buckets: object) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        Distribution.from_document({"buckets": buckets, "mean": 1, "min": 1, "max": 1})
