"""Greedy tokens through the pool equal plain vLLM's, over what engines are configured with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, Engine, Engines, agent_of, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

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
# Of engines that store and load themselves: KV of other blocks is other KV on the CPU.
BLOCKS: dict[str, dict[str, Any]] = {
    "blocks of 16": {"block_size": 16},
    "blocks of 128": {"block_size": 128},
}
# Of engines that load what one with blocks of 32 tokens has stored.
READERS: dict[str, dict[str, Any]] = {
    "no prefix caching": {"enable_prefix_caching": False},
    "layer by layer": {"extra": {"layerwise": True}},
    "layer by layer, no prefix caching": {"extra": {"layerwise": True}, "enable_prefix_caching": False},
}
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 192, "max_num_seqs": 4, "extra": {"store": "prefill"}}


@pytest.fixture(scope="module")
def plain(alone: Engine) -> dict[str, list[int]]:
    """What vLLM says without kvpool."""
    return {name: alone.generate(one).tokens[0] for name, one in PROMPTS.items()}


@pytest.fixture(scope="module")
def chunked(engines: Engines, cluster: Cluster) -> Iterator[Engine]:
    """An engine whose steps are shorter than its prompts, and that stores chunks as they are computed."""
    with engines.start(agent=agent_of(cluster), **CHUNKED) as engine:
        yield engine


def stores(engine: Engine, plain: dict[str, list[int]], salt: str) -> None:
    """Have it store the first prompt, which nobody has with that salt."""
    before = engine.counters()
    assert engine.generate(PROMPTS["inside"], salt=salt).tokens == [plain["inside"]]
    engine.await_stored(int(before["stored_chunks"]) + 5)
    assert engine.counters()["loaded_chunks"] == before["loaded_chunks"]


def loads(engine: Engine, plain: dict[str, list[int]], salt: str, *, block_tokens: int) -> None:
    """Have it load what was stored, for one request and for many at once. block_tokens: 1 without prefix caching."""
    failed = engine.counters()["failed_load_chunks"]
    found = engine.generate(PROMPTS["inside"], salt=salt)
    assert found.tokens == [plain["inside"]]
    assert found.cached == [5 * CHUNK]
    engine.forget()
    # All at once, the pool's chunks in common.
    together = engine.generate(*PROMPTS.values(), salt=salt)
    assert together.tokens == list(plain.values())
    # Whoever comes second finds the first one's blocks, of which vLLM leaves one to be computed.
    assert together.cached[1] == 4 * CHUNK - block_tokens
    assert together.cached[2] == 4 * CHUNK
    assert together.cached[3] == 3 * CHUNK
    assert engine.counters()["failed_load_chunks"] == failed


@pytest.mark.smoke
def test_tokens_with_blocks_of_32(pair: tuple[Engine, Engine], plain: dict[str, list[int]]) -> None:
    stores(pair[0], plain, "blocks of 32")
    loads(pair[1], plain, "blocks of 32", block_tokens=32)


@pytest.mark.parametrize("name", BLOCKS)
def test_tokens_with_other_blocks(engines: Engines, cluster: Cluster, plain: dict[str, list[int]], name: str) -> None:
    arguments = {"agent": agent_of(cluster), **BLOCKS[name]}
    with engines.start(**arguments) as first, engines.start(**arguments) as second:
        stores(first, plain, name)
        loads(second, plain, name, block_tokens=arguments["block_size"])


@pytest.mark.parametrize("name", READERS)
def test_tokens_of_engines_configured_otherwise(
    engines: Engines, cluster: Cluster, pair: tuple[Engine, Engine], plain: dict[str, list[int]], name: str
) -> None:
    stores(pair[0], plain, name)
    with engines.start(agent=agent_of(cluster), **READERS[name]) as reader:
        loads(reader, plain, name, block_tokens=32 if READERS[name].get("enable_prefix_caching", True) else 1)


def test_tokens_with_chunked_prefill(pair: tuple[Engine, Engine], chunked: Engine, plain: dict[str, list[int]]) -> None:
    stores(pair[0], plain, "chunked")
    loads(chunked, plain, "chunked", block_tokens=32)


def test_what_is_stored_during_prefill_is_found(chunked: Engine, plain: dict[str, list[int]]) -> None:
    before = chunked.counters()["stored_chunks"]
    assert chunked.generate(*PROMPTS.values(), salt="prefill").tokens == list(plain.values())
    chunked.await_stored(int(before) + 8)  # 5 of the first, 1 of another tail, 2 of nothing in common
    chunked.forget()
    again = chunked.generate(*PROMPTS.values(), salt="prefill")
    assert again.tokens == list(plain.values())
    assert again.cached[0] >= 5 * CHUNK
    assert again.cached[4] == 2 * CHUNK


@pytest.mark.parametrize("store", ["prefill", "finish"])
def test_preemption_in_a_tiny_cache(engines: Engines, cluster: Cluster, alone: Engine, store: str) -> None:
    prompts = [prompt(300, seed=20 + number) for number in range(4)]
    expected = [alone.generate(one, new_tokens=60).tokens[0] for one in prompts]
    arguments: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 512}
    with engines.start(agent=agent_of(cluster), extra={"salt": f"tiny {store}", "store": store}, **arguments) as engine:
        for _ in range(2):
            assert engine.generate(*prompts, new_tokens=60).tokens == expected
        counted = engine.counters()
        assert counted["num_preemptions"] > 0
        assert counted["loaded_chunks"] > 0
        engine.forget()  # no block is lost


@pytest.mark.smoke
def test_a_salt_keeps_requests_apart(pair: tuple[Engine, Engine], plain: dict[str, list[int]]) -> None:
    engine = pair[1]
    stored = int(engine.counters()["stored_chunks"])
    assert engine.generate(PROMPTS["inside"], salt="a").tokens == [plain["inside"]]
    engine.await_stored(stored + 5)
    engine.forget()
    assert engine.generate(PROMPTS["inside"], salt="b").cached == [0]
    engine.await_stored(stored + 10)
    engine.forget()
    assert engine.generate(PROMPTS["inside"], salt="a").cached == [5 * CHUNK]
