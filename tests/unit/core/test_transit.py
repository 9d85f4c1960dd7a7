"""Delays of messages, by clocks that know nothing of each other."""

from __future__ import annotations

import pytest

from kvpool.client.watch import Transit


def test_what_waited_is_as_old_as_it_is_also_if_it_is_the_first() -> None:
    transit = Transit(asked_at_s=1000.0)
    assert transit.delay_s(1.0, 1061.0) == pytest.approx(60.0, abs=0.01)
    assert transit.delay_s(60.9, 1061.0) == pytest.approx(0.1, abs=0.02)


def test_a_message_that_is_taken_up_at_once_has_no_delay_but_what_the_opening_took() -> None:
    transit = Transit(asked_at_s=0.0)
    delays = [transit.delay_s(float(second), second + 0.3) for second in range(1, 3001)]
    assert delays[0] == pytest.approx(0.3, abs=0.001)
    assert max(delays) <= 0.3 and delays[-1] == pytest.approx(0.0, abs=0.001)


@pytest.mark.parametrize("drift", [5e-5, -5e-5])
def test_clocks_that_run_apart_do_not_make_messages_old(drift: float) -> None:
    transit = Transit(asked_at_s=0.0)
    assert max(transit.delay_s(second * (1 + drift), second) for second in range(1, 200_000)) < 0.01


def test_an_hour_of_silence_is_no_excuse() -> None:
    transit = Transit(asked_at_s=0.0)
    for second in range(1, 100):
        transit.delay_s(float(second), float(second))
    assert transit.delay_s(100.0, 3700.0) > 3599.0


def test_a_stream_that_took_long_to_open_is_adrift() -> None:
    transit = Transit(asked_at_s=0.0)
    for second in range(1, 11):
        assert transit.delay_s(float(second), second + 40.0) > 39.0 and not transit.is_adrift
    transit.delay_s(11.0, 51.0)
    assert transit.is_adrift


def test_what_waited_while_its_reader_was_stopped_leaves_no_stream_adrift() -> None:
    transit = Transit(asked_at_s=0.0)
    for second in range(1, 100):
        transit.delay_s(float(second), float(second))
    for second in range(100, 3700):
        transit.delay_s(float(second), 3700.0 + second / 1e3)
        assert not transit.is_adrift
    for second in range(3704, 3730):
        assert transit.delay_s(float(second), float(second)) < 0.5 and not transit.is_adrift
