"""The composed cluster, driven from outside: `make smoke-compose`. Nothing is collected elsewhere, for it takes minutes
and a Docker engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.compose.composed import SMOKE_VARIABLE, ComposedCluster, missing_docker

collect_ignore_glob = [] if os.environ.get(SMOKE_VARIABLE) else ["test_*.py"]


@contextmanager
def _built(directory: Path, files: Sequence[str]) -> Iterator[ComposedCluster]:
    """Images built, nothing started yet; taken down with its volumes in the end."""
    reason = missing_docker()
    if reason:
        pytest.skip(reason)
    cluster = ComposedCluster(Path(__file__).resolve().parents[2], directory, files)
    try:
        cluster.build()
        yield cluster
    finally:
        cluster.remove()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposedCluster]:
    """As docker-compose.yml says."""
    with _built(tmp_path_factory.mktemp("compose"), ("docker-compose.yml",)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tls_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposedCluster]:
    """With mutual TLS on every link."""
    with _built(tmp_path_factory.mktemp("compose"), ("docker-compose.yml", "compose.tls.yml")) as cluster:
        yield cluster
