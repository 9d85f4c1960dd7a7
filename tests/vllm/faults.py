"""Killing what a load needs, at a moment when it needs it."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import Engine

_PAGE_STEP_BYTES = 1 << 16


def pid_of(cluster: Cluster, role: str) -> int:
    """Of the first process of a role."""
    pid: int = cluster.state.of_role(role)[0].pid
    return pid


def stored(engine: Engine, tokens: list[int], salt: str) -> bool:
    """Whether the prompt is in the pool now, as far as this engine finds, which stores it if need be."""
    engine.generate(tokens, new_tokens=2, salt=salt)
    engine.forget()
    return engine.generate(tokens, new_tokens=2, salt=salt).cached[0] > 0


def load_is_running(cluster: Cluster) -> Callable[[], bool]:
    """Says whether the agent is at a load."""
    return lambda: _agents_metric(cluster, 'kvpool_gpuagent_active_requests{operation="load"}') > 0


def stopped_chunks(cluster: Cluster) -> float:
    """Chunks so far that the agent did not load because nobody needed them any more."""
    return _agents_metric(cluster, 'kvpool_gpuagent_failed_chunks_total{reason="STOPPED"}')


def _agents_metric(cluster: Cluster, name: str) -> float:
    metrics = cluster.state.of_role("agent")[0].endpoints["metrics_url"]
    with urllib.request.urlopen(metrics, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def damage_staging(cluster: Cluster) -> None:
    """Change a byte in every 64 KiB of the pagestore's staging memory, through its own mapping's files."""
    pid = pid_of(cluster, "pagestore")
    mapped = {
        line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "rw-s" in line
    }
    for path in (Path(name) for name in mapped):
        if path.is_file():
            with path.open("r+b") as memory:
                for offset in range(_PAGE_STEP_BYTES // 2, os.fstat(memory.fileno()).st_size, _PAGE_STEP_BYTES):
                    memory.seek(offset)
                    byte = memory.read(1)
                    memory.seek(offset)
                    memory.write(bytes([byte[0] ^ 0xFF]))
