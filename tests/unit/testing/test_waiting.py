"""The test helpers themselves."""

from __future__ import annotations

import pytest

from kvpool.testing import ManualClock, eventually, eventually_sync


async def test_eventually_returns_the_first_true_value() -> None:
    answers = iter([0, None, "yes"])
    assert await eventually(lambda: next(answers)) == "yes"

    async def later() -> int:
        return next(numbers)

    numbers = iter([0, 7])
    assert await eventually(later) == 7


async def test_eventually_says_what_it_saw_last() -> None:
    with pytest.raises(AssertionError, match=r"lease did not come true within 0\.01 s; last value: 0"):
        await eventually(lambda: 0, deadline_s=0.01, message="lease")


def test_failed_assertions_count_as_not_yet() -> None:
    answers = iter([1, 2])

    def check() -> bool:
        assert next(answers) == 2
        return True

    assert eventually_sync(check)

    def never() -> bool:
        raise AssertionError("inner")

    with pytest.raises(AssertionError) as caught:
        eventually_sync(never, deadline_s=0.01)
    assert str(caught.value.__cause__) == "inner"


def test_manual_clock_moves_only_when_advanced() -> None:
    clock = ManualClock()
    monotonic_s, wall_us = clock.monotonic_s(), clock.wall_us()
    clock.advance(1.5)
    assert (clock.monotonic_s() - monotonic_s, clock.wall_us() - wall_us) == (1.5, 1_500_000)
    clock.jump_wall(-10)
    assert (clock.monotonic_s() - monotonic_s, clock.wall_us() - wall_us) == (1.5, -8_500_000)
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)
