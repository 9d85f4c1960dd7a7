"""kvpool beside NIXL's connector under vLLM's MultiConnector, on the CPU: both start, and kvpool loads."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, PATIENT, VLLM_PYTHON_VARIABLE, Engine, Engines, agent_of, prompt, vllm_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("nixl")]

NIXL: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


@pytest.fixture(scope="module")
def nixl() -> None:
    python = os.environ[VLLM_PYTHON_VARIABLE]
    found = subprocess.run([python, "-c", "import nixl._api"], env=vllm_environment(), capture_output=True, check=False)
    if found.returncode:
        pytest.skip("vLLM's environment has no NIXL: pip install --no-deps nixl nixl-cu12")


@pytest.mark.parametrize("kvpool_first", [True, False])
def test_both_start_and_what_kvpool_has_is_loaded(
    engines: Engines, cluster: Cluster, alone: Engine, kvpool_first: bool
) -> None:
    extra = {"agent": agent_of(cluster), "model_id": "tiny", "chunk_tokens": CHUNK, **PATIENT}
    kvpool = {
        "kv_connector": "KvPoolConnector",
        "kv_connector_module_path": "kvpool.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    children = [kvpool, NIXL] if kvpool_first else [NIXL, kvpool]
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    tokens = prompt(5 * CHUNK + 50, seed=90 + kvpool_first)
    wanted = alone.generate(tokens).tokens
    with engines.start(kv_transfer_config=both) as first:
        answer = first.generate(tokens)
        assert (answer.tokens, answer.cached) == (wanted, [0])
        first.await_stored(5)
    with engines.start(kv_transfer_config=both) as second:
        answer = second.generate(tokens)
        assert (answer.tokens, answer.cached) == (wanted, [5 * CHUNK])
