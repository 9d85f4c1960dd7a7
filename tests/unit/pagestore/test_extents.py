"""Free extents against a naive model: a set of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool_pagestore.core.extents import Extent, FreeExtents, blocks_of

BLOCKS = 64


def blocks(extents: list[Extent]) -> list[tuple[int, int]]:
    return [(file, at) for file, start, count in extents for at in range(start, start + count)]


class FreeExtentsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.free = FreeExtents()
        self.model: set[tuple[int, int]] = set()
        self.held: list[list[Extent]] = []
        for file in (1, 2):
            self.free.give([Extent(file, 0, BLOCKS)])
            self.model |= {(file, at) for at in range(BLOCKS)}

    @rule(count=st.integers(1, 40))
    def take(self, count: int) -> None:
        if count > len(self.model):
            with pytest.raises(ValueError):
                self.free.take(count)
            return
        runs = self._runs()
        taken = self.free.take(count)
        assert len(blocks(taken)) == len(set(blocks(taken))) == count
        assert set(blocks(taken)) <= self.model
        fitting = [run for run in runs if run >= count]
        if fitting:  # in one piece, from the smallest run that is large enough
            assert len(taken) == 1
            left = self._runs(self.model - set(blocks(taken)))
            runs.remove(min(fitting))
            assert sorted(left) == sorted(runs + [min(fitting) - count] * (min(fitting) > count))
        self.model -= set(blocks(taken))
        self.held.append(taken)

    @rule(at=st.integers(0, 1000))
    def give(self, at: int) -> None:
        if self.held:
            given = self.held.pop(at % len(self.held))
            self.free.give(given)
            self.model |= set(blocks(given))

    @invariant()
    def agrees_with_model(self) -> None:
        assert self.free.block_count == len(self.model)

    def _runs(self, model: set[tuple[int, int]] | None = None) -> list[int]:
        runs, before = list[int](), None
        for file, at in sorted(self.model if model is None else model):
            if before == (file, at - 1):
                runs[-1] += 1
            else:
                runs.append(1)
            before = file, at
        return runs


TestFreeExtents = FreeExtentsMachine.TestCase


@pytest.mark.parametrize(
    ("used", "wrong", "free"),
    [
        ([], [], 10),
        ([(0, 10)], [], 0),
        ([(2, 3), (5, 1), (9, 1)], [], 5),
        ([(2, 3), (4, 2), (6, 1)], [(4, 2)], 6),  # the second overlaps; the third overlaps only what is wrong
        ([(2, 3), (8, 3)], [(8, 3)], 7),  # sticks out
        ([(12, 1)], [(12, 1)], 10),
    ],
)
def test_what_is_not_used_is_free_and_what_cannot_be_is_named(
    used: list[tuple[int, int]], wrong: list[tuple[int, int]], free: int
) -> None:
    extents = FreeExtents()
    rows = np.array([(7, *each) for each in used], np.int64).reshape(-1, 3)
    assert extents.give_around(7, 10, rows) == [Extent(7, *each) for each in wrong]
    assert extents.block_count == free
    right = {at for start, count in used if (start, count) not in wrong for at in range(start, start + count)}
    assert {at for _, at in blocks(extents.take(free) if free else [])} == set(range(10)) - right


def test_giving_twice_what_is_a_run_of_its_own_is_noticed() -> None:
    extents = FreeExtents()
    extents.give([Extent(1, 4, 2)])
    with pytest.raises(ValueError, match="free already"):
        extents.give([Extent(1, 4, 2)])


def test_blocks_hold_all_bytes() -> None:
    assert [blocks_of(size) for size in (0, 1, 4096, 4097)] == [0, 1, 1, 2]
