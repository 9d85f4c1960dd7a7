"""The state file and its lock."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.core.errors import StartupFailed
from kvpool_cli.state import (
    ClusterState,
    ProcessState,
    StateLock,
    read_state,
    start_ticks,
    state_file,
    write_state,
)

OWN = ProcessState(
    name="index-0", role="index", pid=os.getpid(), start_ticks=start_ticks(os.getpid()), endpoints={"endpoint": "h:1"}
)
STATE = ClusterState(
    supervisor_pid=os.getpid(), supervisor_start_ticks=OWN.start_ticks, store="memory", ready=True, processes=(OWN,)
)


def test_a_state_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    write_state(tmp_path, STATE)
    assert read_state(tmp_path) == STATE
    assert STATE.of_role("index") == [OWN]
    assert STATE.of_role("agent") == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 99}', '{"version": 1, "processes": [{}]}', "\udcff"])
def test_a_file_that_is_no_state_is_refused(text: str, tmp_path: Path) -> None:
    state_file(tmp_path).write_text(text, errors="surrogateescape")
    with pytest.raises(StartupFailed, match="not a kvpool cluster state"):
        read_state(tmp_path)


def test_a_state_below_a_file_is_none_and_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert read_state(tmp_path / "file") is None
    with pytest.raises(StartupFailed, match="--state-dir"):
        write_state(tmp_path / "file", STATE)


def test_a_process_is_distinguished_from_a_later_one_of_the_same_pid() -> None:
    assert OWN.alive() and STATE.supervised()
    assert not replace(OWN, start_ticks=OWN.start_ticks + 1).alive()
    assert not replace(STATE, supervisor_start_ticks=OWN.start_ticks + 1).supervised()


def test_a_process_that_ended_is_not_alive_even_before_it_is_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        state = replace(OWN, pid=process.pid, start_ticks=start_ticks(process.pid))
        assert state.alive()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not state.alive()
    assert start_ticks(process.pid) == 0


def test_only_one_holds_the_lock(tmp_path: Path) -> None:
    first, second = StateLock(tmp_path / "deep" / "state"), StateLock(tmp_path / "deep" / "state")
    first.acquire()
    with pytest.raises(StartupFailed, match="runs in"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
