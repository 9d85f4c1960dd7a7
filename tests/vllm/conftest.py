"""Tests against vLLM itself, in an environment of its own: `make test-vllm`. Elsewhere nothing here is collected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import VLLM_PYTHON_VARIABLE, make_model

collect_ignore_glob = [] if os.environ.get(VLLM_PYTHON_VARIABLE) else ["test_*.py"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 4 layers with fixed weights, float32."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One host: a pagestore and an agent."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    cluster.run("up", "--detach", "--arena-bytes", "256MiB", "--disk-bytes", "512MiB")
    yield cluster
    cluster.run("down")
