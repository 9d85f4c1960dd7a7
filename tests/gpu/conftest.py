"""Agents on real GPUs and engines in processes of their own. One cluster for all tests, as processes start slowly.

Rank 0 of everything is on GPU 0. Rank 1 is on GPU 1 where there is one; its agent sees that GPU alone, as its device 0,
while its engine sees all: UUIDs name the devices. Its agent has no scratch: it moves run by run.

Several processes of pytest may share the GPUs (`-n 4 --dist loadfile`); a test that fills one runs when no other does.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvpool.cuda.driver import Driver
from tests.fixtures.gpu_cluster import GpuHost, gpu_cluster
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.redis_server import redis_server as redis_server

NO_SCRATCH_BYTES = 1 << 20  # below what a burst needs


@pytest.fixture(scope="session")
def gpu_lock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held while memory of a GPU is taken or given back, by a test with the mark `whole_gpu` alone."""
    directory = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # pytest-xdist: each process has a directory in that of the run
        directory = directory.parent
    return directory / "gpu.lock"


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, how)
        yield


@pytest.fixture(autouse=True)
def gpu_memory(request: pytest.FixtureRequest, gpu_lock: Path) -> Iterator[None]:
    with _locked(gpu_lock, fcntl.LOCK_EX if request.node.get_closest_marker("whole_gpu") else fcntl.LOCK_SH):
        yield


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory, gpu_lock: Path, redis_server: RedisServer) -> Iterator[GpuHost]:
    driver = Driver.load()
    count = driver.device_count()
    second = driver.device_uuid(min(1, count - 1))
    with ExitStack() as stack:
        cluster = stack.enter_context(gpu_cluster(tmp_path_factory.mktemp("gpu"), redis_url=redis_server.url))
        cluster.agent("rank0", "cuda")
        cluster.agent("rank1", "cuda", visible=second, scratch_bytes=str(NO_SCRATCH_BYTES))
        cluster.agent("crowded", "cuda")
        engine, neighbour = cluster.engine("main"), cluster.engine("neighbour")
        cluster.wait_ready()
        yield GpuHost(cluster, engine, neighbour, count)
        with _locked(gpu_lock, fcntl.LOCK_SH):
            stack.close()
