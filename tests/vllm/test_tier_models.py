"""Models through vLLM's offloading and the tier below it: tokens after a load are plain vLLM's, and would not be with
other KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import DEVICE, Engine, Engines, prompt
from tests.vllm.models import (
    make_delta_net_model,
    make_mamba_model,
    make_mla_model,
    make_model,
    make_sinks_model,
    make_windowed_model,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
WINDOW = 160
SPEC = (
    {"spec_name": "TieringOffloadingSpec"}
    if DEVICE == "cuda"
    else {"spec_name": "HostTieringSpec", "spec_module_path": "tests.vllm.host_offload"}
)


@dataclass(frozen=True, slots=True)
class Kind:
    """block: tokens. chunk_blocks: of what is offloaded in one piece. recurrent: with state, which vLLM keeps at the
    edges of blocks where a step ends: plain vLLM then needs its prefix cache on to compute in the same steps."""

    make: Callable[[Path], Path]
    block: int = 32
    chunk_blocks: int = 2
    dtype: str = "float32"
    edges: tuple[int, ...] = ()  # that are none of chunks
    recurrent: bool = False

    @property
    def chunk(self) -> int:
        return self.block * self.chunk_blocks

    @property
    def lengths(self) -> list[int]:
        """Of prompts: around the edges of chunks and of what else there is, and a long one."""
        edges = (self.chunk, 5 * self.chunk, *self.edges)
        return sorted({edge + by for edge in edges for by in (-1, 0, 1)} | {7 * self.chunk + 4})

    @property
    def arguments(self) -> dict[str, Any]:
        return {"block_size": self.block, "dtype": self.dtype, "num_gpu_blocks_override": 640}


KINDS = {
    "full attention": Kind(make_model),
    "some layers with a window": Kind(make_windowed_model, edges=(WINDOW, 64 + WINDOW)),
    "attention sinks": Kind(make_sinks_model, edges=(WINDOW, 64 + WINDOW)),
    # In float32 vLLM has kernels of latent attention for CPUs alone.
    "latent attention": Kind(
        make_mla_model, block=16, chunk_blocks=4, dtype="float16" if DEVICE == "cuda" else "float32"
    ),
    "mamba 2": Kind(make_mamba_model, block=128, chunk_blocks=1, recurrent=True),
    "delta net": Kind(make_delta_net_model, block=256, chunk_blocks=1, dtype="bfloat16", recurrent=True),
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def engines(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines(kind.make(tmp_path_factory.mktemp("model"))) as engines:
        yield engines


@contextmanager
def offloading(kind: Kind, engines: Engines, cluster: Cluster, revision: str) -> Iterator[Engine]:
    """An engine with a CPU region of 64 MiB and the tier below it."""
    (index,), (store,) = cluster.state.of_role("index"), cluster.state.of_role("pagestore")
    limits = ("match_timeout_s", "load_timeout_s", "store_timeout_s", "room_wait_s", "lookup_timeout_s")
    tier: dict[str, Any] = {
        "type": "KvPoolTier",
        "module_path": "kvpool.connectors.vllm.tier",
        "index_endpoints": [index.endpoints["endpoint"]],
        "pagestore": f"unix:{store.endpoints['socket']}",
        "model_revision": revision,
        "weight_version": "1",
        **dict.fromkeys(limits, 60.0),
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **SPEC,
            "cpu_bytes_to_use": 64 << 20,
            "blocks_per_chunk": kind.chunk_blocks,
            "secondary_tiers": [tier],
        },
    }
    with engines.start(kv_transfer_config=transfer, enable_prefix_caching=True, **kind.arguments) as engine:
        yield engine


def has_stored(engine: Engine) -> None:
    """Wait until all that was offered is in the pool; an idle engine hears of it with its next request."""
    seen: list[float] = []

    def settled() -> bool:
        seen.append(engine.counters().get("tier_stored_chunks", 0.0))
        return len(seen) > 2 and seen[-3] == seen[-1] > 0

    eventually_sync(settled, deadline_s=60)


def has_reached_the_pool(kind: Kind, engine: Engine) -> None:
    """Wait until it loads. On a busy machine a pagestore may not answer in time when the tier starts, which computes
    then; each prompt is asked for once, as vLLM keeps it in its own tier."""
    for one in first_prompts(kind):
        engine.generate(one, new_tokens=2)
        if engine.counters()["tier_loaded_chunks"]:
            return
    raise AssertionError(engine.log()[-3000:])


def first_prompts(kind: Kind) -> list[list[int]]:
    """Prompts to find out with whether the tier loads."""
    return [prompt(kind.chunk + 4, seed=10_000 + number) for number in range(12)]


def test_tokens_after_a_load_are_those_of_plain_vllm_and_other_kv_changes_them(
    kind: Kind, engines: Engines, cluster: Cluster
) -> None:
    prompts = [prompt(length, seed=length) for length in kind.lengths]
    revision = str(id(engines))
    with engines.start(enable_prefix_caching=kind.recurrent, **kind.arguments) as alone:
        expected = [alone.generate(one).tokens[0] for one in prompts]
    with offloading(kind, engines, cluster, revision) as first:
        assert [first.generate(one).tokens[0] for one in prompts] == expected
        for one in first_prompts(kind):
            first.generate(one, new_tokens=2)
        has_stored(first)
    with offloading(kind, engines, cluster, revision) as second:
        has_reached_the_pool(kind, second)
        before = second.counters()
        found = [second.generate(one) for one in prompts]
        assert [one.tokens[0] for one in found] == expected
        for one, answer in zip(prompts, found, strict=True):  # a last chunk with the prompt's last token: as vLLM likes
            assert answer.cached[0] in {(len(one) - by) // kind.chunk * kind.chunk for by in (0, 1)}, len(one)
        after = second.counters()
        assert after["tier_loaded_chunks"] > before["tier_loaded_chunks"]
        assert after.get("tier_missed_chunks", 0) == before.get("tier_missed_chunks", 0)
    for how in ("zeroes", "kept"):
        with offloading(kind, engines, cluster, revision) as spoiled:
            spoiled.probe("spoil_offload", "")
            has_reached_the_pool(kind, spoiled)  # by a load of another prompt, which is kept
            spoiled.probe("spoil_offload", how)
            long = spoiled.generate(prompts[-1])
            assert long.cached == found[-1].cached
            assert long.tokens[0] != expected[-1], how
