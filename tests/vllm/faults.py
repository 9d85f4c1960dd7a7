"""Killing what a load needs, at a moment when it needs it."""

from __future__ import annotations

import asyncio
import mmap
import urllib.request
from collections.abc import Callable

from tests.e2e.cli_cluster import Cluster
from tests.fixtures.staging import leave_staging
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


def damage_disk(cluster: Cluster) -> None:
    """Leave the pages to the disk alone, and change a byte in every 64 KiB of the files that hold them there."""
    [pagestore] = cluster.state.of_role("pagestore")
    asyncio.run(leave_staging(pagestore.endpoints["endpoint"]))
    for path in cluster.state_dir.rglob("*.pages"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for offset in range(_PAGE_STEP_BYTES // 2, len(memory), _PAGE_STEP_BYTES):
                memory[offset] ^= 0xFF
            memory.flush()
