"""Load, load a part, or compute."""

from copy import deepcopy
from itertools import pairwise
from math import inf, nan

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.core.load_cost import LoadCost, LoadRun, estimate_ms, leading
from kvpool.core.prefill_times import PrefillTimes


def computing(ms_per_token: float, *, warmed_up: bool = False, load_bytes_per_s: float = 0.0) -> LoadCost:
    """Prefills of any size were measured to take so long."""
    prefill = PrefillTimes(ms_per_token=ms_per_token, measured_tokens=1 << 20)
    return LoadCost(prefill=prefill, warmed_up=warmed_up, load_bytes_per_s=load_bytes_per_s)


def warm(ms_per_token: float, *, load_bytes_per_s: float = 0.0, overhead_ms: float = 0.0) -> LoadCost:
    """The same after the first load."""
    cost = computing(ms_per_token, warmed_up=True, load_bytes_per_s=load_bytes_per_s)
    cost.overhead_ms = overhead_ms
    return cost


def run(chunks: int = 1, tokens: int = 128, size_bytes: int = 1_000_000, estimated_ms: float = 0.0) -> LoadRun:
    return LoadRun(chunks, tokens, size_bytes, estimated_ms)


def test_what_can_be_loaded_is_loaded_as_long_as_nothing_was_measured() -> None:
    assert LoadCost().worthwhile_chunks([run(3, estimated_ms=1e6), run(2)]) == 5


def test_nothing_is_loaded_that_is_computed_quicker() -> None:
    cost = computing(0.01)  # 1.28 ms a chunk
    assert cost.worthwhile_chunks([run(estimated_ms=5.0)]) == 0
    assert cost.worthwhile_chunks([run(estimated_ms=0.5)]) == 1


def test_a_margin_keeps_ties_from_being_loaded() -> None:
    assert computing(0.01).worthwhile_chunks([run(estimated_ms=1.27)]) == 0


def test_a_quick_run_is_loaded_without_the_slow_one_behind_it() -> None:
    cost = computing(0.01)
    assert cost.worthwhile_chunks([run(4, 512, estimated_ms=1.0), run(4, 512, estimated_ms=50.0)]) == 4


def test_a_slow_run_is_loaded_for_a_quick_one_behind_it() -> None:
    cost = computing(0.1)
    assert cost.worthwhile_chunks([run(1, 128, estimated_ms=20.0), run(9, 1152, estimated_ms=1.0)]) == 10


def test_queued_bytes_come_first() -> None:
    cost = computing(0.01, load_bytes_per_s=1e9)
    assert cost.worthwhile_chunks([run(estimated_ms=0.5)], queued_bytes=0) == 1
    assert cost.worthwhile_chunks([run(estimated_ms=0.5)], queued_bytes=10_000_000) == 0


def test_queued_bytes_are_no_debt() -> None:
    with pytest.raises(InvalidRequest, match="queued_bytes"):
        LoadCost().worthwhile_chunks([run()], queued_bytes=-1)


def test_a_run_without_an_estimate_takes_what_loads_took_so_far() -> None:
    cost = warm(0.01)
    cost.note_load(4_000_000_000, 1.0, 0.0)
    assert cost.load_ms(run(size_bytes=1_000_000_000)) == pytest.approx(250)


def test_what_nobody_has_measured_is_tried_however_fast_the_engine_computes() -> None:
    """Else it is never measured: an 8B model on an H200 computes as fast as 3.7 GB/s would load."""
    cost = computing(0.035)
    unknown = run(64, 16_384, size_bytes=2 << 30, estimated_ms=0.0)
    assert cost.worthwhile_chunks([unknown]) == 64
    assert cost.worthwhile_chunks([unknown], queued_bytes=2 << 30) == 0  # one is enough to learn from
    cost.note_load(2 << 30, 1.0, 0.0)  # the first one says nothing
    cost.note_load(2 << 30, 2.0, 0.0)
    assert cost.worthwhile_chunks([unknown]) == 0


def test_the_overhead_is_what_the_estimate_did_not_say() -> None:
    cost = warm(0.01)
    cost.note_load(1_000_000, 0.050, 10.0)
    assert cost.overhead_ms == pytest.approx(40)
    assert cost.worthwhile_chunks([run(estimated_ms=0.5)]) == 0
    assert cost.worthwhile_chunks([run(60, 60 * 128, estimated_ms=1.0)]) == 60


def test_one_load_of_a_host_that_stood_still_is_no_overhead() -> None:
    cost = warm(0.1)
    for duration_s in (0.010, 0.012, 9.0, 0.011, 0.010, 8.0, 0.012):
        cost.note_load(1_000_000, duration_s, 10.0)
        assert cost.worthwhile_chunks([run(10, 1280, estimated_ms=10.0)]) == 10
    for _ in range(3):
        cost.note_load(1_000_000, 0.500, 10.0)
    assert cost.worthwhile_chunks([run(10, 1280, estimated_ms=10.0)]) == 0, "by now it is no exception"


def test_one_load_that_was_tried_is_enough_to_load_again() -> None:
    cost = warm(0.1)
    cost.note_load(1_000_000, 60.0, 10.0)
    offered, second = [run(10, 1280, estimated_ms=10.0)], 0
    while not cost.worthwhile_chunks(offered):
        cost.passed_over(float(second))
        second += 1
    cost.load_begun()
    cost.note_load(1_000_000, 0.012, 10.0)
    assert cost.worthwhile_chunks(offered) == 10


def test_estimates_that_are_too_long_are_put_right_by_one_load() -> None:
    """An agent counts a load that was stuck for long: by bytes, of which there may be few."""
    cost = warm(0.1)
    offered = [run(10, 1280, estimated_ms=1000.0)]
    assert cost.worthwhile_chunks(offered) == 0
    cost.note_load(1_000_000, 0.020, 1000.0)
    assert cost.worthwhile_chunks(offered) == 10
    cost.note_load(1_000_000, 1.000, 1000.0)
    assert cost.worthwhile_chunks(offered) == 0, "nor are they taken for too long when they are right again"


def test_a_load_once_measured_slow_is_tried_again() -> None:
    cost = warm(0.1)
    cost.note_load(1_000_000, 2.0, 1.0)
    decisions = []
    for second in range(40):
        decisions.append(cost.worthwhile_chunks([run(10, 1280, estimated_ms=10.0)]))
        cost.passed_over(float(second))
    assert decisions[0] == 0
    assert decisions[-1] == 10


@pytest.mark.parametrize("sample", [(0, 1.0), (10, 0.0), (-1, 1.0), (10, nan), (10, inf)])
def test_samples_of_nothing_are_ignored(sample: tuple[int, float]) -> None:
    cost = LoadCost()
    cost.note_prefill(*sample, 0.0)
    cost.note_load(*sample, 0.0)
    assert cost == LoadCost()


def test_a_load_may_take_as_long_as_computing_would() -> None:
    cost = LoadCost()
    assert cost.deadline_s(1000, 0.5, 10.0) == 10.0
    cost.note_prefill(1000, 2.0, 0.0)
    assert cost.deadline_s(1000, 0.5, 10.0) == pytest.approx(2.0)
    assert cost.deadline_s(10, 0.5, 10.0) == 0.5


def test_the_first_load_of_a_process_says_nothing_of_the_next() -> None:
    cost = computing(0.01)
    cost.note_load(1_000_000, 5.0, 1.0)
    assert cost.overhead_ms == 0
    assert cost.worthwhile_chunks([run(estimated_ms=0.5)]) == 1


def test_asking_changes_nothing_however_often_it_is_done() -> None:
    cost = warm(0.1, load_bytes_per_s=1e9, overhead_ms=500.0)
    before = deepcopy(cost)
    for _ in range(10_000):  # a request that gets no blocks asks in every step
        assert cost.worthwhile_chunks([run(10, 1280, estimated_ms=1e6)]) == 0
        assert cost.chunks_to_learn_from([run(10, 1280, estimated_ms=1e6)], 1) == 0
    assert cost == before


def test_being_passed_over_for_ever_breaks_no_measurement() -> None:
    cost = warm(0.1)
    cost.note_load(1_000_000, 2.0, 1.0)
    for second in range(20_000):
        cost.passed_over(float(second))
    assert cost.worthwhile_chunks([run(10, 1280, estimated_ms=1e6)]) == 10
    cost.load_begun()
    cost.note_load(1_000_000, 0.01, 5.0)
    assert 0 < cost.load_bytes_per_s < 1e12
    assert cost.overhead_ms == pytest.approx(5), "what was tried shows what is true"


def test_many_loads_passed_over_in_a_moment_count_once() -> None:
    cost = warm(0.1)
    for number in range(100):
        cost.passed_over(5.0 + number / 1000)
    assert cost.belief == pytest.approx(0.9)


def requests_between_loads(cost: LoadCost, offered: LoadRun, count: int, pause_s: float = 1.0) -> list[int]:
    """One every pause_s that could be loaded; each load takes as long as was expected."""
    loaded_at: list[int] = []
    number = 0
    while len(loaded_at) < count:
        if cost.worthwhile_chunks([offered]):
            loaded_at.append(number)
            cost.load_begun()
        else:
            cost.passed_over(number * pause_s)
        number += 1
    return [later - earlier for earlier, later in zip([0, *loaded_at], loaded_at, strict=False)]


def test_a_load_that_is_estimated_slow_is_tried_now_and_then_and_ever_more_seldom() -> None:
    """Else a wrong estimate would never be put right, if nobody else loads."""
    waits = requests_between_loads(warm(0.1), run(10, 1280, estimated_ms=1000.0), 10)
    assert 10 < waits[0] < 60
    assert all(1.9 * earlier < later for earlier, later in pairwise(waits[:6]))
    assert waits[-1] < 64 * 64, "it is never given up"


def test_requests_far_apart_are_not_mostly_tries() -> None:
    offered = run(10, 1280, estimated_ms=1000.0)
    waits = requests_between_loads(warm(0.1), offered, 5, pause_s=700.0)
    assert all(1.9 * earlier < later for earlier, later in pairwise(waits))


def test_loads_that_pay_again_are_doubted_as_quickly_as_at_first() -> None:
    cost = warm(0.1)
    first = requests_between_loads(cost, run(10, 1280, estimated_ms=1000.0), 5)[0]
    for _ in range(2):
        assert cost.worthwhile_chunks([run(10, 1280, estimated_ms=1.0)]) == 10
        cost.load_begun()
    cost.doubted_at_s = -inf
    assert requests_between_loads(cost, run(10, 1280, estimated_ms=1000.0), 1) == [first]


def test_waiting_behind_other_loads_is_no_overhead() -> None:
    cost = warm(0.01, load_bytes_per_s=1e9)
    cost.note_load(1_000_000, 0.110, 10.0, queued_bytes=100_000_000)
    assert cost.overhead_ms == pytest.approx(0, abs=1.0)
    assert cost.load_bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_a_load_without_an_estimate_says_nothing_of_the_overhead() -> None:
    cost = warm(0.01, overhead_ms=40.0)
    cost.note_load(1_000_000, 0.050, 0.0)
    assert cost.overhead_ms == 40.0


def test_what_every_prefill_takes_is_not_saved_by_loading() -> None:
    cost = LoadCost()
    for tokens in (10, 40, 2000):
        cost.note_prefill(tokens, 0.020, 0.0)
    assert cost.worthwhile_chunks([run(10, 1280, estimated_ms=1.0)]) == 0
    assert cost.compute_us_per_token(1280) == pytest.approx(0, abs=1e-6)
    assert cost.deadline_s(1280, 0.001, 10.0) == pytest.approx(0.020)


def test_what_the_first_chunks_of_runs_take_is_estimated_by_their_share() -> None:
    runs = [run(4, 512, 4_000, estimated_ms=8.0), run(2, 256, 2_000, estimated_ms=100.0)]
    assert leading(runs, 6) == runs
    assert leading(runs, 5) == [runs[0], LoadRun(1, 128, 1_000, 50.0)]
    assert leading(runs, 3) == [LoadRun(3, 384, 3_000, 6.0)]
    assert leading(runs, 0) == []
    assert estimate_ms(runs) == 108.0
    assert estimate_ms([runs[0], run()]) == 0.0
    assert estimate_ms([]) == 0.0


def test_chunks_are_computed_to_learn_from_only_where_that_may_be_quicker() -> None:
    offered = [run(30, 1920, estimated_ms=150.0)]
    assert LoadCost().chunks_to_learn_from(offered, 40) == 0, "loads come first"
    assert computing(0.5).chunks_to_learn_from(offered, 40) == 0, "it was measured"
    few = LoadCost()
    few.note_prefill(40, 0.020, 0.0)
    assert few.chunks_to_learn_from(offered, 40) == 4, "that many take 128 ms at most"
    assert few.chunks_to_learn_from([run(30, 1920, estimated_ms=30.0)], 40) == 1, "less would bring nothing"
    assert few.chunks_to_learn_from([run(30, 1920, estimated_ms=5.0)], 40) == 0, "one alone may take far longer"
    assert few.chunks_to_learn_from([run(1, 64, estimated_ms=30.0)], 1) == 0, "nothing new would be learnt"
    assert few.chunks_to_learn_from([run(30, 1920, estimated_ms=1e5)], 40) == 10, "that many are enough to learn from"
    assert few.chunks_to_learn_from([run(8, 512, estimated_ms=1e5)], 40) == 8
    proportional = LoadCost()
    for tokens in (10, 40, 160):
        proportional.note_prefill(tokens, tokens * 0.010, 0.0)
    assert proportional.chunks_to_learn_from(offered, 40) == 0, "it is no secret that it takes longer"
