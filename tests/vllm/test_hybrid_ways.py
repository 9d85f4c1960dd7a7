"""Models with several KV cache groups, run in other ways: attention sinks, asynchronous scheduling, two ranks, another
connector beside kvpool's; and what they cost when the pool is empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, PATIENT, Engine, Engines, agent_of, prompt
from tests.vllm.models import make_mamba_model, make_sinks_model, make_windowed_model
from tests.vllm.test_multi_connector import NIXL, nixl

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
__all__ = ["nixl"]  # a fixture
WINDOW = 160


@dataclass(frozen=True, slots=True)
class Shape:
    """groups: KV cache groups. recurrent: some of them are of recurrent state."""

    make: Callable[[Path], Path]
    groups: int
    recurrent: bool = False

    def loadable(self, length: int) -> int:
        """Tokens of a prompt that may come from the pool, and are worth a load."""
        tokens = (length - 1) // CHUNK * CHUNK if self.recurrent else min(length // CHUNK * CHUNK, length - 1)
        return tokens if tokens >= CHUNK else 0


SHAPES = {
    "windows": Shape(make_windowed_model, 3),
    "sinks": Shape(make_sinks_model, 2),
    "states": Shape(make_mamba_model, 3, recurrent=True),
}
ARGUMENTS: dict[str, Any] = {"num_gpu_blocks_override": 240, "block_size": CHUNK}


@dataclass(frozen=True, slots=True)
class Served:
    """A model, what starts engines for it, and plain vLLM."""

    shape: Shape
    engines: Engines
    alone: Engine


@pytest.fixture(scope="module", params=list(SHAPES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    shape = SHAPES[request.param]
    with (
        Engines(shape.make(tmp_path_factory.mktemp(request.param))) as engines,
        engines.start(enable_prefix_caching=False, **ARGUMENTS) as alone,
    ):
        yield Served(shape, engines, alone)


def loads_all(served: Served, engine: Engine, prompts: list[list[int]], expected: list[list[int]], salt: str) -> None:
    """Wait until the pool has all that can be had of the prompts; tokens are right whatever it has."""
    for one, tokens in zip(prompts, expected, strict=True):

        def found(one: list[int] = one, tokens: list[int] = tokens) -> bool:
            engine.forget()
            answer = engine.generate(one, salt=salt)
            assert answer.tokens == [tokens]
            return answer.cached == [served.shape.loadable(len(one))]

        eventually_sync(found, deadline_s=60)


STEPS: dict[str, Any] = {"max_num_batched_tokens": 2 * CHUNK, "max_num_seqs": 4}


@pytest.mark.parametrize(
    "ways",
    [{}, STEPS, {**STEPS, "asynchronous": True}],
    ids=["as shipped", "short steps", "short asynchronous steps"],
)
def test_tokens_after_a_load_are_those_of_plain_vllm(served: Served, cluster: Cluster, ways: dict[str, Any]) -> None:
    lengths = [CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, CHUNK + WINDOW, 5 * CHUNK + 1, 9 * CHUNK + 32]
    prompts = [prompt(length, seed=length) for length in lengths]
    expected = [served.alone.generate(one).tokens[0] for one in prompts]
    agent, arguments, salt = agent_of(cluster), {**ARGUMENTS, **ways}, f"ways {ways}"
    with (
        served.engines.start(agent=agent, **arguments) as first,
        served.engines.start(agent=agent, **arguments) as second,
    ):
        assert first.generate(*prompts, salt=salt).tokens == expected
        loads_all(served, second, prompts, expected, salt)


@pytest.mark.parametrize("how", ["zeroes", "kept"])
def test_other_kv_of_any_group_changes_tokens(served: Served, cluster: Cluster, how: str) -> None:
    prompts = [prompt(3 * CHUNK + 5, seed=seed) for seed in (2, 3)]
    expected = [served.alone.generate(one).tokens[0] for one in prompts]
    agent, salt = agent_of(cluster), f"ways spoiled {how}"
    with served.engines.start(agent=agent, **ARGUMENTS) as engine:
        engine.generate(*prompts, salt=salt)
        loads_all(served, engine, prompts, expected, salt)
        for group in range(served.shape.groups):
            engine.forget()
            engine.probe("spoil_loads", group, "keep")
            assert engine.generate(prompts[1], salt=salt).cached == [3 * CHUNK]
            engine.probe("spoil_loads", group, how)
            spoiled = engine.generate(prompts[0], salt=salt)
            engine.probe("spoil_loads", -1, how)
            assert spoiled.cached == [3 * CHUNK]
            assert spoiled.tokens != [expected[0]], f"group {group}"


def test_two_ranks(served: Served, cluster: Cluster) -> None:
    prompts = [prompt(length, seed=length) for length in (2 * CHUNK + 1, 5 * CHUNK + 50)]
    expected = [served.alone.generate(one).tokens[0] for one in prompts]
    arguments = {**ARGUMENTS, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with served.engines.start(agent=agent_of(cluster), **arguments) as engine:
        assert [engine.generate(one, salt="ranks").tokens[0] for one in prompts] == expected
        loads_all(served, engine, prompts, expected, "ranks")
        engine.probe("spoil_loads", served.shape.groups - 1, "zeroes")
        engine.forget()
        assert engine.generate(prompts[1], salt="ranks").tokens != [expected[1]]


@pytest.mark.usefixtures("nixl")
def test_beside_another_connector(served: Served, cluster: Cluster) -> None:
    extra = {"agent": agent_of(cluster), "model_id": "tiny", "chunk_tokens": CHUNK, **PATIENT}
    kvpool = {
        "kv_connector": "KvPoolConnector",
        "kv_connector_module_path": "kvpool.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [kvpool, NIXL]},
    }
    asked = prompt(5 * CHUNK + 50, seed=90)
    expected = served.alone.generate(asked).tokens
    with served.engines.start(kv_transfer_config=both, **ARGUMENTS) as engine:
        assert engine.generate(asked, salt="both").tokens == expected
        loads_all(served, engine, [asked], expected, "both")


def test_an_empty_pool_costs_no_kv_memory(served: Served, cluster: Cluster) -> None:
    arguments = {**ARGUMENTS, "num_gpu_blocks_override": None}
    with served.engines.start(**arguments) as without:
        blocks = without.probe("block_count")
    with served.engines.start(agent=agent_of(cluster), **arguments) as with_pool:
        assert with_pool.probe("block_count") == blocks
        assert "kvpool: " not in with_pool.log(), "it is served"
