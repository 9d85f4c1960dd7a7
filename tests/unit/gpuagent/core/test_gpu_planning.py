"""Extents, burst sizes and ways: what the transfer engine decides, without a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_gpuagent.core.bursts import FIRST_BYTES, IDLE_BYTES, BurstSizer
from kvpool_gpuagent.core.extents import Extents
from kvpool_gpuagent.core.ways import LONG_RUN_BYTES, SHORTEST_RUN_BYTES, Way, WayChooser

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
        assert 0 <= start and start + size <= 100
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


@pytest.mark.parametrize(
    ("run_bytes", "copies_bytes", "ways"),
    [
        (LONG_RUN_BYTES, True, (Way.RUNS, Way.BURSTS)),
        (LONG_RUN_BYTES - 1, True, (Way.BURSTS, Way.RUNS)),
        (SHORTEST_RUN_BYTES - 1, True, (Way.BURSTS,)),
        (0, False, (Way.BURSTS,)),
    ],
)
def test_the_way_begins_with_the_length_of_runs(run_bytes: int, copies_bytes: bool, ways: tuple[Way, ...]) -> None:
    chooser = WayChooser(run_bytes, copies_bytes=copies_bytes, engine_launches=False)
    assert chooser.ways == ways
    assert chooser.choose() is ways[0]


def test_an_engine_that_launches_goes_before_kernels_of_ours() -> None:
    chooser = WayChooser(256, copies_bytes=True, engine_launches=True)
    assert chooser.ways == (Way.ENGINE, Way.BURSTS)
    chooser.keep([Way.BURSTS])
    assert chooser.choose() is Way.BURSTS
    with pytest.raises(ValueError, match="none"):
        chooser.keep([Way.RUNS])


def test_a_way_that_measures_faster_is_taken_and_the_other_is_tried_again() -> None:
    chooser = WayChooser(LONG_RUN_BYTES, copies_bytes=True, engine_launches=False)
    chooser.record(Way.RUNS, 64 * MIB, 2e-3)
    chooser.record(Way.BURSTS, 64 * MIB, 1e-3)
    chosen = [chooser.choose() for _ in range(200)]
    assert chosen.count(Way.BURSTS) > 190 and Way.RUNS in chosen
    for _ in range(30):
        chooser.record(Way.RUNS, 64 * MIB, 0.5e-3)
    chosen = [chooser.choose() for _ in range(200)]
    assert Way.RUNS in chosen and Way.BURSTS in chosen
    chooser.record(Way.BURSTS, 1, 1e-9)  # too small to say anything
    assert chooser.choose() is Way.RUNS
