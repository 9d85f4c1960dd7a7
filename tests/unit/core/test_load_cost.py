"""Load, load a part, or compute."""

from math import inf, nan

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.core.load_cost import Average, LoadCost, LoadRun, leading

MB = 1_000_000


def cost(tokens_per_s: float = 0.0, *loads: tuple[str, int, float]) -> LoadCost:
    """After prefills of that speed and loads of (source, bytes, seconds of copying without any latency)."""
    known = LoadCost()
    if tokens_per_s:
        known.note_prefill(1000, 1000 / tokens_per_s)
    for source in ("here", "there", "far"):
        known.note_load(source, MB, 5.0)  # connects and maps
    for source, size_bytes, seconds in loads:
        known.note_load(source, size_bytes, seconds, copy_s=seconds)
    return known


def run(chunks: int = 1, *, size_bytes: int = MB, source: str = "here", chunk_tokens: int = 128) -> LoadRun:
    return LoadRun(chunks, chunks * chunk_tokens, chunks * size_bytes, source)


def test_what_can_be_loaded_is_loaded_as_long_as_something_is_not_known() -> None:
    assert cost().chunks_to_load([run(3), run(2, source="there")]) == 5
    assert cost(1e6).chunks_to_load([run(3)]) == 3, "the first load says nothing"
    assert cost(0, ("here", 3 * MB, 60.0)).chunks_to_load([run(3)]) == 3


@pytest.mark.parametrize(("load_s", "chunks"), [(0.010, 10), (0.114, 10), (0.116, 0), (0.2, 0)])
def test_a_load_must_take_less_than_nine_tenths_of_computing(load_s: float, chunks: int) -> None:
    known = cost(10_000, ("here", 10 * MB, load_s))  # 1280 tokens: 128 ms
    assert known.chunks_to_load([run(10)]) == chunks


def test_latency_counts_once_and_queued_bytes_come_first() -> None:
    known = cost(10_000)
    known.note_load("here", 100 * MB, 0.120, copy_s=0.100)
    assert known.load_ms([run(10)]) == pytest.approx(20 + 10)
    assert known.load_ms([run(10)], queued_bytes=50 * MB) == pytest.approx(20 + 60)
    known.note_load("here", 10 * MB, 0.080, copy_s=0.0, queued_bytes=50 * MB)
    assert known.latency_ms.value == pytest.approx(20)


def test_a_load_that_is_seen_as_a_whole_only_is_measured_by_its_time_without_latency() -> None:
    known = cost(10_000)
    known.note_load("here", 100 * MB, 0.1)
    for _ in range(8):
        known.note_load("here", MB, 0.031)  # small ones are latency for the most part
    assert known.latency_ms.value == pytest.approx(30, abs=3)
    for _ in range(12):
        known.note_load("here", 100 * MB, 0.1)
    assert known.load_ms([run(100)]) == pytest.approx(100, rel=0.15)


def test_the_first_load_from_each_source_says_nothing() -> None:
    """Of another engine's cache it opens what later ones find open: a fifth of a second."""
    known = cost(10_000, ("here", 10 * MB, 0.001))
    known.note_load("other GPU", 10 * MB, 0.2, copy_s=0.2)
    assert known.chunks_to_load([run(10, source="other GPU")]) == 10
    known.note_load("other GPU", 10 * MB, 0.2, copy_s=0.2)
    assert known.chunks_to_load([run(10, source="other GPU")]) == 0


def test_each_source_has_its_own_speed() -> None:
    known = cost(10_000, ("here", 10 * MB, 0.001), ("far", 10 * MB, 1.0))
    assert known.chunks_to_load([run(4, source="far")]) == 0
    assert known.chunks_to_load([run(4), run(4, source="far")]) == 4, "the fast part of it"
    assert known.chunks_to_load([run(1, source="far", size_bytes=MB // 10), run(9)]) == 10, "what is behind pays for it"


def test_a_large_load_is_not_judged_by_small_ones() -> None:
    """They are latency for the most part: the link that finishes it in half the time is never passed over."""
    known = cost(40_000, ("here", 16 * MB, 0.008))
    assert known.chunks_to_load([run(8, size_bytes=16 * MB)]) == 8
    known.note_load("here", 1000 * MB, 0.030, copy_s=0.020)
    assert known.load_ms([run(10, size_bytes=50 * MB)]) == pytest.approx(10)
    known.note_load("here", 16 * MB, 0.018, copy_s=0.008)
    assert known.load_ms([run(10, size_bytes=50 * MB)]) == pytest.approx(10 + 3)


def test_a_queue_on_a_healthy_link_makes_no_request_compute() -> None:
    """What is computed keeps the GPU from all others, and the loads before it end meanwhile."""
    known = cost(10_000, ("here", 4000 * MB, 0.4))
    known.link_bytes_per_s, known.local_sources = 10e9, ("here", "near")
    assert known.chunks_to_load([run(10)], queued_bytes=4000 * MB) == 10
    known.link_bytes_per_s = 100e9  # copies reach a tenth of it
    assert known.chunks_to_load([run(10)], queued_bytes=4000 * MB) == 0


def knows_latency(latency_s: float) -> LoadCost:
    """Of copies at 10 GB/s and prompts at 40,000 tokens/s."""
    known = cost(40_000)
    for _ in range(8):
        known.note_load("here", 100 * MB, 0.01 + latency_s, copy_s=0.01)
    known.link_bytes_per_s, known.local_sources = 20e9, ("here",)
    return known


@pytest.mark.parametrize(
    ("latency_s", "chunks", "loaded"), [(0.007, 1, 0), (0.007, 2, 0), (0.007, 4, 4), (0.5, 10, 10)]
)
def test_what_is_computed_before_any_load_would_have_ended_is_computed(
    latency_s: float, chunks: int, loaded: int
) -> None:
    """A chunk of 128 tokens takes 3.2 ms; a latency of half a second is that of a busy machine."""
    assert knows_latency(latency_s).chunks_to_load([run(chunks, size_bytes=MB)]) == loaded


def test_no_load_of_few_tokens_can_pay() -> None:
    assert not knows_latency(0.007).can_pay(256)
    assert knows_latency(0.007).can_pay(400)
    assert not knows_latency(0.5).can_pay(256) and knows_latency(0.5).can_pay(1000)
    assert LoadCost().can_pay(1), "nothing is known yet"


def test_one_load_that_stood_still_changes_nothing() -> None:
    known = cost(10_000, *[("here", 10 * MB, 0.01)] * 3)
    known.note_load("here", 10 * MB, 30.0, copy_s=30.0)
    assert known.chunks_to_load([run(10)]) == 10
    known.note_prefill(1000, 100.0)
    assert known.compute_ms(1000) == pytest.approx(100)


def test_averages_follow_what_lasts() -> None:
    average = Average()
    for sample in [10.0] * 5 + [20.0] * 20:
        average.note(sample)
    assert average.value == pytest.approx(20, rel=0.01)
    for nonsense in (nan, inf, -1.0):
        average.note(nonsense)
    assert average.value == pytest.approx(20, rel=0.01)


def test_small_steps_tell_how_fast_prompts_are_computed_only_until_there_are_larger_ones() -> None:
    known = LoadCost()
    known.note_prefill(40, 0.02)
    assert known.compute_ms(4000) == pytest.approx(2000)
    known.note_prefill(4000, 0.1)
    known.note_prefill(40, 0.02)
    assert known.compute_ms(4000) == pytest.approx(100)


def test_declined_loads_are_tried_now_and_then_and_what_comes_of_it_replaces_what_was_known() -> None:
    known = cost(10_000, *[("here", 10 * MB, 10.0)] * 5)
    assert known.chunks_to_load([run(10)]) == 0
    tried = [known.tries_declined(0.1 * number) for number in range(64)]
    assert [number for number, one in enumerate(tried) if one] == [31, 63], "by their number"
    assert [known.tries_declined(now_s) for now_s in (100.0, 105.0, 110.0, 111.0)] == [False, False, True, False]
    known.note_load("here", 10 * MB, 0.012, copy_s=0.01)
    assert known.chunks_to_load([run(10)]) == 10
    known.load_begun()
    assert not known.tries_declined(1000.0)


def test_timeouts_are_generous() -> None:
    known = LoadCost()
    assert known.timeout_s(None, 5.0, 10.0) == known.timeout_s(5.0, None, 10.0) == 10.0
    assert known.timeout_s(1.0, 10.0, 10.0) == 1.0
    assert known.timeout_s(500.0, 10.0, 10.0) == 2.0
    assert known.timeout_s(1.0, 5000.0, 10.0) == 10.0


@pytest.mark.parametrize(("size_bytes", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, nan), (1, inf)])
def test_nonsense_is_ignored(size_bytes: int, seconds: float) -> None:
    known = cost(10_000, ("here", 10 * MB, 0.01))
    known.note_load("here", size_bytes, seconds)
    known.note_prefill(size_bytes, seconds)
    assert known.load_ms([run(10)]) == pytest.approx(10)
    assert known.compute_ms(1000) == pytest.approx(100)


def test_queued_bytes_are_no_debt() -> None:
    with pytest.raises(InvalidRequest, match="queued_bytes"):
        LoadCost().chunks_to_load([run()], queued_bytes=-1)
    assert LoadCost().chunks_to_load([]) == 0


def test_a_part_of_a_run_is_a_share_of_it() -> None:
    runs = [run(4), run(4, source="far")]
    assert leading(runs, 0) == []
    assert leading(runs, 4) == runs[:1]
    assert leading(runs, 5) == [runs[0], LoadRun(1, 128, MB, "far")]
    assert leading(runs, 9) == runs
