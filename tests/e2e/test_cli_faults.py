"""`kvpool cluster up` that is killed, interrupted, or asked for what cannot be."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from kvpool.testing import eventually_sync
from kvpool_cli.state import state_file
from tests.e2e.cli_cluster import CHUNK_TOKENS, SMALL, TOKENS, Cluster

pytestmark = pytest.mark.e2e


def test_interrupted_up_drains_and_a_killed_one_is_cleaned_up(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    with cluster.start("cluster", "up", *SMALL) as up:
        try:
            eventually_sync(lambda: state_file(tmp_path).exists() and cluster.state.ready)
            cluster.store(TOKENS)
            first = cluster.state
            up.send_signal(signal.SIGINT)
            output, errors = up.communicate(timeout=60)
        finally:
            up.kill()
        assert up.returncode == 0, errors
    assert "pagestore-0" in output
    assert "draining" in errors
    assert not any(process.alive() for process in first.processes)

    # What was dirty is on disk; then only the supervisor is killed: the kernel notifies the others.
    cluster.run("cluster", "up", "--detach", *SMALL)
    second = cluster.state
    os.kill(second.supervisor_pid, signal.SIGKILL)
    cluster.run("cluster", "up", "--detach", *SMALL)
    assert not any(process.alive() for process in second.processes)

    # Then all at once.
    cluster.kill_everything()
    cluster.run("cluster", "up", "--detach", *SMALL)
    try:
        report, equal = cluster.load(TOKENS)
        assert report.loaded_chunks == report.tokens.disk // CHUNK_TOKENS == 4, report
        assert equal
        # The engine has opened the keyspace again, so that the store, which began empty, knows its name.
        eventually_sync(lambda: cluster.json("cache", "match", str(tokens))["matched_chunks"] == 4)
    finally:
        cluster.run("cluster", "down")


def test_a_second_interrupt_ends_what_does_not_drain(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.start("cluster", "up", "--agents", "0", *SMALL, "--memory-index") as up:
        try:
            eventually_sync(lambda: state_file(tmp_path).exists() and cluster.state.ready)
            (index,) = cluster.state.of_role("index")
            os.kill(index.pid, signal.SIGSTOP)
            up.send_signal(signal.SIGINT)
            assert up.stderr is not None
            assert "again to end at once" in up.stderr.readline()
            up.send_signal(signal.SIGINT)
            assert up.wait(60) == 1
        finally:
            up.kill()
    assert not index.alive()


def test_what_dies_is_started_again_where_it_was(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.run("cluster", "up", "--detach", "--agents", "0", *SMALL, "--memory-index")
    try:
        index = cluster.state.of_role("index")[0]
        os.kill(index.pid, signal.SIGKILL)
        eventually_sync(lambda: cluster.state.of_role("index")[0].pid != index.pid)
        again = cluster.state.of_role("index")[0]
        assert again.endpoints == index.endpoints | {"pid": again.endpoints["pid"]}
        eventually_sync(lambda: _listens(index.endpoints["endpoint"]))
    finally:
        cluster.run("cluster", "down")


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for more in ((), ("--detach",)):
            line = _one_line(
                Cluster(tmp_path).run("cluster", "up", "--memory-index", "--index-port", str(port), *more, code=2)
            )
            assert "index-0" in line and str(port) in line and "in use" in line


@pytest.mark.parametrize("below", ["file", "/proc"])
def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    directory = Path("/proc/kvpool") if below == "/proc" else tmp_path / "file" / "state"
    for more in ((), ("--detach",)):
        line = _one_line(Cluster(directory).run("cluster", "up", *more, code=2))
        assert str(directory) in line and "--state-dir" in line


def test_a_redis_that_does_not_answer_is_a_remark(tmp_path: Path) -> None:
    """Services wait for Redis, so the cluster is there; a URL with a slip must not look as if it were right."""
    cluster = Cluster(tmp_path)
    up = ("cluster", "up", "--detach", "--agents", "0", *SMALL, "--redis", "redis://127.0.0.1:1")
    with cluster.start(*up) as command:
        try:
            _, errors = command.communicate(timeout=110)
            assert command.returncode == 0
            (remark,) = errors.splitlines()
            assert "the Redis that --redis names does not answer" in remark
        finally:
            command.kill()
            cluster.run("cluster", "down")


def test_an_arena_larger_than_memory_is_one_line(tmp_path: Path) -> None:
    size_bytes = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    line = _one_line(Cluster(tmp_path).run("cluster", "up", "--memory-index", "--arena-bytes", str(size_bytes), code=2))
    assert "pagestore-0" in line and "--arena-bytes" in line
    assert not state_file(tmp_path).exists()


def _one_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("kvpool: ")
    return lines[0]


def _listens(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True
