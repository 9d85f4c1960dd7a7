"""Retention of token ranges: a chunk takes what keeps it longest."""

from __future__ import annotations

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.core.retention import PINNED_FOREVER_US, Retention, RetentionRange, retention_of_tokens

_SHORT, _LONG = Retention(ttl_ms=5, priority=2), Retention(ttl_ms=50, priority=-1, pinned_until_us=9)
_OTHERWISE = Retention(ttl_ms=1)


def test_a_chunk_that_no_range_touches_has_the_retention_of_the_request() -> None:
    ranges = [RetentionRange(0, 16, _SHORT), RetentionRange(32, 8, _LONG)]
    assert retention_of_tokens(16, 16, ranges, _OTHERWISE) == _OTHERWISE


def test_one_token_speaks_for_its_chunk() -> None:
    assert retention_of_tokens(16, 16, [RetentionRange(31, 1, _SHORT)], _OTHERWISE) == _SHORT
    assert retention_of_tokens(16, 16, [RetentionRange(0, 17, _SHORT)], _OTHERWISE) == _SHORT


def test_of_several_ranges_the_longest_counts_field_by_field() -> None:
    ranges = [RetentionRange(0, 99, _SHORT), RetentionRange(8, 1, _LONG)]
    assert retention_of_tokens(0, 16, ranges, _OTHERWISE) == Retention(ttl_ms=50, priority=2, pinned_until_us=9)
    ranges.append(RetentionRange(0, 1, Retention()))  # no limit is the longest of all
    assert retention_of_tokens(0, 16, ranges, _OTHERWISE).ttl_ms == 0


def test_expiry_never_overflows() -> None:
    assert Retention(ttl_ms=7).expires_us(1000) == 8000
    assert Retention().expires_us(1000) == 0
    assert Retention(ttl_ms=PINNED_FOREVER_US).expires_us(1000) == PINNED_FOREVER_US


@pytest.mark.parametrize(
    ("one", "named"),
    [
        (RetentionRange(-1, 1, Retention()), "range 3.first_token"),
        (RetentionRange(0, 0, Retention()), "range 3.token_count"),
        (RetentionRange(0, 1, Retention(priority=-101)), "range 3.retention.priority"),
    ],
)
def test_a_malformed_range_is_refused_by_name(one: RetentionRange, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        one.check("range 3")
