"""The agent as a process: it says where it serves, drains on SIGTERM, and says in one line why it cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.service_processes import Process

pytestmark = pytest.mark.e2e

RESIDENT_LIMIT_BYTES = 450 << 20


def flags(tmp_path: Path, **changes: str) -> list[str]:
    """Of an agent whose index does not answer; it serves what needs none."""
    values = {"data-dir": str(tmp_path / "data"), "index-endpoints": "127.0.0.1:9", "socket": str(tmp_path / "a.sock")}
    return [part for name, value in (values | changes).items() for part in (f"--{name}", value)]


def resident_bytes(pid: int) -> int:
    """RssAnon + RssFile."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(("RssAnon", "RssFile")))


def test_it_serves_and_drains(tmp_path: Path) -> None:
    agent = Process("kvpool_gpuagent", tmp_path / "agent", *flags(tmp_path))
    try:
        ready = agent.wait_ready()
        assert Path(ready["socket"]).is_socket()
        assert Path(ready["socket"]).stat().st_mode & 0o777 == 0o600
        with urlopen(ready["metrics_url"], timeout=60) as response:
            metrics = response.read().decode()
        for name in ("sessions", "loaded_bytes_total", "verification_failures_total", "load_duration_seconds_count"):
            assert f"kvpool_gpuagent_{name}" in metrics
        assert resident_bytes(agent.pid) < RESIDENT_LIMIT_BYTES
        assert agent.stop() == 0
        assert not Path(ready["socket"]).exists()
        node_id = ready["node_id"]
        agent.start()
        assert agent.wait_ready()["node_id"] == node_id  # kept in the data directory
    finally:
        agent.kill()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data-dir": "/proc/nowhere"}, "data_dir /proc/nowhere cannot be used"),
        ({"device": "cuda"}, "device cuda cannot be served"),
        ({"copy-threads": "0"}, "copy_threads must be > 0, got 0"),
        ({"listen": "nonsense"}, "listen"),
        ({"socket": "/nowhere/a.sock"}, "/nowhere"),
    ],
)
def test_it_says_in_one_line_why_it_cannot_start(changes: dict[str, str], named: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvpool_gpuagent.main", *flags(tmp_path, **changes)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # also where there is a GPU
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_data_directory_has_one_agent(tmp_path: Path) -> None:
    agent = Process("kvpool_gpuagent", tmp_path / "agent", *flags(tmp_path))
    try:
        agent.wait_ready()
        command = [sys.executable, "-m", "kvpool_gpuagent.main", *flags(tmp_path, socket=str(tmp_path / "b.sock"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert "in use by another agent" in done.stderr
    finally:
        agent.kill()


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """So that a killed `kvpool cluster up` leaves no agent behind."""
    ready = tmp_path / "ready.json"
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'kvpool_gpuagent.main', *sys.argv[1:], "
        "'--parent-pid', str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    command = [sys.executable, "-c", script, *flags(tmp_path), "--ready-file", str(ready)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    eventually_sync(ready.exists)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually_sync(lambda: not _runs(child))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
