"""Latent attention, drafters that keep KV of their own, and KV in fp8 through the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, DEVICE, Engine, Engines, agent_of, prompt
from tests.vllm.faults import damage_disk, stopped_chunks
from tests.vllm.models import make_eagle3_drafter, make_eagle_drafter, make_mla_model
from tests.vllm.test_faults import load_under_way

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
DRAFTS = 2  # tokens of a draft
NEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """mla: else a Llama. method: of speculation; empty without a drafter. make_drafter: where the model has none of its
    own. accepts: whether the drafter is right now and then. fp8: KV is, and queries are on GPUs: their rounding, and
    with it tokens, depend on how many tokens are computed at once."""

    mla: bool = False
    block: int = 32
    method: str = ""
    make_drafter: Callable[[Path, Path], Path] | None = None
    accepts: bool = False
    fp8: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "mla": Kind(mla=True, block=16),
    "mla and mtp": Kind(mla=True, block=16, method="mtp", accepts=True),
    "eagle": Kind(method="eagle", make_drafter=make_eagle_drafter, accepts=True),
    "eagle3": Kind(method="eagle3", make_drafter=make_eagle3_drafter),
    "fp8_e4m3": Kind(fp8=True, arguments={"kv_cache_dtype": "fp8"}),
    "fp8_e5m2": Kind(fp8=True, arguments={"kv_cache_dtype": "fp8_e5m2"}),
}


@dataclass(frozen=True, slots=True)
class Served:
    """A model and engines that serve it: plain vLLM, and two that share."""

    kind: Kind
    engines: Engines
    arguments: dict[str, Any]
    alone: Engine
    first: Engine
    second: Engine


@pytest.fixture(scope="module", params=list(KINDS))
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    engines: Engines,
    model_dir: Path,
    cluster: Cluster,
) -> Iterator[Served]:
    kind, agent = KINDS[request.param], agent_of(cluster)
    if kind.fp8 and DEVICE == "cpu" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM has no KV in fp8 on a CPU without AVX-512")
    if request.param == "fp8_e5m2" and DEVICE == "cuda":
        pytest.skip("vLLM's attention on CUDA asserts that KV in fp8 is e4m3")
    model = make_mla_model(tmp_path_factory.mktemp("mla")) if kind.mla else model_dir
    arguments: dict[str, Any] = {"model": str(model), "block_size": kind.block, **kind.arguments}
    if kind.mla and DEVICE == "cuda":
        arguments["dtype"] = "float16"  # in float32 vLLM has kernels of latent attention for CPUs alone
    if kind.method:
        speculation: dict[str, Any] = {"method": kind.method, "num_speculative_tokens": DRAFTS}
        if kind.make_drafter is not None:
            speculation["model"] = str(kind.make_drafter(tmp_path_factory.mktemp("drafter"), model))
        arguments["speculative_config"] = speculation
    with (
        engines.start(enable_prefix_caching=kind.fp8, **arguments) as alone,
        engines.start(agent=agent, **arguments) as first,
        engines.start(agent=agent, **arguments) as second,
    ):
        if kind.method:
            for engine in (alone, first, second):
                engine.probe("watch_drafts")
        yield Served(kind, engines, arguments, alone, first, second)


def loadable(length: int) -> int:
    """Tokens of a prompt that may come from the pool."""
    return min(length // CHUNK * CHUNK, length - 1)


def answer(engine: Engine, asked: list[int], salt: str = "") -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's were not computed."""
    found = engine.generate(asked, salt=salt, new_tokens=NEW_TOKENS)
    return found.tokens[0], found.cached[0]


def plain_after(served: Served, computed: list[int], asked: list[int], cached: int) -> list[int]:
    """Tokens of plain vLLM; with KV in fp8 it has so many of them in its own cache, from a prompt that it computed."""
    if not served.kind.fp8:
        return answer(served.alone, asked)[0]
    served.alone.forget()
    answer(served.alone, computed)
    tokens, found = answer(served.alone, asked)
    assert found == cached
    return tokens


def drafts_of(engine: Engine) -> list[Any]:
    """What its drafter has proposed since the last call."""
    drafts: list[Any] = engine.probe("take_drafts")[0]
    return drafts


def has_stored(engine: Engine, asked: list[int], salt: str) -> list[int]:
    """Have it compute a prompt, and wait until the pool has its chunks; what it says."""
    before = engine.counters()["stored_chunks"]
    tokens, cached = answer(engine, asked, salt)
    assert cached == 0
    engine.await_stored(int(before) + len(asked) // CHUNK)
    return tokens


def test_tokens_after_a_load_are_those_of_plain_vllm(served: Served) -> None:
    edges = {2 * CHUNK, 5 * CHUNK, 2 * CHUNK + served.kind.block}
    lengths = sorted({edge + by for edge in edges for by in (-1, 0, 1)} | {CHUNK + 1, 4 * CHUNK + 50})
    if served.kind.fp8:  # of which the pool has as much as vLLM's own cache, whole blocks
        lengths = [chunks * CHUNK + more for chunks in (1, 2, 5) for more in (1, 20, served.kind.block)]
    prompts = [prompt(length, seed=length) for length in lengths]
    computed = [answer(served.alone, one)[0] for one in prompts]
    assert [has_stored(served.first, one, "edges") for one in prompts] == computed
    expected = [plain_after(served, one, one, loadable(len(one))) for one in prompts]
    found = [answer(served.second, one, "edges") for one in prompts]
    assert found == [(tokens, loadable(len(one))) for one, tokens in zip(prompts, expected, strict=True)]
    served.second.forget()
    together = served.second.generate(*prompts, salt="edges", new_tokens=NEW_TOKENS)
    assert together.tokens == expected or served.kind.fp8
    assert together.cached == [loadable(length) for length in lengths]
    if served.kind.accepts:
        assert served.second.counters()["spec_decode_num_accepted_tokens"] > 0


def test_prefixes_end_at_any_chunk(served: Served) -> None:
    shared = prompt(6 * CHUNK + 5, seed=1)
    has_stored(served.first, shared, "prefixes")
    for chunks in range(1, 7):
        asked = shared[: chunks * CHUNK] + prompt(40, seed=chunks)
        served.second.forget()
        expected = plain_after(served, shared, asked, chunks * CHUNK)
        assert answer(served.second, asked, "prefixes") == (expected, chunks * CHUNK)


def test_a_tiny_cache_and_short_steps(served: Served, cluster: Cluster) -> None:
    if served.kind.fp8:
        pytest.skip("tokens depend on how many are computed at once")
    if served.kind.method == "mtp":
        pytest.skip("plain vLLM, too, stops answering with MTP in so small a cache")
    shared = prompt(2 * CHUNK, seed=7)
    prompts = [shared + prompt(CHUNK - 8 - 6 * number, seed=70 + number) for number in range(6)]
    expected = [served.alone.generate(one, new_tokens=48).tokens[0] for one in prompts]
    tokens = 832 if served.kind.mla else 960  # of which drafts take some
    small = {"num_gpu_blocks_override": tokens // served.kind.block, "max_model_len": 4 * CHUNK}
    steps = {"max_num_batched_tokens": CHUNK + 32, "max_num_seqs": 6}
    arguments = {**served.arguments, **small, **steps}
    with served.engines.start(agent=agent_of(cluster), **arguments) as engine:
        for _ in range(2):
            assert engine.generate(*prompts, new_tokens=48, salt="tiny").tokens == expected
            engine.forget()
        counted = engine.counters()
        assert counted["num_preemptions"] > 0
        assert counted["loaded_chunks"] > 0


def test_an_aborted_load_leaves_nothing_behind(served: Served, cluster: Cluster) -> None:
    asked = prompt(8 * CHUNK + 20, seed=8)
    has_stored(served.first, asked, "aborted")
    expected = plain_after(served, asked, asked, 8 * CHUNK)
    before = stopped_chunks(cluster)
    with load_under_way(cluster, served.second, asked, "aborted") as number:
        served.second.abort(number)
        served.second.forget()
    assert stopped_chunks(cluster) > before
    assert answer(served.second, asked, "aborted") == (expected, 8 * CHUNK)


def test_a_damaged_page_costs_its_chunk_and_those_behind(served: Served, cluster: Cluster) -> None:
    asked = prompt(3 * CHUNK + 20, seed=9)
    expected = has_stored(served.first, asked, "damaged")
    damage_disk(cluster)
    failed = served.second.counters()["failed_load_chunks"]
    tokens, _ = answer(served.second, asked, "damaged")
    assert tokens == expected or served.kind.fp8
    assert served.second.counters()["failed_load_chunks"] > failed


@pytest.mark.parametrize("how", ["zeroes", "kept"])
def test_other_kv_changes_tokens(served: Served, how: str) -> None:
    """kept: of another prompt."""
    asked, other = prompt(4 * CHUNK + 7, seed=2), prompt(4 * CHUNK + 7, seed=3)
    salt = f"spoiled {how}"
    expected = has_stored(served.first, asked, salt)
    has_stored(served.first, other, salt)
    served.second.probe("spoil_loads", 0, "keep")
    assert answer(served.second, other, salt)[1] == 4 * CHUNK
    served.second.forget()
    served.second.probe("spoil_loads", 0, how)
    tokens, cached = answer(served.second, asked, salt)
    served.second.probe("spoil_loads", -1, how)
    served.second.forget()
    assert cached == 4 * CHUNK
    assert tokens != expected
    assert answer(served.second, asked, salt)[0] == expected == answer(served.alone, asked)[0]


def test_a_drafters_kv_is_loaded_as_the_models(served: Served) -> None:
    """With other KV of its own it drafts other tokens, and the model says what it always says."""
    if not served.kind.method:
        pytest.skip("no drafter")
    asked = prompt(4 * CHUNK + 7, seed=4)
    has_stored(served.first, asked, "drafts")
    drafts_of(served.alone)
    expected = answer(served.alone, asked)[0]
    drafted = drafts_of(served.alone)
    served.second.forget()
    drafts_of(served.second)
    assert answer(served.second, asked, "drafts") == (expected, 4 * CHUNK)
    assert drafts_of(served.second) == drafted
    served.second.forget()
    drafts_of(served.second)
    served.second.probe("spoil_loads", 0, "zeroes", [-1])
    spoiled = answer(served.second, asked, "drafts")
    served.second.probe("spoil_loads", -1, "zeroes")
    assert spoiled == (expected, 4 * CHUNK)
    assert drafts_of(served.second) != drafted
    served.second.forget()
