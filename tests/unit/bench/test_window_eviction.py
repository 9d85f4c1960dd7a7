"""Replays for models with sliding windows."""

from __future__ import annotations

import random

from bench.eviction_traces import SYNTHETIC
from bench.window_eviction import RULES, Pool, Shape, hit_rate

SHAPE = Shape(window_blocks=2, window_groups=5)


def test_a_boundary_needs_all_full_chunks_before_it_and_the_window_alone() -> None:
    pool = Pool(SHAPE, 1000, "alone")
    prompt = list(range(8))
    assert pool.find(prompt) == 0
    pool.use(prompt, 0)
    assert pool.find([*prompt, 8, 9]) == 8
    assert pool.find([0, 1, 100]) == 2 and pool.find([0]) == 1 and pool.find([100, 1]) == 0
    small = Pool(SHAPE, 8 + 5 * 4, "as now")
    small.use(prompt, 0)
    assert small.find(prompt) == 8, "the chunks that the prompt has passed made room"
    assert small.find([0, 1, 2, 3, 100]) == 0


def test_all_is_found_where_all_has_room() -> None:
    requests = SYNTHETIC["agents"](random.Random(1))[:200]
    rates = {rule: hit_rate(requests, SHAPE, 1 << 30, rule) for rule in RULES}
    assert len(set(rates.values())) == 1 and rates["chain"] > 0.5
