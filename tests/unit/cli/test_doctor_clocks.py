"""Clocks of other machines are judged by when they were asked, however long that took."""

from __future__ import annotations

import pytest

from kvpool_cli.doctor.clocks import lead_s


@pytest.mark.parametrize(
    ("began_s", "ended_s", "ahead_s"),
    [
        (1_000.0, 1_009.0, 0.0),  # it, or we, stood still
        (1_003.0, 1_003.0, 0.0),
        (1_000.0, 1_000.5, 2.5),
        (1_006.0, 1_007.0, -3.0),
    ],
)
def test_an_answer_that_took_long_is_no_clock_that_is_off(began_s: float, ended_s: float, ahead_s: float) -> None:
    assert lead_s(1_003.0, 1_003.0, began_s=began_s, ended_s=ended_s) == ahead_s


def test_a_clock_of_whole_seconds_may_be_anywhere_in_one() -> None:
    assert lead_s(1_003.0, 1_004.0, began_s=1_003.9, ended_s=1_003.9) == 0.0
    assert lead_s(1_003.0, 1_004.0, began_s=1_005.0, ended_s=1_005.5) == -1.0
