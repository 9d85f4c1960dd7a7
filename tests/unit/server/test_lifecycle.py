"""Signals, exit codes and the death of a parent, with real processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.core.errors import StartupFailed
from kvpool.testing import eventually_sync
from kvpool_server.lifecycle import clear_ready_file, write_ready_file
from tests.fixtures.patience import PATIENCE_S

_ROOTS = [str(Path(__file__).parents[3] / root) for root in ("clients/python", "services/common")]

_PRELUDE = """
import asyncio, os, sys, threading
from kvpool_server import lifecycle
from kvpool.core.errors import StartupFailed
from kvpool_server.lifecycle import run_service
from kvpool_server.process import die_with_parent, tune_process
from kvpool_server.tasks import BackgroundTasks

lifecycle._CLEANUP_GRACE_S = 60.0  # a process that stands still is not stuck

def say(text):
    print(text, flush=True)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []

    def run(script: str, grace_s: float = PATIENCE_S) -> subprocess.Popen[str]:
        ending = f"\nsys.exit(run_service(main, service='test', grace_s={grace_s}))"
        child = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + script + ending],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(_ROOTS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield run
    for child in children:
        child.kill()
        child.communicate()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits_with_0(start: Callable[..., subprocess.Popen[str]], number: signal.Signals) -> None:
    child = start("""
async def main(stop):
    say("ready")
    await stop.wait()
    await asyncio.sleep(0)
    say("drained")
""")
    assert line(child) == "ready"
    child.send_signal(number)
    out, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out, err) == (0, "drained\n", "")


def test_startup_failure_is_one_line_and_exit_code_2(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start("""
async def main(stop):
    raise StartupFailed("port 7000 is in use;\\n  choose another")
""")
    _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 2
    assert err == "kvpool-test: port 7000 is in use; choose another\n"


def test_crash_is_exit_code_1_with_a_traceback(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start("""
async def main(stop):
    raise KeyError("lost")
""")
    _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 1
    assert "the service crashed" in err and "KeyError: 'lost'" in err


def test_fatal_background_crash_ends_the_service(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start("""
async def worker():
    raise OSError("disk gone")

async def main(stop):
    async with BackgroundTasks(stop.fail) as tasks:
        tasks.start(worker(), name="writer")
        await stop.wait()
        say("drained")
""")
    out, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out) == (1, "drained\n")
    assert "disk gone" in err


def test_drain_is_bounded(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start(
        """
async def main(stop):
    say("ready")
    try:
        await asyncio.Event().wait()
    finally:
        say("cut off")
""",
        grace_s=0.1,
    )
    assert line(child) == "ready"
    child.terminate()
    out, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out) == (1, "cut off\n")
    assert "not drained after 0.1 s" in err


def test_second_signal_ends_at_once(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start(
        """
async def main(stop):
    say("ready")
    await stop.wait()
    say("draining")
    await asyncio.Event().wait()
""",
        grace_s=60,
    )
    assert line(child) == "ready"
    child.terminate()
    assert line(child) == "draining"
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 128 + signal.SIGINT


def test_child_dies_with_its_parent(start: Callable[..., subprocess.Popen[str]]) -> None:
    parent = start("""
async def main(stop):
    parent_pid = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(parent_pid)
        import signal
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        say(f"armed {os.getpid()}")
        signal.pause()
    await asyncio.Event().wait()
""")
    word, pid = line(parent).split()
    assert word == "armed"
    parent.kill()
    parent.wait()
    eventually_sync(lambda: not _runs(int(pid)))


def test_child_whose_parent_is_gone_already_dies_at_once(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start("""
async def main(stop):
    die_with_parent(1 << 22)  # no such process can be our parent
    await stop.wait()
    say("asked to stop")
""")
    out, _ = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out) == (0, "asked to stop\n")


def test_tuning_is_accepted(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start("""
async def main(stop):
    tune_process()
    say(sys.getswitchinterval())
""")
    out, _ = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out) == (0, "0.0005\n")


def _runs(pid: int) -> bool:
    """Whether a process executes; one that is not waited for yet is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_exit_of_its_own_passes_without_a_word(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start("""
async def main(stop):
    sys.exit(0)  # as argparse does after --help
""")
    output, errors = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, output, errors) == (0, "", "")


def test_it_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("of an earlier run")
    clear_ready_file(path)
    assert not path.exists()
    clear_ready_file(path)
    write_ready_file(path, endpoint="h:1", metrics_url="http://h:2/metrics")
    assert json.loads(path.read_text()) == {
        "pid": os.getpid(),
        "endpoint": "h:1",
        "metrics_url": "http://h:2/metrics",
    }
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_path_nothing_happens() -> None:
    clear_ready_file(None)
    write_ready_file(None, endpoint="h:1")


def test_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match="missing"):
        write_ready_file(tmp_path / "missing" / "ready.json", endpoint="h:1")
    directory = tmp_path / "directory"
    directory.mkdir()
    with pytest.raises(StartupFailed, match="directory"):
        clear_ready_file(directory)
