"""vLLM's OpenAI server as a user starts it: its metrics name kvpool's, and its engine shares with others."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.vllm.api_server import completed, servers
from tests.vllm.engine import CHUNK, PATIENT, Engine, agent_of, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def metrics(url: str) -> dict[str, float]:
    """kvpool's, by name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r"^vllm:kvpool_(\w+)_total\{.*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


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
            return (found["loaded_chunks"], found["staging_tokens"], found["stored_chunks"]) == (5, 5 * CHUNK, 3)

        eventually_sync(counted, deadline_s=60.0)
    pair[1].forget()
    assert pair[1].generate(other, salt="server").cached == [3 * CHUNK]
