"""vLLM's OpenAI server as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvpool.testing import eventually_sync
from tests.vllm.engine import DEVICE, KV_CACHE_BYTES, REPOSITORY, VLLM_PYTHON_VARIABLE, free_port, vllm_environment
from tests.vllm.engine_server import ENVIRONMENT

START_S = 420.0  # on a machine that has much other work; alone it takes 20 s


@contextmanager
def servers(
    model_dir: Path, extras: Sequence[dict[str, Any]], *arguments: str, variables: Mapping[str, str] | None = None
) -> Iterator[list[str]]:
    """Their URLs; they start together. extras: kvpool's extra config of each. arguments: more of vLLM's, of all."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(_process(model_dir, number, extra, arguments, variables or {}))
            for number, extra in enumerate(extras)
        ]
        for url, process, log in started:
            eventually_sync(lambda: answers(f"{url}/health") or process.poll() is not None, deadline_s=START_S)  # noqa: B023
            assert process.poll() is None, log.read_text()[-3000:]
        yield [url for url, _, _ in started]


@contextmanager
def _process(
    model_dir: Path, number: int, extra: dict[str, Any], arguments: Sequence[str], variables: Mapping[str, str]
) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    port, path = free_port(), model_dir / f"server-{number}.log"
    transfer = {
        "kv_connector": "KvPoolConnector",
        "kv_connector_module_path": "kvpool.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    command = [os.environ[VLLM_PYTHON_VARIABLE], "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_dir), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "4096", "--enforce-eager"]
    if DEVICE == "cuda":
        command += ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    command += ["--skip-tokenizer-init", "--kv-transfer-config", json.dumps(transfer), *arguments]
    with path.open("w+b") as log:
        environment = {**vllm_environment(), **ENVIRONMENT, **variables}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=REPOSITORY)
        try:
            yield f"http://127.0.0.1:{port}", process, path
        finally:
            process.terminate()
            process.wait(60)


def answers(url: str) -> bool:
    """Whether it does, and well."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def completed(url: str, tokens: list[int], salt: str, headers: Mapping[str, str] | None = None) -> list[int]:
    """Greedy tokens after these."""
    found: list[int] = completion(url, tokens, salt, headers)["choices"][0]["token_ids"]
    return found


def completion(
    url: str, tokens: list[int], salt: str, headers: Mapping[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    """The server's answer. more: of the request's body."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"cache_salt": salt, "return_token_ids": True, "detokenize": False, **more}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
