"""Models through vLLM's offloading and the tier below it: tokens after a load are plain vLLM's, and would not be with
other KV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import Engine, Engines, prompt
from tests.vllm.models import make_model, make_windowed_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
BLOCK, CHUNK_BLOCKS = 32, 2
CHUNK = BLOCK * CHUNK_BLOCKS
WINDOW = 160
ARGUMENTS: dict[str, Any] = {"block_size": BLOCK, "num_gpu_blocks_override": 640}
MODELS = ["full attention", "some layers with a window"]
# Around the edges of chunks and of the window.
LENGTHS = sorted({edge + by for edge in (CHUNK, 5 * CHUNK, WINDOW, CHUNK + WINDOW) for by in (-1, 0, 1)} | {900})


@pytest.fixture(scope="module", params=MODELS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    directory = tmp_path_factory.mktemp("model")
    model = (
        make_model(directory) if request.param == MODELS[0] else make_windowed_model(directory, window_tokens=WINDOW)
    )
    with Engines(model) as engines:
        yield engines


@contextmanager
def offloading(engines: Engines, cluster: Cluster, revision: str) -> Iterator[Engine]:
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
            "spec_name": "HostTieringSpec",
            "spec_module_path": "tests.vllm.host_offload",
            "cpu_bytes_to_use": 64 << 20,
            "blocks_per_chunk": CHUNK_BLOCKS,
            "secondary_tiers": [tier],
        },
    }
    with engines.start(kv_transfer_config=transfer, **ARGUMENTS) as engine:
        yield engine


def has_stored(engine: Engine) -> None:
    """Wait until all that was offered is in the pool; an idle engine hears of it with its next request."""
    seen: list[float] = []

    def settled() -> bool:
        seen.append(engine.counters().get("tier_stored_chunks", 0.0))
        return len(seen) > 2 and seen[-3] == seen[-1] > 0

    eventually_sync(settled, deadline_s=60)


def test_tokens_after_a_load_are_those_of_plain_vllm_and_zeroes_change_them(engines: Engines, cluster: Cluster) -> None:
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    revision = str(id(engines))
    with engines.start(enable_prefix_caching=False, **ARGUMENTS) as alone:
        expected = [alone.generate(one).tokens[0] for one in prompts]
    with offloading(engines, cluster, revision) as first:
        assert [first.generate(one).tokens[0] for one in prompts] == expected
        has_stored(first)
    with offloading(engines, cluster, revision) as second:
        found = [second.generate(one) for one in prompts]
        assert [one.tokens[0] for one in found] == expected
        for one, answer in zip(prompts, found, strict=True):  # a last chunk with the prompt's last token: as vLLM likes
            assert answer.cached[0] in (len(one) // CHUNK * CHUNK, (len(one) - 1) // CHUNK * CHUNK), len(one)
        counters = second.counters()
        assert counters["tier_loaded_chunks"] > 0 and counters.get("tier_missed_chunks", 0) == 0
    with offloading(engines, cluster, revision) as spoiled:
        spoiled.probe("spoil_offload")
        long = spoiled.generate(prompts[-1])
        assert long.cached == found[-1].cached
        assert long.tokens[0] != expected[-1]
