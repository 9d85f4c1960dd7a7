"""What a phase's notes say of the host."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.process_usage import cpu_s
from bench.vllm_gpu.host_usage import HostUsage, cluster_file

_GONE_PID = 1 << 30


def test_the_services_of_the_agents_cluster_are_counted(tmp_path: Path) -> None:
    processes = [{"name": "agent-0", "pid": os.getpid()}, {"name": "index-0", "pid": _GONE_PID}]
    (tmp_path / "cluster.json").write_text(json.dumps({"processes": processes}))
    usage, used_s = HostUsage(f"unix:{tmp_path}/run/agent-0.sock"), cpu_s(os.getpid())
    while cpu_s(os.getpid()) == used_s:
        pass
    document = usage.document()
    assert list(document["services"]) == [f"agent-0 ({os.getpid()})"]
    assert document["busy"] > 0


def test_without_a_cluster_no_services_are_counted() -> None:
    assert HostUsage("").document()["services"] == {}


@pytest.mark.parametrize("agent", ["unix:/state/run/agent-0.sock", "auto:/state/run"])
def test_the_cluster_of_an_agent(agent: str) -> None:
    assert cluster_file(agent) == Path("/state/cluster.json")
