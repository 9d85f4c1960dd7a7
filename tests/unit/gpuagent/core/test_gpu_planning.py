"""Extents, burst sizes and ways: what the transfer engine decides, without a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_gpuagent.core.bursts import FIRST_BYTES, IDLE_BYTES, BurstSizer
from kvpool_gpuagent.core.extents import Extents
from kvpool_gpuagent.core.ways import CONTENDED_TURN_S, LONG_RUN_BYTES, SHORTEST_RUN_BYTES, Way, WayChooser

MIB = 1 << 20


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=60))
def test_ranges_that_are_out_never_overlap_and_all_come_back(steps: list[tuple[int, bool]]) -> None:
    extents = Extents(100)
    out: list[tuple[int, int]] = []
    for size, giving in steps:
        if giving and out:
            extents.give(*out.pop(size % len(out)))
            continue
        start = extents.take(size)
        if start is None:
            assert extents.largest_bytes < size
            continue
        assert start >= 0 and start + size <= 100
        assert all(start + size <= other or other + length <= start for other, length in out)
        out.append((start, size))
    for held in out:
        extents.give(*held)
    assert extents.largest_bytes == 100


def test_a_range_that_comes_back_twice_is_a_bug_that_shows() -> None:
    extents = Extents(10)
    assert extents.take(4) == 0
    extents.give(0, 4)
    with pytest.raises(AssertionError, match="twice"):
        extents.give(0, 4)


def test_bursts_grow_while_the_link_is_kept_busy_and_start_small_again() -> None:
    sizer = BurstSizer(128 * MIB)
    sizes = [sizer.next_bytes(continuing=number > 0) for number in range(5)]
    assert sizes == [FIRST_BYTES, 2 * FIRST_BYTES, IDLE_BYTES, IDLE_BYTES, IDLE_BYTES]
    assert sizer.next_bytes(continuing=False) == FIRST_BYTES


def test_bursts_outlast_the_turn_that_kernels_wait_for() -> None:
    sizer = BurstSizer(128 * MIB)
    for _ in range(30):
        sizer.record(turn_s=1e-3)
    assert 100e6 < sizer.next_bytes(continuing=False) < 115e6
    for _ in range(30):
        sizer.record(turn_s=1e-2)
    assert sizer.next_bytes(continuing=False) == 128 * MIB
    for _ in range(60):
        sizer.record(turn_s=0.0)
    assert sizer.next_bytes(continuing=False) == FIRST_BYTES


QUIET_S, BUSY_S = CONTENDED_TURN_S / 3, CONTENDED_TURN_S * 3


@pytest.mark.parametrize(
    ("run_bytes", "copies_bytes", "launches", "beside_busy"),
    [
        (LONG_RUN_BYTES, True, True, Way.RUNS),
        (LONG_RUN_BYTES, True, False, Way.RUNS),
        (LONG_RUN_BYTES - 1, True, True, Way.ENGINE),
        (LONG_RUN_BYTES - 1, True, False, Way.RUNS),
        (SHORTEST_RUN_BYTES - 1, True, True, Way.ENGINE),
        (SHORTEST_RUN_BYTES - 1, True, False, Way.BURSTS),
        (0, False, True, Way.ENGINE),
        (0, False, False, Way.BURSTS),
    ],
)
def test_kernels_of_ours_beside_an_idle_gpu_and_what_disturbs_least_beside_a_busy_one(
    run_bytes: int, copies_bytes: bool, launches: bool, beside_busy: Way
) -> None:
    chooser = WayChooser(run_bytes, copies_bytes=copies_bytes, engine_launches=launches)
    assert {chooser.choose(QUIET_S, sums_are_fast=True) for _ in range(200)} == {Way.BURSTS}
    chosen = [chooser.choose(BUSY_S, sums_are_fast=True) for _ in range(200)]
    assert set(chosen) == {beside_busy, Way.BURSTS}  # which tells whether the engine is busy still
    assert chosen.count(beside_busy) > 190


def test_a_way_that_cannot_be_taken_is_left_out_and_a_pinned_one_is_taken_whatever_is_measured() -> None:
    chooser = WayChooser(256, copies_bytes=True, engine_launches=True)
    chooser.keep([Way.BURSTS, Way.RUNS])
    assert Way.ENGINE not in chooser.ways
    chooser.pin(Way.RUNS)
    assert chooser.choose(QUIET_S, sums_are_fast=True) is Way.RUNS
    chooser.pin(None)
    assert chooser.choose(QUIET_S, sums_are_fast=True) is Way.BURSTS
    chooser.keep([Way.RUNS])
    assert chooser.choose(QUIET_S, sums_are_fast=True) is Way.RUNS
    with pytest.raises(ValueError, match="none"):
        chooser.keep([Way.ENGINE])


def test_runs_that_the_cpu_cannot_sum_as_fast_as_they_come_are_not_taken_beside_a_busy_engine() -> None:
    chooser = WayChooser(LONG_RUN_BYTES, copies_bytes=True, engine_launches=True)
    chosen = {chooser.choose(BUSY_S, sums_are_fast=False) for _ in range(100)}
    assert chosen == {Way.ENGINE, Way.BURSTS}
    chooser.keep([Way.RUNS])
    assert chooser.choose(BUSY_S, sums_are_fast=False) is Way.RUNS
