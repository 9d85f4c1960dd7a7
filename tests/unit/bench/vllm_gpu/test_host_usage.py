"""What a phase's notes say of the host's processors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.vllm_gpu.host_usage import UsageSample, processor_seconds, state_directory, used
from kvpool_cli.state import ClusterState, ProcessState, start_ticks, write_state

_GONE_PID = 1 << 30


def test_columns_of_proc_stat() -> None:
    seconds = processor_seconds("cpu  100 200 300 400 500 600 700 800 90 10\n", 100)
    assert seconds == {
        "user": 1.0,
        "nice": 2.0,
        "system": 3.0,
        "idle": 4.0,
        "iowait": 5.0,
        "irq": 6.0,
        "softirq": 7.0,
        "steal": 8.0,
    }


def test_processors_used_between_two_samples() -> None:
    before = UsageSample(
        10.0,
        processor_seconds("cpu 100 0 100 1000 700 0 0 100", 100),
        {("agent-0", 7): 5.0, ("index-0", 8): 1.0, ("redis", 9): 1.0},
    )
    after = UsageSample(
        14.0,
        processor_seconds("cpu 500 100 400 9000 900 200 100 200", 100),
        {("agent-0", 7): 7.0, ("index-0", 80): 2.0, ("redis", 9): 1.0},
    )
    assert used(before, after) == {
        "busy": 2.75,
        "stolen": 0.25,
        "waiting for a disk": 0.5,
        "services": {"agent-0 (7)": 0.5, "redis (9)": 0.0},  # the index was started again
    }


def test_a_count_of_waiting_that_falls_is_no_negative_wait() -> None:
    before, after = (UsageSample(at_s, processor_seconds(line, 100), {}) for at_s, line in _FALLING)
    assert used(before, after)["waiting for a disk"] == 0.0


_FALLING = ((1.0, "cpu 0 0 0 0 500 0 0 0"), (2.0, "cpu 0 0 0 0 400 0 0 0"))


def test_services_of_the_agents_cluster_that_run_are_counted(tmp_path: Path) -> None:
    here, others_ticks = os.getpid(), 1
    processes = [
        ProcessState(name="agent-0", role="agent", pid=here, start_ticks=start_ticks(here)),
        ProcessState(name="index-0", role="index", pid=_GONE_PID, start_ticks=5),
        ProcessState(name="redis", role="redis", pid=here, start_ticks=others_ticks),
    ]
    state = ClusterState(supervisor_pid=here, supervisor_start_ticks=0, store="memory", processes=tuple(processes))
    write_state(tmp_path, state)
    services = UsageSample.take(f"unix:{tmp_path}/run/agent-0.sock").services
    assert list(services) == [("agent-0", here)]
    assert services["agent-0", here] > 0


def test_no_cluster_and_a_file_that_is_none_of_a_cluster_count_nothing(tmp_path: Path) -> None:
    agent = f"auto:{tmp_path}/run"
    assert UsageSample.take(agent).services == {}
    (tmp_path / "cluster.json").write_text("{}")
    assert UsageSample.take(agent).services == {}


@pytest.mark.parametrize("agent", ["unix:/state/run/agent-0.sock", "auto:/state/run"])
def test_the_state_directory_of_an_agent(agent: str) -> None:
    assert state_directory(agent) == Path("/state")


@pytest.mark.parametrize("agent", ["", "127.0.0.1:7000", "auto", "auto:", "localhost:7000"])
def test_endpoints_that_do_not_say_where_their_cluster_is(agent: str) -> None:
    assert state_directory(agent) is None
