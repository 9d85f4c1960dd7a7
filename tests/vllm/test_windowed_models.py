"""A model of full-attention and sliding-window layers, whose KV vLLM keeps in several groups, through the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, Engine, Engines, agent_of, prompt
from tests.vllm.faults import damage_disk, stopped_chunks
from tests.vllm.models import make_windowed_model
from tests.vllm.test_faults import load_under_way

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
WINDOW, BLOCK, GROUPS = 160, 32, 3
ARGUMENTS: dict[str, Any] = {"num_gpu_blocks_override": 640, "block_size": BLOCK}
# Around the edges of chunks, blocks and the window, behind and before one another.
LENGTHS = sorted(
    {CHUNK + 2, 5 * CHUNK + 50, 9 * CHUNK + BLOCK}
    | {edge + by for edge in (2 * CHUNK, 5 * CHUNK, CHUNK + WINDOW, 3 * CHUNK + BLOCK) for by in (-1, 0, 1)}
)


def loadable(length: int) -> int:
    """Tokens of a prompt that may come from the pool."""
    return min(length // CHUNK * CHUNK, length - 1)


@pytest.fixture(scope="module")
def window() -> int:
    """Of the model's layers, in tokens; test_small_windows.py has others."""
    return WINDOW


@pytest.fixture(scope="module")
def engines(window: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """What starts engines that serve such a model, in float32."""
    with Engines(make_windowed_model(tmp_path_factory.mktemp("windowed"), window_tokens=window)) as engines:
        yield engines


@pytest.fixture(scope="module")
def alone(engines: Engines) -> Iterator[Engine]:
    """Plain vLLM."""
    with engines.start(enable_prefix_caching=False, **ARGUMENTS) as engine:
        yield engine


@pytest.fixture(scope="module")
def pair(engines: Engines, cluster: Cluster) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that share."""
    agent = agent_of(cluster)
    with engines.start(agent=agent, **ARGUMENTS) as first, engines.start(agent=agent, **ARGUMENTS) as second:
        yield first, second


def has_stored(engine: Engine, tokens: list[int], salt: str) -> None:
    """Have it compute the prompt and wait until the pool has all groups' chunks of it."""
    chunks = int(engine.counters()["stored_chunks"]) + GROUPS * (len(tokens) // CHUNK)
    engine.generate(tokens, salt=salt)
    engine.await_stored(chunks)


def test_tokens_after_a_load_are_those_of_plain_vllm(pair: tuple[Engine, Engine], alone: Engine) -> None:
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    expected = [alone.generate(one).tokens[0] for one in prompts]
    before = pair[0].counters()["stored_chunks"]
    assert [pair[0].generate(one, salt="edges").tokens[0] for one in prompts] == expected
    pair[0].await_stored(int(before) + GROUPS * sum(length // CHUNK for length in LENGTHS))
    found = [pair[1].generate(one, salt="edges") for one in prompts]
    assert [one.tokens[0] for one in found] == expected
    assert [one.cached[0] for one in found] == [loadable(length) for length in LENGTHS]


def test_prefixes_end_at_any_chunk(pair: tuple[Engine, Engine], alone: Engine) -> None:
    shared = prompt(8 * CHUNK + 5, seed=1)
    has_stored(pair[0], shared, "prefixes")
    for chunks in range(1, 9):
        asked = shared[: chunks * CHUNK] + prompt(40, seed=chunks)
        pair[1].forget()
        found = pair[1].generate(asked, salt="prefixes")
        assert (found.tokens, found.cached) == (alone.generate(asked).tokens, [chunks * CHUNK])


@pytest.mark.parametrize("how", ["zeroes", "others"])
@pytest.mark.parametrize("group", range(GROUPS))
def test_other_kv_of_any_group_changes_tokens(
    engines: Engines, cluster: Cluster, pair: tuple[Engine, Engine], alone: Engine, group: int, how: str
) -> None:
    asked, salt = prompt(5 * CHUNK + 7, seed=2), f"spoiled {group} {how}"
    has_stored(pair[0], asked, salt)
    expected = alone.generate(asked).tokens
    pair[1].probe("spoil_loads", group, how)
    spoiled = pair[1].generate(asked, salt=salt)
    pair[1].forget()
    pair[1].probe("spoil_loads", -1, how)
    assert spoiled.cached == [5 * CHUNK]
    assert spoiled.tokens != expected
    assert pair[1].generate(asked, salt=salt).tokens == expected


@pytest.mark.parametrize("cached", [True, False], ids=["prefix caching", "no prefix caching"])
def test_chunked_prefill(engines: Engines, cluster: Cluster, alone: Engine, cached: bool) -> None:
    """Steps shorter than prompts: blocks leave the window, and are used again, while prompts are computed."""
    prompts = [prompt(length, seed=60 + length) for length in (300, 700, 1200)]
    expected = [alone.generate(one).tokens[0] for one in prompts]
    arguments = {**ARGUMENTS, "max_num_batched_tokens": 192, "max_num_seqs": 4, "enable_prefix_caching": cached}
    salt = f"chunked {cached}"
    with engines.start(agent=agent_of(cluster), **arguments) as first:
        for _ in range(2):
            assert first.generate(*prompts, salt=salt).tokens == expected
            first.forget()
    with engines.start(agent=agent_of(cluster), **arguments) as second:
        again = second.generate(*prompts, salt=salt)
        assert again.tokens == expected
        if cached:
            assert again.cached == [loadable(len(one)) for one in prompts]


def test_generated_tokens_are_found_again(pair: tuple[Engine, Engine], alone: Engine) -> None:
    """Their chunks leave the window before the request ends."""
    asked = prompt(CHUNK + 30, seed=3)
    first = pair[0].generate(asked, salt="generated", new_tokens=4 * CHUNK)
    assert first.tokens == alone.generate(asked, new_tokens=4 * CHUNK).tokens
    turn = asked + first.tokens[0] + prompt(20, seed=4)
    expected = alone.generate(turn).tokens

    def found() -> bool:
        pair[1].forget()
        answer = pair[1].generate(turn, salt="generated")
        assert answer.tokens == expected
        return answer.cached == [5 * CHUNK]

    eventually_sync(found, deadline_s=60)


def test_requests_at_once_and_in_a_tiny_cache(engines: Engines, cluster: Cluster, alone: Engine) -> None:
    shared = prompt(2 * CHUNK, seed=5)
    prompts = [shared + prompt(40 + 30 * number, seed=70 + number) for number in range(6)]
    expected = [alone.generate(one, new_tokens=60).tokens[0] for one in prompts]
    arguments = {**ARGUMENTS, "num_gpu_blocks_override": 56, "max_model_len": 512}
    with engines.start(agent=agent_of(cluster), extra={"salt": "tiny"}, **arguments) as engine:
        for _ in range(3):
            assert engine.generate(*prompts, new_tokens=60).tokens == expected
        counted = engine.counters()
        assert counted["num_preemptions"] > 0
        assert counted["loaded_chunks"] > 0
        engine.forget()  # no block is lost


def test_an_aborted_load_leaves_nothing_behind(cluster: Cluster, pair: tuple[Engine, Engine], alone: Engine) -> None:
    asked = prompt(8 * CHUNK + 20, seed=6)
    expected = alone.generate(asked).tokens
    has_stored(pair[0], asked, "aborted")
    before = stopped_chunks(cluster)
    with load_under_way(cluster, pair[1], asked, "aborted") as number:
        pair[1].abort(number)
        other = prompt(100, seed=7)
        assert pair[1].generate(other).tokens == alone.generate(other).tokens
        pair[1].forget()
    assert stopped_chunks(cluster) > before
    assert pair[1].generate(asked, salt="aborted").tokens == expected


def test_damaged_pages_cost_the_load(cluster: Cluster, pair: tuple[Engine, Engine], alone: Engine) -> None:
    asked = prompt(6 * CHUNK + 20, seed=8)
    expected = alone.generate(asked).tokens
    has_stored(pair[0], asked, "damaged")
    damage_disk(cluster)
    failed = pair[1].counters()["failed_load_chunks"]
    assert pair[1].generate(asked, salt="damaged").tokens == expected
    assert pair[1].counters()["failed_load_chunks"] > failed
    assert "EngineDead" not in pair[1].log()


def test_without_the_hybrid_manager_all_tokens_are_shared(engines: Engines, cluster: Cluster, alone: Engine) -> None:
    asked = prompt(5 * CHUNK + 9, seed=9)
    expected = alone.generate(asked).tokens
    arguments = {**ARGUMENTS, "disable_hybrid_kv_cache_manager": True, "num_gpu_blocks_override": 320}
    with (
        engines.start(agent=agent_of(cluster), **arguments) as first,
        engines.start(agent=agent_of(cluster), **arguments) as second,
    ):
        assert first.generate(asked, salt="promoted").tokens == expected
        first.await_stored(5)
        found = second.generate(asked, salt="promoted")
        assert (found.tokens, found.cached) == (expected, [5 * CHUNK])


def test_windows_alone(tmp_path: Path, cluster: Cluster) -> None:
    """A model of sliding windows only: one group, of which a load that fails in part is of no use."""
    asked = prompt(6 * CHUNK + 9, seed=10)
    make_windowed_model(tmp_path, window_tokens=WINDOW, full_layers=())
    agent = agent_of(cluster)
    with Engines(tmp_path) as engines:
        with engines.start(enable_prefix_caching=False, **ARGUMENTS) as alone:
            expected = alone.generate(asked).tokens
        with engines.start(agent=agent, **ARGUMENTS) as first, engines.start(agent=agent, **ARGUMENTS) as second:
            assert first.generate(asked).tokens == expected
            first.await_stored(6)
            found = second.generate(asked)
            assert (found.tokens, found.cached) == (expected, [6 * CHUNK])
            assert second.counters()["loaded_chunks"] == 2, "what has left the window is not loaded"
            second.forget()
            damage_disk(cluster)
            assert second.generate(asked).tokens == expected
