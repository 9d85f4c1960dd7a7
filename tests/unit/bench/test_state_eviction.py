"""Replays for models with full attention and recurrent states."""

from __future__ import annotations

import random

import pytest

from bench.eviction_traces import SYNTHETIC
from bench.state_eviction import (
    AS_NOW,
    BOTH,
    FUTURE,
    ORPHANS,
    RULES_OF,
    WORTHLESS,
    FuturePool,
    Pool,
    Shape,
    chunks_of,
    hit_rate,
    working_set_bytes,
)

SHAPE = Shape(full_bytes=2, state_bytes=3, state_groups=2)
WITH_WINDOWS = Shape(full_bytes=2, state_bytes=3, state_groups=2, window_bytes=1, window_chunks=2)
PROMPT = list(range(10))
STATES = 2 * 3


@pytest.mark.parametrize(("shape", "size_bytes"), [(SHAPE, 20 + 2 * STATES), (WITH_WINDOWS, 30 + 2 * STATES)])
def test_a_prompt_goes_on_where_all_groups_have_a_boundary(shape: Shape, size_bytes: int) -> None:
    pool = Pool(shape, 1000, AS_NOW)
    assert pool.find(PROMPT) == 0
    pool.use(PROMPT, 0)
    assert pool.used_bytes == size_bytes, "states after a step of 8 chunks and at the end"
    assert pool.find([*PROMPT, 10]) == 10 and pool.find([*PROMPT[:9], 11]) == 8 and pool.find(PROMPT[:7]) == 0
    pool.use([*PROMPT, 10], 10)
    assert pool.find([*PROMPT, 10, 11]) == 11


def after(pool: Pool, evictions: int) -> list[list[int]]:
    """Chunks of which full attention and the states are left."""
    for _ in range(evictions):
        pool._evict(0)
    return [[chunk for chunk in PROMPT if pool._has(chunk, part)] for part in (0, *SHAPE.states)]


def filled(rule: str) -> Pool:
    pool = Pool(SHAPE, 1000, rule)
    pool.use(PROMPT, 0)
    return pool


def test_states_go_after_the_chunk_of_their_boundary_if_the_rule_says_so() -> None:
    assert after(filled(AS_NOW), 3) == after(filled(ORPHANS), 3) == [PROMPT[:9], [9], [9]], "states inside, the end"
    assert after(filled(AS_NOW), 5) == [PROMPT[:7], [9], [9]]
    assert after(filled(ORPHANS), 5) == [PROMPT[:9], [], []]


def test_what_is_behind_the_deepest_states_goes_after_a_state_if_the_rule_says_so() -> None:
    for rule, expected in ((AS_NOW, [PROMPT[:9], [], [9]]), (BOTH, [PROMPT[:8], [7], [7]])):
        pool = filled(rule)
        pool._rank(9, (2,), WORTHLESS)
        assert after(pool, 4) == expected, rule


def test_who_knows_the_future_keeps_what_is_read_again() -> None:
    again, once = [0, 1], [2, 3]
    pool = FuturePool(SHAPE, 4 + STATES, [again, once, again])
    pool.use(again, 0)
    pool.use(once, 0)
    assert pool.find(again) == 2 and pool.find(once) == 0


def test_all_is_found_where_all_has_room() -> None:
    requests = chunks_of(SYNTHETIC["agents"](random.Random(1))[:200])
    total = working_set_bytes(requests, WITH_WINDOWS)
    rates = [hit_rate(requests, WITH_WINDOWS, total, rule, tier) for tier in RULES_OF for rule in RULES_OF[tier]]
    assert len(set(rates)) == 1 and rates[0] > 0.5
    assert hit_rate(requests, WITH_WINDOWS, total // 8, FUTURE) > hit_rate(requests, WITH_WINDOWS, total // 8, AS_NOW)
