"""Models with recurrent state (Mamba 2, a gated delta net) through the pool: a chunk is the state after it.

vLLM keeps a state where a step ends at the edge of a block, of a prompt's last full block always. Tokens are compared
with those of plain vLLM with its prefix cache on, which goes on from the same boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import Engine, Engines, agent_of, prompt
from tests.vllm.faults import damage_disk, stopped_chunks
from tests.vllm.models import make_delta_net_model, make_mamba_model
from tests.vllm.test_faults import load_under_way

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@dataclass(frozen=True, slots=True)
class Kind:
    """state_groups: KV cache groups of recurrent layers, the first ones. block: tokens of a block, and of a chunk.
    model_runner_v2: instead of the first one; on a CPU a step of it takes a quarter of a second."""

    make: Callable[[Path], Path]
    dtype: str
    block: int
    state_groups: int
    model_runner_v2: bool = False

    @property
    def groups(self) -> int:
        return self.state_groups + 1


KINDS = {
    "mamba": Kind(make_mamba_model, "float32", 128, 2),
    "mamba_v2": Kind(make_mamba_model, "float32", 128, 2, model_runner_v2=True),
    "delta_net": Kind(make_delta_net_model, "bfloat16", 256, 3),
    "delta_net_v2": Kind(make_delta_net_model, "bfloat16", 256, 3, model_runner_v2=True),
}


@dataclass(frozen=True, slots=True)
class Served:
    """A model and engines that serve it: plain vLLM, and two that share."""

    kind: Kind
    engines: Engines
    alone: Engine
    first: Engine
    second: Engine
    arguments: dict[str, Any]

    def expected(self, *prompts: list[int], **more: Any) -> list[list[int]]:
        """Tokens of plain vLLM, with the steps of a prompt that was not seen before."""
        self.alone.forget()
        return self.alone.generate(*prompts, **more).tokens

    def boundary(self, length: int) -> int:
        """Tokens of a prompt that may come from the pool: a state goes on from its own boundary alone."""
        return (length - 1) // self.kind.block * self.kind.block


def arguments_of(kind: Kind) -> dict[str, Any]:
    return {
        "dtype": kind.dtype,
        "block_size": kind.block,
        "num_gpu_blocks_override": 240,
        "enable_prefix_caching": True,
    }


@pytest.fixture(scope="module", params=list(KINDS))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cluster: Cluster
) -> Iterator[Served]:
    kind, agent = KINDS[request.param], agent_of(cluster)
    # Both model runners make the same KV of a model: one would find in the pool what the other has stored.
    arguments = {"extra": {"chunk_tokens": kind.block, "salt": request.param}, **arguments_of(kind)}
    with (
        Engines(kind.make(tmp_path_factory.mktemp(request.param)), model_runner_v2=kind.model_runner_v2) as engines,
        engines.start(**arguments_of(kind)) as alone,
        engines.start(agent=agent, **arguments) as first,
        engines.start(agent=agent, **arguments) as second,
    ):
        yield Served(kind, engines, alone, first, second, arguments)


def has_stored(served: Served, tokens: list[int], salt: str, *, known_chunks: int = 0) -> None:
    """Have the first engine compute the prompt and wait until the pool has its chunks and its last state."""
    before = served.first.counters()["stored_chunks"]
    served.first.generate(tokens, salt=salt)
    chunks = len(tokens) // served.kind.block - known_chunks
    served.first.await_stored(int(before) + chunks + served.kind.state_groups)


def test_tokens_after_a_load_are_those_of_plain_vllm(served: Served) -> None:
    block = served.kind.block
    lengths = sorted({edge * block + by for edge in (1, 2, 5) for by in (-1, 0, 1, 50)})
    prompts = [prompt(length, seed=length) for length in lengths]
    expected = [served.expected(one)[0] for one in prompts]
    assert [served.first.generate(one, salt="edges").tokens[0] for one in prompts] == expected
    for one, tokens in zip(prompts, expected, strict=True):

        def found(one: list[int] = one, tokens: list[int] = tokens) -> bool:
            served.second.forget()
            answer = served.second.generate(one, salt="edges")
            assert answer.tokens == [tokens]
            return answer.cached == [served.boundary(len(one))]

        eventually_sync(found, deadline_s=60)


@pytest.mark.parametrize("how", ["zeroes", "kept"])
def test_another_state_of_any_group_changes_tokens(served: Served, how: str) -> None:
    block = served.kind.block
    asked, other = prompt(3 * block + 5, seed=2), prompt(3 * block + 5, seed=3)
    salt = f"spoiled {how}"
    for one in (asked, other):
        has_stored(served, one, salt)
    [expected] = served.expected(asked)
    for group in range(served.kind.groups):
        served.second.forget()
        served.second.probe("spoil_loads", group, "keep")
        assert served.second.generate(other, salt=salt).cached == [3 * block]
        served.second.probe("spoil_loads", group, how)
        spoiled = served.second.generate(asked, salt=salt)
        served.second.probe("spoil_loads", -1, how)
        assert spoiled.cached == [3 * block]
        assert spoiled.tokens != [expected], f"group {group}"
        served.second.forget()
        assert served.second.generate(asked, salt=salt).tokens == [expected]


def test_a_prefix_without_a_state_of_its_end_is_loaded_up_to_one_that_has_it(served: Served) -> None:
    """Of a prompt that is computed in one step vLLM has one state: nothing but its own boundary can be loaded. In
    bfloat16 KV depends on how many tokens were computed at once, so plain vLLM has what was stored in its own cache."""
    block = served.kind.block
    shared = prompt(6 * block + 5, seed=4)
    has_stored(served, shared[: 2 * block + 5], "prefixes")
    has_stored(served, shared, "prefixes", known_chunks=2)
    known = [] if served.kind.dtype == "float32" else [shared[: 2 * block + 5], shared]
    for chunks, loaded in ((7, 6), (6, 6), (5, 2), (3, 2), (2, 2), (1, 0)):
        asked = shared[: chunks * block] + prompt(40, seed=100 + chunks)
        served.second.forget()
        found = served.second.generate(asked, salt="prefixes")
        assert found.cached == [min(loaded, len(shared) // block) * block]
        served.alone.forget()
        for one in known:
            served.alone.generate(one)
        plain = served.alone.generate(asked)
        assert plain.cached == (found.cached if known else [0])
        assert found.tokens == plain.tokens


def test_chunked_prefill_and_requests_at_once(served: Served, cluster: Cluster) -> None:
    """Steps shorter than prompts: a state at the end of each, and blocks that are used again while they are stored."""
    block = served.kind.block
    prompts = [prompt(length, seed=60 + length) for length in (block + 40, 3 * block + 7, 5 * block + 99)]
    arguments = {**served.arguments, "max_num_batched_tokens": 2 * block, "max_num_seqs": 4}
    plain = {name: value for name, value in arguments.items() if name != "extra"}
    with served.engines.start(**plain) as alone:
        expected = [alone.generate(one).tokens[0] for one in prompts]
    with served.engines.start(agent=agent_of(cluster), **arguments) as first:
        for one, tokens in zip(prompts, expected, strict=True):
            assert first.generate(one, salt="chunked").tokens == [tokens]
        first.await_stored(sum(len(one) // block + served.kind.state_groups for one in prompts))
    with served.engines.start(agent=agent_of(cluster), **arguments) as second:
        again = [second.generate(one, salt="chunked") for one in prompts]
        assert [one.tokens[0] for one in again] == expected
        assert [one.cached[0] for one in again] == [served.boundary(len(one)) for one in prompts]
        second.forget()
        together = second.generate(*prompts, salt="chunked")
        assert together.cached == [served.boundary(len(one)) for one in prompts]


def test_states_of_generated_tokens_are_found_again(served: Served) -> None:
    """A request that goes on after them gets the tokens that came after them, in bfloat16 too: there vLLM's KV of a
    prompt is not that of the same tokens generated one by one, so one token is computed of what it asks."""
    block = served.kind.block
    asked = prompt(block - 20, seed=5)
    [expected] = served.expected(asked, new_tokens=block + 60)
    before = served.first.counters()["stored_chunks"]
    assert served.first.generate(asked, salt="generated", new_tokens=block + 60).tokens == [expected]
    served.first.await_stored(int(before) + 2 * served.kind.groups)
    tokens = asked + expected
    served.second.forget()
    gone_on = served.second.generate(tokens[: 2 * block + 1], salt="generated")
    assert gone_on.cached == [2 * block]
    assert gone_on.tokens == [tokens[2 * block + 1 :][:12]]
    turn = tokens + prompt(20, seed=6)
    served.second.forget()
    answer = served.second.generate(turn, salt="generated", new_tokens=4)
    assert answer.cached == [2 * block]
    if served.kind.dtype == "float32":
        assert answer.tokens == served.expected(turn, new_tokens=4)


def test_a_tiny_cache(served: Served, cluster: Cluster) -> None:
    block = served.kind.block
    new_tokens = 48
    shared = prompt(2 * block, seed=7)
    # All of them want another block soon after their first tokens.
    prompts = [shared + prompt(block - 8 - 6 * number, seed=70 + number) for number in range(6)]
    expected = [served.expected(one, new_tokens=new_tokens)[0] for one in prompts]
    arguments = {**served.arguments, "num_gpu_blocks_override": 7 * served.kind.groups, "max_model_len": 5 * block}
    with served.engines.start(agent=agent_of(cluster), **arguments) as engine:
        for _ in range(2):
            answers = engine.generate(*prompts, new_tokens=new_tokens, salt="tiny").tokens
            engine.forget()
            if served.kind.dtype == "float32":  # in bfloat16 tokens depend on what is computed beside them
                assert answers == expected
        counted = engine.counters()
        assert counted["num_preemptions"] > 0
        assert counted["loaded_chunks"] > 0


def test_an_aborted_load_leaves_nothing_behind(served: Served, cluster: Cluster) -> None:
    block = served.kind.block
    asked = prompt(8 * block + 20, seed=8)
    expected = served.expected(asked)
    has_stored(served, asked, "aborted")
    before = stopped_chunks(cluster)
    with load_under_way(cluster, served.second, asked, "aborted") as number:
        served.second.abort(number)
        served.second.forget()
    assert stopped_chunks(cluster) > before
    assert served.second.generate(asked, salt="aborted").tokens == expected


def test_damaged_pages_cost_the_load(served: Served, cluster: Cluster) -> None:
    asked = prompt(3 * served.kind.block + 20, seed=9)
    expected = served.expected(asked)
    has_stored(served, asked, "damaged")
    damage_disk(cluster)
    failed = served.second.counters()["failed_load_chunks"]
    assert served.second.generate(asked, salt="damaged").tokens == expected
    assert served.second.counters()["failed_load_chunks"] > failed
    assert "EngineDead" not in served.second.log()
