"""Sliding windows smaller than a chunk: of the chunk before a boundary only the last blocks are needed, and held."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, Engine, Engines, agent_of, prompt
from tests.vllm.test_windowed_models import ARGUMENTS, BLOCK, GROUPS, alone, engines, has_stored, loadable, pair

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
__all__ = ["alone", "engines", "pair"]  # fixtures, of a model with the windows of this module
# Less than a block, a block and less than two, less than a chunk by one; edges of the window behind those of chunks.
WINDOWS = (BLOCK - 7, BLOCK + 9, CHUNK - 1)


def lengths(window: int) -> list[int]:
    edges = (CHUNK, 2 * CHUNK, CHUNK + window, 3 * CHUNK + BLOCK)
    return sorted({edge + by for edge in edges for by in (-1, 0, 1)} | {7 * CHUNK + 50})


@pytest.fixture(scope="module", params=WINDOWS)
def window(request: pytest.FixtureRequest) -> int:
    """Takes the place of test_windowed_models' own."""
    return int(request.param)


def test_tokens_after_a_load_are_those_of_plain_vllm(pair: tuple[Engine, Engine], alone: Engine, window: int) -> None:
    prompts = [prompt(length, seed=length) for length in lengths(window)]
    expected = [alone.generate(one).tokens[0] for one in prompts]
    before = pair[0].counters()["stored_chunks"]
    assert [pair[0].generate(one, salt="edges").tokens[0] for one in prompts] == expected
    pair[0].await_stored(int(before) + GROUPS * sum(len(one) // CHUNK for one in prompts))
    found = [pair[1].generate(one, salt="edges") for one in prompts]
    assert [one.tokens[0] for one in found] == expected
    # Fewer than min_load_tokens (128) are computed.
    assert [one.cached[0] for one in found] == [loadable(len(one)) if len(one) > CHUNK else 0 for one in prompts]


@pytest.mark.parametrize("group", range(GROUPS))
def test_other_kv_of_any_group_changes_tokens(pair: tuple[Engine, Engine], alone: Engine, group: int) -> None:
    asked, salt = prompt(5 * CHUNK + 2, seed=2), f"spoiled {group}"
    has_stored(pair[0], asked, salt)
    expected = alone.generate(asked).tokens
    pair[1].probe("spoil_loads", group, "zeroes")
    spoiled = pair[1].generate(asked, salt=salt)
    pair[1].forget()
    pair[1].probe("spoil_loads", -1, "zeroes")
    assert spoiled.cached == [5 * CHUNK]
    assert spoiled.tokens != expected
    assert pair[1].generate(asked, salt=salt).tokens == expected


def test_steps_that_leave_a_chunk_before_it_is_whole(engines: Engines, cluster: Cluster, alone: Engine) -> None:
    """Their chunks cannot be stored: what is missing is computed, and no token is another one."""
    prompts = [prompt(length, seed=60 + length) for length in (300, 700, 1200)]
    expected = [alone.generate(one, new_tokens=2 * CHUNK).tokens[0] for one in prompts]
    small_steps: dict[str, Any] = {**ARGUMENTS, "max_num_batched_tokens": 96, "max_num_seqs": 4}
    with engines.start(agent=agent_of(cluster), **small_steps) as first:
        for _ in range(2):
            assert first.generate(*prompts, salt="steps", new_tokens=2 * CHUNK).tokens == expected
            first.forget()
    with engines.start(agent=agent_of(cluster), **small_steps) as second:
        assert second.generate(*prompts, salt="steps", new_tokens=2 * CHUNK).tokens == expected
        turns = [one + more for one, more in zip(prompts, expected, strict=True)]
        assert second.generate(*turns, salt="steps").tokens == alone.generate(*turns).tokens
