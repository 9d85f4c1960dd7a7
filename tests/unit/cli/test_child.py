"""One process of a cluster, on stand-ins that take a moment to start."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvpool_cli.child
from kvpool.core.errors import StartupFailed
from kvpool.testing import eventually_sync
from kvpool_cli.child import Child
from kvpool_cli.cluster import ProcessPlan
from kvpool_cli.state import start_ticks
from tests.fixtures.patience import PATIENCE_S

SERVER = """
import json, pathlib, signal, sys
print("hello from", sys.argv[1:], flush=True)
pathlib.Path(sys.argv[1]).write_text(json.dumps({"endpoint": "h:7", "metrics_url": "http://h:8/metrics", "pid": 1}))
signal.pause()
"""


@contextmanager
def running(tmp_path: Path, script: str = SERVER) -> Iterator[Child]:
    ready = tmp_path / "ready.json"
    plan = ProcessPlan(
        name="index-0",
        role="index",
        command=(sys.executable, "-c", script, str(ready), "--listen", "h:0", "--metrics-listen", "h:0"),
        ready_file=ready,
        pins={"--listen": "endpoint", "--metrics-listen": "metrics_url"},
    )
    child = Child(plan, tmp_path / "logs" / "index-0.log")
    try:
        yield child
    finally:
        child.send(signal.SIGKILL)
        assert child.wait(PATIENCE_S)


def test_a_restarted_process_gets_the_ports_it_had(tmp_path: Path) -> None:
    with running(tmp_path) as child:
        child.wait_ready(lambda: False)
        assert child.endpoints["endpoint"] == "h:7"
        assert child.state().alive()
        child.send(signal.SIGKILL)
        assert child.wait(PATIENCE_S)
        assert child.exit_code() == -signal.SIGKILL
        child.restart()
        child.wait_ready(lambda: False)
        assert "'--listen', 'h:7', '--metrics-listen', 'h:8'" in child.last_log_line()


def test_one_that_ends_at_once_is_named_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvpool_cli.child, "_BACKOFF_FIRST_S", PATIENCE_S)
    with running(tmp_path, "import sys; sys.exit('kvpool-index: port 7 is in use')") as child:
        with pytest.raises(StartupFailed) as refused:
            child.wait_ready(lambda: False)
        assert str(refused.value) == "index-0 cannot start: port 7 is in use"
        assert not child.restart_due(), "it would be started again and again"


def test_an_earlier_run_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "index-0.log").write_text("long ago\n")
    with running(tmp_path, "pass") as child:
        with pytest.raises(StartupFailed, match="it said nothing"):
            child.wait_ready(lambda: False)


def test_waiting_ends_when_asked_to(tmp_path: Path) -> None:
    with running(tmp_path, "import signal; signal.pause()") as child:
        with pytest.raises(StartupFailed, match="interrupted"):
            child.wait_ready(lambda: True)


def test_a_guarded_program_ends_with_its_parent(tmp_path: Path) -> None:
    # A parent that starts the guard and says its pid, and that we kill.
    script = (
        "import os, subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'kvpool_cli.parent_death_guard', str(os.getpid()),"
        " '/bin/sleep', '600'])\n"
        "print(p.pid, flush=True)\n"
        "p.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            eventually_sync(lambda: Path(f"/proc/{pid}/comm").read_text().strip() == "sleep")
        finally:
            parent.kill()
    eventually_sync(lambda: start_ticks(pid) == 0)


def test_a_guard_without_its_parent_starts_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    command = [sys.executable, "-m", "kvpool_cli.parent_death_guard", str(os.getppid()), "/bin/touch", str(marker)]
    assert subprocess.run(command, check=False).returncode == 1
    assert not marker.exists()
