"""vLLM's OpenAI server as a user starts it: its metrics name kvpool's, and its engine shares with others."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.vllm.api_server import completed, completion, servers
from tests.vllm.engine import CHUNK, PATIENT, Engine, agent_of, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def metrics(url: str) -> dict[str, float]:
    """kvpool's, by name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r"^vllm:kvpool_(\w+)_total\{.*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def check_parameters(url: str, alone: Engine) -> None:
    """What a request asks for by kv_transfer_params is done, and what cannot be read is refused by name."""
    before, tokens = metrics(url), prompt(3 * CHUNK + 5, seed=92)
    expected = alone.generate(tokens).tokens[0]
    private = completion(url, tokens, "server", kv_transfer_params={"kvpool": {"load": False, "store": False}})
    refused = completion(url, tokens, "server", kv_transfer_params={"kvpool": {"prio": 3}})
    for answer in (private, refused):
        assert answer["choices"][0]["token_ids"] == expected
    assert private.get("kv_transfer_params") is None
    assert "has no 'prio'" in refused["kv_transfer_params"]["kvpool"]["refused"]
    kept = completion(url, tokens, "server", kv_transfer_params={"kvpool": {"ttl_s": 3600, "priority": 5}})
    assert kept["choices"][0]["token_ids"] == expected

    def stored() -> bool:
        completed(url, [5, 6, 7], "server")
        return metrics(url)["stored_chunks"] == before["stored_chunks"] + 3

    eventually_sync(stored, deadline_s=60.0)
    assert metrics(url)["loaded_chunks"] == before["loaded_chunks"]


def test_a_server_shares_with_other_engines_and_says_so_in_its_metrics(
    model_dir: Path, cluster: Cluster, pair: tuple[Engine, Engine], alone: Engine
) -> None:
    tokens, other = prompt(5 * CHUNK + 50, seed=90), prompt(3 * CHUNK + 5, seed=91)
    stored = int(pair[0].counters()["stored_chunks"])
    expected = pair[0].generate(tokens, salt="server").tokens[0]
    assert expected == alone.generate(tokens).tokens[0]
    pair[0].await_stored(stored + 5)
    extra = PATIENT | {"agent": agent_of(cluster), "model_id": "tiny"}
    with servers(model_dir, [extra]) as [url]:
        assert completed(url, tokens, "server") == expected
        assert completed(url, other, "server") == alone.generate(other).tokens[0]

        def counted() -> bool:
            completed(url, [5, 6, 7], "server")  # an idle engine hears of its stores with its next request
            found = metrics(url)
            loaded_tokens = found["staging_tokens"] + found["gpu_tokens"]  # on a GPU out of the other engine's cache
            return (found["loaded_chunks"], loaded_tokens, found["stored_chunks"]) == (5, 5 * CHUNK, 3)

        eventually_sync(counted, deadline_s=60.0)
        check_parameters(url, alone)
    pair[1].forget()
    assert pair[1].generate(other, salt="server").cached == [3 * CHUNK]
