"""How much leases may hold."""

from __future__ import annotations

import pytest

from kvpool.core.errors import Overloaded
from kvpool_gpuagent.core.leases import LeaseBudget, LeaseShare, PageNeed

PAGE = 1 << 20
ONE = PageNeed(1, PAGE)


def share(budget: LeaseBudget, needs: list[PageNeed], session: str = "a", arena_pages: int = 1 << 20) -> LeaseShare:
    return budget.share(session, needs, window_pages=64, arena_bytes=arena_pages * PAGE)


def test_a_small_lease_holds_all_its_chunks() -> None:
    budget = LeaseBudget(0.25)
    got = share(budget, [ONE] * 8)
    assert (got.held_chunks, got.staged_chunks) == (8, 8)
    assert budget.page_count == 8
    got.end()
    got.end()
    assert budget.page_count == 0


def test_a_large_lease_holds_leading_chunks_and_stages_the_others_through_a_window() -> None:
    budget = LeaseBudget(0.25)
    got = share(budget, [ONE] * 100)
    assert (got.held_chunks, got.window_chunks, got.staged_chunks) == (6, 2, 100)
    assert budget.page_count == 8  # a quarter of the window is 16, and a session has half of that


def test_no_more_is_staged_than_leases_may_hold_of_the_arena() -> None:
    got = share(LeaseBudget(0.25), [ONE] * 100, arena_pages=160)
    assert (got.held_chunks, got.staged_chunks) == (6, 40)


def test_a_small_arena_bounds_what_is_held() -> None:
    assert share(LeaseBudget(0.25), [ONE] * 4, arena_pages=24).held_chunks == 2
    with pytest.raises(Overloaded):
        share(LeaseBudget(0.25), [ONE] * 4, arena_pages=4)


def test_sessions_together_have_the_share_and_one_has_half_of_it() -> None:
    budget = LeaseBudget(0.25)
    first = share(budget, [ONE] * 8)
    with pytest.raises(Overloaded):
        share(budget, [ONE])
    share(budget, [ONE] * 8, session="b")
    with pytest.raises(Overloaded):
        share(budget, [ONE], session="c")
    first.end()
    assert share(budget, [ONE], session="c").held_chunks == 1
    assert share(budget, [ONE] * 8).held_chunks == 6


def test_a_chunk_is_held_whole_or_not_at_all() -> None:
    large = PageNeed(3, 3 * PAGE)
    got = share(LeaseBudget(0.25), [large] * 4)
    assert (got.held_chunks, got.staged_chunks) == (1, 4)
    with pytest.raises(Overloaded):
        share(LeaseBudget(0.25), [PageNeed(9, PAGE)])


def test_chunks_that_do_not_fit_into_what_the_lease_has_are_not_staged() -> None:
    got = share(LeaseBudget(0.25), [ONE, ONE, PageNeed(60, PAGE)])
    assert (got.held_chunks, got.staged_chunks) == (2, 2)


def test_without_a_share_there_are_no_leases() -> None:
    with pytest.raises(Overloaded):
        share(LeaseBudget(0.0), [ONE])
