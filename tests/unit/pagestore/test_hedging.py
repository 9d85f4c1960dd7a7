"""When a slow pull is started again elsewhere."""

from __future__ import annotations

from kvpool_pagestore.engine.pulls import HedgeDelay


def test_without_experience_the_least_delay_counts() -> None:
    assert HedgeDelay(0.2, 5.0).delay_s == 0.2
    assert not HedgeDelay(0.0, 5.0).enabled


def test_the_hedge_delay_follows_slow_pages_within_a_bound() -> None:
    delay = HedgeDelay(0.2, 5.0)
    for number in range(100):
        delay.note(0.5 if number % 10 else 1.0)
    assert delay.delay_s == 2.0  # twice the 95th percentile
    for _ in range(200):
        delay.note(60.0)
    assert delay.delay_s == 5.0
    for _ in range(200):
        delay.note(0.001)
    assert delay.delay_s == 0.2


def test_a_rare_outlier_does_not_count() -> None:
    delay = HedgeDelay(0.1, 5.0)
    for number in range(100):
        delay.note(3.0 if number == 50 else 0.2)
    assert delay.delay_s == 0.4
