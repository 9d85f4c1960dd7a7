"""An agent announces itself for its GPU, and engines of that GPU find it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvpool.connectors.vllm.agent_selector import AgentSelector, WorkerPlacement
from kvpool.core.errors import ServiceUnavailable
from kvpool_gpuagent.identity import announce


def test_an_agent_is_found_by_its_gpu_until_it_withdraws(tmp_path: Path) -> None:
    socket = tmp_path / "agent-0.sock"
    socket.touch()
    withdraw = announce(socket, device="cuda", device_uuid="GPU-a", host_id="host-0")
    agents = AgentSelector(f"auto:{tmp_path}")
    assert agents.select(WorkerPlacement(on_gpu=True, gpu="GPU-a")) == f"unix:{socket}"
    withdraw()
    with pytest.raises(ServiceUnavailable, match="GPU-a"):
        agents.select(WorkerPlacement(on_gpu=True, gpu="GPU-a"))
    withdraw()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent-0.sock"]


def test_an_agent_that_cannot_announce_itself_serves_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    announce(tmp_path / "gone" / "agent.sock", device="cpu", device_uuid="", host_id="h")()
    assert "cannot find this agent" in caplog.text
