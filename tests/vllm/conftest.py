"""Tests against vLLM itself, in an environment of its own: `make test-vllm`. Elsewhere nothing here is collected.

An engine takes seconds to start: those of the session are shared by all tests, which keep apart by cache salts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import DEVICE, VLLM_PYTHON_VARIABLE, Engine, Engines, agent_of
from tests.vllm.models import make_model

collect_ignore_glob = [] if os.environ.get(VLLM_PYTHON_VARIABLE) else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """A marker of these tests alone."""
    config.addinivalue_line("markers", "smoke: what a run of a minute or so shows of the connector in vLLM")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 4 layers with fixed weights, float32."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One host: a pagestore and an agent, an index and its Redis."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    sizes = ("--arena-bytes", "256MiB", "--disk-bytes", "512MiB")
    cluster.run("cluster", "up", "--detach", *sizes, *(("--device", "cuda") if DEVICE == "cuda" else ()))
    yield cluster
    cluster.run("cluster", "down")


@pytest.fixture(scope="session")
def engines(model_dir: Path) -> Iterator[Engines]:
    """What starts engines that serve the model."""
    with Engines(model_dir) as engines:
        yield engines


@pytest.fixture(scope="session")
def alone(engines: Engines) -> Iterator[Engine]:
    """Plain vLLM, whose own cache never helps: float32 tokens do not depend on the block size."""
    with engines.start(enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def pair(engines: Engines, cluster: Cluster) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that share, with blocks of 32 tokens; the first publishes KV events."""
    agent = agent_of(cluster)
    with engines.start(agent=agent, events=True) as first, engines.start(agent=agent) as second:
        yield first, second
