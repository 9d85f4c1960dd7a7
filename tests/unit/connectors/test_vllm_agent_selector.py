"""Which agent a worker of vLLM is served by."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.connectors.vllm.agent_selector import AgentSelector, WorkerPlacement
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.core.errors import InvalidRequest, ServiceUnavailable

BOOT = "boot-1"


def announced(directory: Path, name: str, *, gpu: str = "", boot: str = BOOT, listens: bool = True) -> str:
    socket = directory / f"{name}.sock"
    if listens:
        socket.touch()
    values = {"socket": str(socket), "device": "cuda" if gpu else "cpu", "device_uuid": gpu, "boot_id": boot}
    (directory / f"{name}.sock.json").write_text(json.dumps(values))
    return f"unix:{socket}"


def on_gpu(gpu: str = "", **values: Any) -> WorkerPlacement:
    return WorkerPlacement(on_gpu=True, gpu=gpu, **values)


@pytest.mark.parametrize("prefix", ["auto:", "unix:", ""])
def test_workers_find_the_agent_of_their_gpu(tmp_path: Path, prefix: str) -> None:
    first, second = announced(tmp_path, "agent-0", gpu="GPU-a"), announced(tmp_path, "agent-1", gpu="GPU-b")
    announced(tmp_path, "agent-2")
    agents = AgentSelector(f"{prefix}{tmp_path}", boot_id=BOOT)
    assert agents.select(on_gpu("GPU-b", number=7)) == second == agents.endpoint
    assert agents.gpu == "GPU-b"
    assert agents.select(on_gpu("GPU-a")) == first
    assert agents.select(on_gpu()) == first  # a scheduler: any of them


def test_auto_looks_where_the_environment_says(tmp_path: Path) -> None:
    agent = announced(tmp_path, "agent", gpu="GPU-a")
    environment = {"KVPOOL_RUN_DIR": str(tmp_path)}
    assert AgentSelector("auto", environment, BOOT).select(on_gpu("GPU-a")) == agent


def test_auto_looks_where_kvpool_up_keeps_its_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".kvpool/run").mkdir(parents=True)
    agent = announced(tmp_path / ".kvpool/run", "agent", gpu="GPU-a")
    assert AgentSelector("auto", {}, BOOT).select(on_gpu("GPU-a")) == agent


def test_agents_that_are_gone_or_on_another_machine_are_not_chosen(tmp_path: Path) -> None:
    announced(tmp_path, "gone", gpu="GPU-a", listens=False)
    announced(tmp_path, "elsewhere", gpu="GPU-a", boot="boot-2")
    (tmp_path / "half.sock.json").write_text('{"socket": ')
    (tmp_path / "list.sock.json").write_text("[]")
    with pytest.raises(ServiceUnavailable, match=rf"GPU-a.*{tmp_path}"):
        AgentSelector(f"auto:{tmp_path}", boot_id=BOOT).select(on_gpu("GPU-a"))


def test_workers_on_cpus_share_out_the_agents(tmp_path: Path) -> None:
    announced(tmp_path, "gpu", gpu="GPU-a")
    agents = [announced(tmp_path, name) for name in "ab"]
    selector = AgentSelector(f"auto:{tmp_path}", boot_id=BOOT)
    assert [selector.select(WorkerPlacement(number=number)) for number in range(3)] == [*agents, agents[0]]


def test_places_are_filled_in(tmp_path: Path) -> None:
    selector = AgentSelector("unix:/run/agent-{rank}-{dp}-{gpu}.sock")
    assert selector.select(on_gpu("GPU-a", number=3, replica=1)) == "unix:/run/agent-3-1-GPU-a.sock"
    by_gpu = AgentSelector(f"unix:{tmp_path}/{{gpu}}.sock")
    with pytest.raises(ServiceUnavailable):
        by_gpu.select(on_gpu())
    (tmp_path / "GPU-a.sock").touch()
    assert by_gpu.select(on_gpu()) == f"unix:{tmp_path}/GPU-a.sock"
    with pytest.raises(InvalidRequest, match="no GPU"):
        by_gpu.select(WorkerPlacement())


@pytest.mark.parametrize(("agent", "names"), [("", "agent.sock"), ("unix:/a-{tp}", "{tp}"), ("{gpu}:1", "unix")])
def test_what_can_be_no_agent_is_refused_at_start(agent: str, names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        VllmSettings(agent=agent)


@pytest.mark.parametrize(
    ("parallel", "rank", "number"),
    [
        ({"world_size": 4}, 3, 3),
        ({"world_size": 2, "data_parallel_index": 1, "data_parallel_rank": 0}, 1, 3),  # as vLLM resets it
        ({"world_size": 2, "data_parallel_index": 5, "data_parallel_rank_local": 1}, 0, 2),
        ({"world_size": 16, "local_world_size": 8}, 9, 1),
    ],
)
def test_workers_are_counted_as_vllm_counts_gpus(parallel: dict[str, int], rank: int, number: int) -> None:
    assert WorkerPlacement.of(SimpleNamespace(**parallel), rank, on_gpu=True).number == number
