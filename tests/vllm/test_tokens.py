"""Greedy tokens through the pool equal plain vLLM's, over what engines are configured with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, Engine, agent_of, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SHARED = prompt(5 * CHUNK, seed=1)
# Ends inside of a chunk, at its border, just after it; another tail behind the same prefix; nothing in common; short.
PROMPTS = {
    "inside": SHARED + prompt(50, seed=2),
    "border": SHARED[: 4 * CHUNK],
    "after the border": [*SHARED[: 4 * CHUNK], 77],
    "other tail": SHARED[: 3 * CHUNK] + prompt(200, seed=3),
    "nothing in common": prompt(300, seed=4),
    "short": prompt(40, seed=5),
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "blocks of 16": {"block_size": 16},
    "blocks of 32": {"block_size": 32},
    "blocks of 128": {"block_size": 128},
    "no prefix caching": {"block_size": 32, "enable_prefix_caching": False},
    "chunked prefill": {"block_size": 32, "max_num_batched_tokens": 192, "max_num_seqs": 4},
}


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> Iterator[dict[str, list[int]]]:
    """What vLLM alone says, whose own cache never helps: float32 tokens do not depend on the block size."""
    with Engine(model_dir, block_size=32, enable_prefix_caching=False) as engine:
        yield {name: engine.generate(one).tokens[0] for name, one in PROMPTS.items()}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_tokens_are_those_of_plain_vllm(
    cluster: Cluster, model_dir: Path, plain: dict[str, list[int]], name: str
) -> None:
    arguments, extra = CONFIGURATIONS[name], {"salt": name}
    agent = agent_of(cluster)
    with Engine(model_dir, agent=agent, extra=extra, **arguments) as first:
        assert first.generate(PROMPTS["inside"]).tokens == [plain["inside"]]
        first.await_stored(5)
        assert not first.counters().get("loaded_chunks")
    with Engine(model_dir, agent=agent, extra=extra, **arguments) as second:
        found = second.generate(PROMPTS["inside"])
        assert found.tokens == [plain["inside"]]
        assert found.cached == [5 * CHUNK]
        second.forget()
        # All at once, the pool's chunks in common.
        together = second.generate(*PROMPTS.values())
        assert together.tokens == list(plain.values())
        # Whoever comes second finds the first one's blocks, of which vLLM leaves one to be computed.
        own = arguments.get("enable_prefix_caching", True)
        assert together.cached[1] == 4 * CHUNK - (arguments["block_size"] if own else 1)
        assert together.cached[2] == 4 * CHUNK
        assert together.cached[3] == 3 * CHUNK
        assert second.counters().get("failed_load_chunks", 0) == 0


def test_what_is_stored_during_prefill_is_found(cluster: Cluster, model_dir: Path, plain: dict[str, list[int]]) -> None:
    extra = {"salt": "prefill", "store": "prefill"}
    arguments = {"block_size": 32, "max_num_batched_tokens": 192, "max_num_seqs": 4}
    with Engine(model_dir, agent=agent_of(cluster), extra=extra, **arguments) as engine:
        assert engine.generate(*PROMPTS.values()).tokens == list(plain.values())
        engine.await_stored(8)  # 5 of the first, 1 of another tail, 2 of nothing in common
        engine.forget()
        again = engine.generate(*PROMPTS.values())
        assert again.tokens == list(plain.values())
        assert again.cached[0] >= 5 * CHUNK
        assert again.cached[4] == 2 * CHUNK


def test_preemption_in_a_tiny_cache(cluster: Cluster, model_dir: Path, plain: dict[str, list[int]]) -> None:
    prompts = [prompt(300, seed=20 + number) for number in range(4)]
    arguments: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 28, "max_model_len": 768}
    with Engine(model_dir, enable_prefix_caching=False, block_size=32) as alone:
        expected = [alone.generate(one, new_tokens=100).tokens[0] for one in prompts]
    for store in ("prefill", "finish"):
        with Engine(
            model_dir, agent=agent_of(cluster), extra={"salt": f"tiny {store}", "store": store}, **arguments
        ) as engine:
            for _ in range(2):
                assert engine.generate(*prompts, new_tokens=100).tokens == expected
            counted = engine.counters()
            assert counted["num_preemptions"] > 0
            assert counted["loaded_chunks"] > 0


def test_a_salt_keeps_requests_apart(cluster: Cluster, model_dir: Path, plain: dict[str, list[int]]) -> None:
    with Engine(model_dir, agent=agent_of(cluster), extra={"salt": "salted"}, block_size=32) as engine:
        assert engine.generate(PROMPTS["inside"], salt="a").tokens == [plain["inside"]]
        engine.await_stored(5)
        engine.forget()
        assert engine.generate(PROMPTS["inside"], salt="b").cached == [0]
        engine.await_stored(10)
        engine.forget()
        assert engine.generate(PROMPTS["inside"], salt="a").cached == [5 * CHUNK]


def test_bfloat16_tokens_are_those_after_vllms_own_prefix_hit(cluster: Cluster, model_dir: Path) -> None:
    arguments: dict[str, Any] = {"block_size": 128, "dtype": "bfloat16"}
    with Engine(model_dir, **arguments) as alone:
        alone.generate(SHARED)
        expected = alone.generate(PROMPTS["inside"])
        assert expected.cached == [5 * CHUNK]
    agent, extra = agent_of(cluster), {"salt": "bfloat16"}
    with Engine(model_dir, agent=agent, extra=extra, **arguments) as first:
        first.generate(SHARED)
        first.await_stored(5)
    with Engine(model_dir, agent=agent, extra=extra, **arguments) as second:
        found = second.generate(PROMPTS["inside"])
    assert (found.tokens, found.cached) == (expected.tokens, expected.cached)
