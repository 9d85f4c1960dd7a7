"""Extents and burst sizes: what the transfer engine decides, without a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_gpuagent.adapters.gpu.scratch import Extents
from kvpool_gpuagent.adapters.gpu.transfer_queue import FIRST_BYTES, IDLE_BYTES, BurstSizer

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
