"""Load, load a part, or compute."""

from dataclasses import replace

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.core.load_cost import DEFAULT_BYTES_PER_S, LoadCost, LoadRun


def warm(**values: float) -> LoadCost:
    """After its first load."""
    return LoadCost(warmed_up=True, **values)


def run(chunks: int = 1, tokens: int = 128, size_bytes: int = 1_000_000, estimated_ms: float = 0.0) -> LoadRun:
    return LoadRun(chunks, tokens, size_bytes, estimated_ms)


def test_what_can_be_loaded_is_loaded_as_long_as_nothing_was_measured() -> None:
    assert LoadCost().worthwhile_chunks([run(3, estimated_ms=1e6), run(2)]) == 5


def test_nothing_is_loaded_that_is_computed_quicker() -> None:
    cost = LoadCost(compute_ms_per_token=0.01)  # 1.28 ms a chunk
    assert cost.worthwhile_chunks([run(estimated_ms=5.0)]) == 0
    assert cost.worthwhile_chunks([run(estimated_ms=0.5)]) == 1


def test_a_margin_keeps_ties_from_being_loaded() -> None:
    assert LoadCost(compute_ms_per_token=0.01).worthwhile_chunks([run(estimated_ms=1.27)]) == 0


def test_a_quick_run_is_loaded_without_the_slow_one_behind_it() -> None:
    cost = LoadCost(compute_ms_per_token=0.01)
    assert cost.worthwhile_chunks([run(4, 512, estimated_ms=1.0), run(4, 512, estimated_ms=50.0)]) == 4


def test_a_slow_run_is_loaded_for_a_quick_one_behind_it() -> None:
    cost = LoadCost(compute_ms_per_token=0.1)
    assert cost.worthwhile_chunks([run(1, 128, estimated_ms=20.0), run(9, 1152, estimated_ms=1.0)]) == 10


def test_queued_bytes_come_first() -> None:
    cost = LoadCost(compute_ms_per_token=0.01, load_bytes_per_s=1e9)
    assert cost.worthwhile_chunks([run(estimated_ms=0.5)], queued_bytes=0) == 1
    assert cost.worthwhile_chunks([run(estimated_ms=0.5)], queued_bytes=10_000_000) == 0


def test_queued_bytes_are_no_debt() -> None:
    with pytest.raises(InvalidRequest, match="queued_bytes"):
        LoadCost().worthwhile_chunks([run()], queued_bytes=-1)


def test_a_run_without_an_estimate_takes_what_loads_took_so_far() -> None:
    cost = warm()
    cost.note_load(4_000_000_000, 1.0, 0.0)
    assert cost.load_ms(run(size_bytes=1_000_000_000)) == pytest.approx(250)


def test_what_nobody_has_measured_is_tried_however_fast_the_engine_computes() -> None:
    """Else it is never measured: an 8B model on an H200 computes as fast as 3.7 GB/s would load."""
    cost = LoadCost(compute_ms_per_token=0.035)
    unknown = run(64, 16_384, size_bytes=2 << 30, estimated_ms=0.0)
    assert cost.worthwhile_chunks([unknown]) == 64
    assert cost.worthwhile_chunks([unknown], queued_bytes=2 << 30) == 0  # one is enough to learn from
    cost.note_load(2 << 30, 1.0, 0.0)  # the first one says nothing
    cost.note_load(2 << 30, 2.0, 0.0)
    assert cost.worthwhile_chunks([unknown]) == 0


def test_the_overhead_is_what_the_estimate_did_not_say() -> None:
    cost = warm(compute_ms_per_token=0.01)
    cost.note_load(1_000_000, 0.050, 10.0)
    assert cost.overhead_ms == pytest.approx(40)
    assert cost.worthwhile_chunks([run(estimated_ms=0.5)]) == 0
    assert cost.worthwhile_chunks([run(60, 60 * 128, estimated_ms=1.0)]) == 60


def test_measurements_fade() -> None:
    cost = LoadCost()
    for _ in range(30):
        cost.note_prefill(1000, 1.0)
    for _ in range(30):
        cost.note_prefill(1000, 0.1)
    assert cost.compute_ms(1000) == pytest.approx(100, rel=0.01)


def test_a_load_once_measured_slow_is_tried_again() -> None:
    cost = warm(compute_ms_per_token=0.1)
    cost.note_load(1_000_000, 2.0, 1.0)
    decisions = []
    for second in range(40):
        decisions.append(cost.worthwhile_chunks([run(10, 1280, estimated_ms=10.0)]))
        cost.passed_over(float(second))
    assert decisions[0] == 0
    assert decisions[-1] == 10


@pytest.mark.parametrize("sample", [(0, 1.0), (10, 0.0), (-1, 1.0)])
def test_samples_of_nothing_are_ignored(sample: tuple[int, float]) -> None:
    cost = LoadCost()
    cost.note_prefill(*sample)
    cost.note_load(*sample, 0.0)
    assert cost == LoadCost()


def test_a_load_may_take_as_long_as_computing_would() -> None:
    cost = LoadCost()
    assert cost.deadline_s(1000, 0.5, 10.0) == 10.0
    cost.note_prefill(1000, 2.0)
    assert cost.deadline_s(1000, 0.5, 10.0) == pytest.approx(2.0)
    assert cost.deadline_s(10, 0.5, 10.0) == 0.5


def test_the_first_load_of_a_process_says_nothing_of_the_next() -> None:
    cost = LoadCost(compute_ms_per_token=0.01)
    cost.note_load(1_000_000, 5.0, 1.0)
    assert cost.overhead_ms == 0
    assert cost.worthwhile_chunks([run(estimated_ms=0.5)]) == 1


def test_asking_changes_nothing_however_often_it_is_done() -> None:
    cost = warm(compute_ms_per_token=0.1, load_bytes_per_s=1e9, overhead_ms=500.0)
    before = replace(cost)
    for _ in range(10_000):  # a request that gets no blocks asks in every step
        assert cost.worthwhile_chunks([run(10, 1280, estimated_ms=1e6)]) == 0
    assert cost == before


def test_being_passed_over_for_ever_breaks_no_measurement() -> None:
    cost = warm(compute_ms_per_token=0.1)
    cost.note_load(1_000_000, 2.0, 1.0)
    for second in range(20_000):
        cost.passed_over(float(second))
    cost.note_load(1_000_000, 0.01, 5.0)
    assert 0 < cost.load_bytes_per_s < 1e12
    assert cost.worthwhile_chunks([run(10, 1280, estimated_ms=10.0)]) == 10


def test_many_loads_passed_over_in_a_moment_count_once() -> None:
    cost = warm(overhead_ms=100.0)
    for number in range(100):
        cost.passed_over(5.0 + number / 1000)
    assert cost.overhead_ms == pytest.approx(90)


def test_belief_in_fast_loads_does_not_grow_by_passing_them_over() -> None:
    cost = warm(load_bytes_per_s=5 * DEFAULT_BYTES_PER_S)
    for second in range(100):
        cost.passed_over(float(second))
    assert cost.load_bytes_per_s == 5 * DEFAULT_BYTES_PER_S


def test_waiting_behind_other_loads_is_no_overhead() -> None:
    cost = warm(compute_ms_per_token=0.01, load_bytes_per_s=1e9)
    cost.note_load(1_000_000, 0.110, 10.0, queued_bytes=100_000_000)
    assert cost.overhead_ms == pytest.approx(0, abs=1.0)
    assert cost.load_bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_a_load_without_an_estimate_says_nothing_of_the_overhead() -> None:
    cost = warm(overhead_ms=40.0)
    cost.note_load(1_000_000, 0.050, 0.0)
    assert cost.overhead_ms == 40.0
