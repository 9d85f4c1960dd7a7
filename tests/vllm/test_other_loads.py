"""kvpool beside a connector that is loading, under vLLM's MultiConnector."""

from __future__ import annotations

import pytest

from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, PATIENT, Engine, Engines, agent_of, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
FIRST_TOKEN = 77  # of tests.vllm.endless_connector, which only vLLM's interpreter can import


def test_a_request_aborted_during_anothers_load_stores_nothing(
    engines: Engines, cluster: Cluster, alone: Engine
) -> None:
    extra = {"agent": agent_of(cluster), "model_id": "tiny", "chunk_tokens": CHUNK, **PATIENT}
    kvpool = {
        "kv_connector": "KvPoolConnector",
        "kv_connector_module_path": "kvpool.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "salt": "another's load"},
    }
    endless = {
        "kv_connector": "EndlessConnector",
        "kv_connector_module_path": "tests.vllm.endless_connector",
        "kv_role": "kv_both",
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [kvpool, endless]},
    }
    claimed, other = [FIRST_TOKEN, *prompt(4 * CHUNK + 20, seed=95)], [5, *prompt(2 * CHUNK + 9, seed=96)]
    with engines.start(kv_transfer_config=both) as engine:
        waiting = engine.begin(claimed)
        wanted = alone.generate(other).tokens
        assert engine.generate(other).tokens == wanted
        engine.await_stored(2)
        engine.abort(waiting)
        for _ in range(5):  # what was ordered when it was aborted would be stored with these steps
            assert engine.generate(other).tokens == wanted
        assert engine.counters()["stored_chunks"] == 2
