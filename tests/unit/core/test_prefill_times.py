"""The fixed part of a prefill is told from the part for each token, whatever disturbs the measurements."""

import random
from math import inf, nan

import pytest

from kvpool.core.prefill_times import PrefillTimes


def measured(*samples: tuple[int, float], at_s: float = 0.0) -> PrefillTimes:
    """samples: (tokens, milliseconds), in order."""
    times = PrefillTimes()
    for tokens, duration_ms in samples:
        times.note(tokens, duration_ms / 1e3, at_s)
    return times


def test_nothing_is_known_at_first() -> None:
    times = PrefillTimes()
    assert not times.known
    assert (times.ms(100), times.saved_ms(100), times.saved_at_least_ms(100)) == (0, 0, 0)


@pytest.mark.parametrize("sample", [(0, 1.0), (-1, 1.0), (10, 0.0), (10, -1.0), (10, nan), (10, inf)])
def test_samples_of_nothing_are_ignored(sample: tuple[int, float]) -> None:
    assert measured(sample) == PrefillTimes()


def test_one_size_alone_is_taken_as_proportional_and_may_be_all_fixed() -> None:
    times = measured((500, 100.0))
    assert times.ms(1000) == pytest.approx(200)
    assert times.saved_ms(1000) == pytest.approx(200)
    assert times.saved_at_least_ms(500) == pytest.approx(100)
    assert times.saved_at_least_ms(501) == 0


def test_a_handful_of_tokens_does_not_say_what_one_costs() -> None:
    assert measured((1, 16.0)).saved_ms(1000) == pytest.approx(500)


@pytest.mark.parametrize("fixed_ms", [0.0, 20.0])
@pytest.mark.parametrize("ms_per_token", [0.0, 0.02, 5.0])
def test_both_parts_are_found(fixed_ms: float, ms_per_token: float) -> None:
    if not fixed_ms + ms_per_token:
        return
    times = measured(*((tokens, fixed_ms + ms_per_token * tokens) for tokens in (7, 30, 60, 300, 2000)))
    assert times.fixed_ms == pytest.approx(fixed_ms, abs=1e-6)
    assert times.ms_per_token == pytest.approx(ms_per_token, abs=1e-9)
    assert times.ms(1500) == pytest.approx(fixed_ms + 1500 * ms_per_token)
    assert times.saved_ms(1500) == pytest.approx(1500 * ms_per_token, abs=1e-6)
    # Engines cut long prompts into steps of the largest size.
    assert times.ms(20_000) == pytest.approx(10 * (fixed_ms + 2000 * ms_per_token))


def test_sizes_that_are_much_alike_do_not_tell_the_parts() -> None:
    times = measured((1, 1.0), (1900, 2000.0), (2100, 2010.0), (2500, 2100.0))
    assert times.fixed_ms == 0
    assert times.saved_ms(1500) == pytest.approx(1500 * 2100 / 2500)


def test_what_grows_with_the_square_has_no_negative_part() -> None:
    times = measured(*((tokens, tokens + tokens**2 / 1000) for tokens in (1, 100, 1000, 10_000)))
    assert times.fixed_ms == 0
    assert times.saved_ms(10_000) == pytest.approx(110_000, rel=0.05)


def test_the_first_prefill_of_a_process_counts_until_there_is_another() -> None:
    times = measured((2000, 5000.0))
    assert times.ms(2000) == pytest.approx(5000)
    times.note(40, 0.020, 1.0)
    assert times.measured_tokens == 40


def test_disturbed_samples_do_no_lasting_harm() -> None:
    times = measured((1, 1.0), (40, 900.0), (300, 22.0), (2000, 30.0))
    assert times.saved_ms(2000) < 30, "a small prefill takes no longer than a large one"
    times = measured((1, 1.0), (40, 20.0), *((2000, duration_ms) for duration_ms in (9e3, 30.0, 29.0, 8e3, 31.0)))
    assert times.ms(2000) == pytest.approx(30, rel=0.05)


def test_noise_never_makes_it_absurd() -> None:
    noise = random.Random(3)
    for _ in range(300):
        times = PrefillTimes()
        for number in range(noise.randrange(1, 40)):
            tokens = noise.randrange(1, 1 << noise.randrange(1, 15))
            times.note(tokens, noise.uniform(0.001, 2.0), float(number))
        for tokens in (1, 100, 10_000, 1_000_000):
            assert 0 <= times.saved_at_least_ms(tokens) <= times.saved_ms(tokens) + 1e-6
            assert times.saved_ms(tokens) <= times.ms(tokens)
        assert times.ms(times.measured_tokens) <= 4000


def test_long_prompts_are_not_forgotten_over_short_ones() -> None:
    times = measured((1, 1.0), (40, 20.0), (2000, 20.0), *[(40, 20.0)] * 1000)
    assert times.measured_tokens == 2000


def test_measurements_fade() -> None:
    times = measured(*[(1000, 1000.0)] * 30, *[(1000, 100.0)] * 3)
    assert times.ms(1000) == pytest.approx(100)


def test_a_size_that_was_not_computed_for_long_is_forgotten() -> None:
    times = measured((1, 1.0), (2000, 5000.0))
    times.note(40, 0.020, 590.0)
    assert times.measured_tokens == 2000
    times.note(40, 0.020, 610.0)
    assert times.measured_tokens == 40
