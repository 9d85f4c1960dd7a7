"""vLLM's OpenAI server as a user starts it: its metrics name kvpool's, and its engine shares with others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import (
    CHUNK,
    REPOSITORY,
    VLLM_PYTHON_VARIABLE,
    Engine,
    agent_of,
    free_port,
    prompt,
    vllm_environment,
)
from tests.vllm.engine_server import ENVIRONMENT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
START_S = 240.0


@contextmanager
def server(model_dir: Path, extra: dict[str, Any]) -> Iterator[str]:
    """Its URL."""
    port = free_port()
    transfer = {
        "kv_connector": "KvPoolConnector",
        "kv_connector_module_path": "kvpool.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    command = [os.environ[VLLM_PYTHON_VARIABLE], "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_dir), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "4096", "--enforce-eager"]
    command += ["--skip-tokenizer-init", "--kv-transfer-config", json.dumps(transfer)]
    with (model_dir / "server.log").open("w+b") as log:
        environment = {**vllm_environment(), **ENVIRONMENT}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=REPOSITORY)
        try:
            url = f"http://127.0.0.1:{port}"
            eventually_sync(lambda: answers(f"{url}/health") or process.poll() is not None, deadline_s=START_S)
            assert process.poll() is None, (model_dir / "server.log").read_text()[-3000:]
            yield url
        finally:
            process.terminate()
            process.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def completed(url: str, tokens: list[int], salt: str) -> list[int]:
    """Greedy tokens after these."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"cache_salt": salt, "return_token_ids": True, "detokenize": False}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return found


def metrics(url: str) -> dict[str, float]:
    """kvpool's, by name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
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
    extra = {"agent": agent_of(cluster), "model_id": "tiny", "load": "always"}
    with server(model_dir, extra) as url:
        assert completed(url, tokens, "server") == expected
        assert completed(url, other, "server") == alone.generate(other).tokens[0]

        def counted() -> bool:
            completed(url, [5, 6, 7], "server")  # an idle engine hears of its stores with its next request
            found = metrics(url)
            return (found["loaded_chunks"], found["staging_tokens"], found["stored_chunks"]) == (5, 5 * CHUNK, 3)

        eventually_sync(counted, deadline_s=20.0)
    pair[1].forget()
    assert pair[1].generate(other, salt="server").cached == [3 * CHUNK]
