"""The composed cluster, driven from outside: `make smoke-compose`. Nothing is collected elsewhere, for it takes minutes
and a Docker engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.composed import SMOKE_VARIABLE, ComposedCluster, missing_docker

collect_ignore_glob = [] if os.environ.get(SMOKE_VARIABLE) else ["test_*.py"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposedCluster]:
    """Images built, nothing started yet; taken down with its volumes in the end."""
    reason = missing_docker()
    if reason:
        pytest.skip(reason)
    cluster = ComposedCluster(Path(__file__).resolve().parents[2], tmp_path_factory.mktemp("compose"))
    try:
        cluster.build()
        yield cluster
    finally:
        cluster.remove()
