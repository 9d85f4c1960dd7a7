"""What do users of vLLM's own OpenAI server see with and without kvpool, under one load of conversations?

vLLM's CPU build serves a Llama with random weights (float32), one thread; `python -m bench serve` puts one seeded load
on a server without kvpool, on one with an empty pool, and on a restarted one that finds what the one before it
had stored. Each server is a fresh process, so its own prefix cache is cold.

Run: KVPOOL_VLLM_PYTHON=.venv-vllm/bin/python python -m bench.vllm_serve --out DIRECTORY [--requests N]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.waiting import until
from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import REPOSITORY, VLLM_PYTHON_VARIABLE, agent_of
from tests.vllm.models import make_model

START_S = 180.0
# Conversations of two turns about ten texts, some asked about more often than others; two users.
LOAD = (
    *("--prefixes", "10", "--zipf", "0.8", "--prefix-tokens", "1024", "--suffix-tokens", "24:96"),
    *("--turns", "2", "--turn-tokens", "32", "--output-tokens", "16", "--concurrency", "2", "--seed", "5"),
    *("--token-ids", "1:2048", "--extra-body", '{"ignore_eos": true, "detokenize": false}'),
    *("--goodput", "ttft=1s"),
)
# Of 32 tokens: an engine's own cache holds some six conversations, as a GPU's holds a part of what its users ask for.
OWN_BLOCKS = 224


@contextmanager
def server(model: Path, agent: str, log: Path) -> Iterator[str]:
    """vLLM's API server; with kvpool if `agent` is not empty. Gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [
        *("--model", str(model), "--dtype", "float32", "--skip-tokenizer-init", "--enforce-eager"),
        *("--max-model-len", "2048", "--block-size", "32", "--num-gpu-blocks-override", str(OWN_BLOCKS)),
        *("--host", "127.0.0.1", "--port", str(port), "--enable-prompt-tokens-details"),
    ]
    if agent:
        transfer = {
            "kv_connector": "KvPoolConnector",
            "kv_connector_module_path": "kvpool.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"agent": agent, "model_id": "tiny"},
        }
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "clients/python"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    command = [os.environ[VLLM_PYTHON_VARIABLE], "-m", "vllm.entrypoints.openai.api_server", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return True
        except OSError as error:
            if process.poll() is not None:
                raise RuntimeError(f"no server came up:\n{log.read_text(errors='replace')[-3000:]}") from error
            return False

    until(answers, START_S, f"vLLM's server (its log is {log})")


def measure(url: str, name: str, out: Path, requests: int, metrics: list[str]) -> None:
    """Put the load on a server; the result is a JSON file."""
    more = [part for address in metrics for part in ("--metrics", address)]
    subprocess.run(
        [
            *(sys.executable, "-m", "bench", "serve", "--base-url", url, *LOAD, *more),
            *("--requests", str(requests), "--name", name, "--json", str(out / f"{name}.json")),
        ],
        check=True,
        timeout=900,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where results, server logs and the report go")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        model.mkdir()
        make_model(model, layers=arguments.layers, width=arguments.width, heads=8, kv_heads=8)
        cluster = Cluster(Path(directory) / "cluster")
        cluster.run("cluster", "up", "--detach", "--arena-bytes", "2GiB", "--disk-bytes", "4GiB")
        try:
            agent = agent_of(cluster)
            metrics = [one.endpoints["metrics_url"] for one in cluster.state.of_role("agent")]
            runs: tuple[tuple[str, str, list[str]], ...] = (
                ("plain", "", []),
                ("empty-pool", agent, metrics),
                ("restarted", agent, metrics),
            )
            for name, of_agent, of_metrics in runs:
                with server(model, of_agent, out / f"{name}.log") as url:
                    measure(url, name, out, arguments.requests, of_metrics)
        finally:
            cluster.run("cluster", "down")
    files = [str(out / f"{name}.json") for name, _, _ in runs]
    command: list[Any] = [sys.executable, "-m", "bench", "serve-report", *files]
    subprocess.run([*command, "--html", str(out / "report.html")], check=True)


if __name__ == "__main__":
    main()
