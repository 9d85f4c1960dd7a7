"""An engine's whole way through the vLLM connector without vLLM: scheduler and worker side around a tiny model whose
paged cache lies as a GPU's kernels have it. tests/vllm does it with vLLM itself, which there is for the CPU only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.testing import eventually_sync
from tests.fixtures.gpu_cluster import GpuCluster, gpu_cluster
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.redis_server import running_redis
from tests.unit.connectors.tiny_models import prompt

pytestmark = pytest.mark.e2e

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
CHUNK, PROMPT_TOKENS, NEW_TOKENS = 64, 420, 8
FULL_CHUNKS = PROMPT_TOKENS // CHUNK
_WAITS = dict.fromkeys(
    ("start_wait_s", "match_timeout_s", "load_timeout_s", "load_timeout_min_s", "store_hold_max_s"), PATIENCE_S
)
Generate = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", params=DEVICES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GpuCluster, Any]]:
    """A cluster, and an engine process that generates with a fresh engine each time."""
    directory: Path = tmp_path_factory.mktemp("stand-in")
    with running_redis() as redis, gpu_cluster(directory, redis_url=redis.url) as cluster:
        cluster.agent("vllm", request.param.split(":")[0])
        child = cluster.engine("vllm", module="vllm_engine_process")
        cluster.wait_ready()

        def generate(seed: int, layout: str, block_tokens: int, **extra: Any) -> dict[str, Any]:
            """extra: of the connector."""
            settings = {"agent": cluster.endpoint("vllm"), "model_id": "tiny", "model_revision": "1", "load": "always"}
            answer: dict[str, Any] = child.ask(
                "generate",
                prompt=prompt(PROMPT_TOKENS, seed=seed)[0].tolist(),
                new_tokens=NEW_TOKENS,
                device=request.param,
                extra=settings | {"chunk_tokens": CHUNK, "min_load_tokens": 1} | _WAITS | extra,
                layout=layout,
                block_tokens=block_tokens,
            )
            assert answer["tokens"] == answer["plain"], answer
            return answer

        yield cluster, generate


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_fresh_engine_generates_from_what_another_stored(
    served: tuple[GpuCluster, Generate], layerwise: bool
) -> None:
    """Whatever its layout and block size."""
    _, generate = served
    seed = 10 + layerwise
    assert generate(seed, "LBNHC", 16, layerwise=layerwise)["loaded"] == 0
    # It is announced a little later; then whatever engine comes finds it.
    eventually_sync(lambda: generate(seed, "LBNHC", 16, layerwise=layerwise)["loaded"] == FULL_CHUNKS * CHUNK)
    for layout, block_tokens in [("LBNHC", 16), ("BLHNC", 32), ("LBHNC", 64)]:
        warm = generate(seed, layout, block_tokens, layerwise=layerwise)
        assert (warm["loaded"], warm["failed"]) == (FULL_CHUNKS * CHUNK, [])


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_damaged_page_is_computed_again(served: tuple[GpuCluster, Generate], layerwise: bool) -> None:
    cluster, generate = served
    seed = 20 + layerwise
    cold = generate(seed, "LBNHC", 16, layerwise=layerwise, store="prefill")
    assert cluster.damage(bytes.fromhex(cold["row"])) == 1

    def failed() -> dict[str, Any] | None:
        """Once the page is announced as on disk: an engine that finds nothing computes, and stores nothing again."""
        found = generate(seed, "LBNHC", 16, layerwise=layerwise)
        return found if found["failed"] else None

    found = eventually_sync(failed)
    assert found is not None
    assert found["loaded"] == 4 * CHUNK  # token 300 lies in chunk 4
