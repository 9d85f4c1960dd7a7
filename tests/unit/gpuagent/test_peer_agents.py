"""Sockets that a peer names: only those of agents of the same user are connected to."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.client.config import ClientConfig
from kvpool.core.errors import InvalidRequest, ServiceUnavailable
from kvpool.testing import eventually
from kvpool.v1 import gpuagent_pb2, gpuagent_pb2_grpc
from kvpool_gpuagent.adapters.grpc_clients import GrpcPeerAgents
from kvpool_gpuagent.identity import announce, gpu_agents_beside
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.servers import serve


def _link(here: Path, listening: Path) -> str:
    (here / "link").symlink_to(listening)
    return f"{here}/link"


def _file(here: Path, listening: Path) -> str:
    (here / "file").touch()
    return f"{here}/file"


@pytest.mark.parametrize(
    "path",
    [
        _link,
        _file,
        lambda here, listening: f"{here}/../{here.name}/socket",
        lambda here, listening: os.path.relpath(listening),
        lambda here, listening: "\0abstract",
    ],
)
async def test_other_paths_than_those_of_own_sockets_are_refused(
    path: Callable[[Path, Path], str], tmp_path: Path
) -> None:
    listening = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(listening))
        with pytest.raises(InvalidRequest, match="source_agent"):
            await GrpcPeerAgents(ClientConfig()).lease(f"unix:{path(tmp_path, listening)}", b"s" * 16, b"k" * 16, 1.0)


async def test_an_agent_whose_socket_is_not_there_is_out_of_reach(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="connect"):
        await GrpcPeerAgents(ClientConfig()).lease(f"unix:{tmp_path}/none", b"s" * 16, b"k" * 16, 1.0)


async def test_sockets_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(tmp_path / "socket"))
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(InvalidRequest, match="uid 12345"):
            await GrpcPeerAgents(ClientConfig()).lease(f"unix:{tmp_path}/socket", b"s" * 16, b"k" * 16, 1.0)


async def test_an_agent_that_does_not_answer_is_not_asked_for_a_while(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("silent", "none")]
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(paths[0])
        silent.listen()
        agents = GrpcPeerAgents(ClientConfig(), lambda: paths)
        clock = asyncio.get_running_loop().time
        asked_at_s = clock()
        assert await agents.find(b"k" * 16, b"h" * 16, b"", 0.02) == []
        (neighbour,) = agents._neighbours.values()
        assert neighbour.silent_until_s > asked_at_s
        neighbour.silent_until_s += 60.0
        asked_at_s = clock()
        for _ in range(100):
            assert await agents.find(b"k" * 16, b"h" * 16, b"", 10.0) == []
        assert clock() - asked_at_s < 10.0
        paths.clear()

        async def is_gone() -> bool:
            agents._looked_at_s -= 60.0  # a look that runs may have begun before it went
            await agents.find(b"k" * 16, b"h" * 16, b"", 0.02)
            return not agents._neighbours

        await eventually(is_gone)
        await agents.close()


class _WrongAgent(gpuagent_pb2_grpc.GpuAgentServiceServicer):
    """Names chunks at these positions."""

    def __init__(self, positions: list[int]) -> None:
        self._positions = np.array(positions, dtype="<i8").tobytes()

    async def FindCachedChunks(self, request: Any, context: Any) -> gpuagent_pb2.FindCachedChunksResponse:
        held = gpuagent_pb2.CachedChunks(
            session_id=b"s" * 16, positions=self._positions, block_ids=self._positions, generations=self._positions
        )
        return gpuagent_pb2.FindCachedChunksResponse(caches=[held])


@pytest.mark.parametrize("positions", [[-1], [2], [1, 1], [1, 0], [2**63 - 2, -3], [0, 2**63 - 1, -(2**62), 1]])
async def test_an_agent_that_names_other_chunks_than_those_asked_for_is_not_listened_to(
    positions: list[int], tmp_path: Path
) -> None:
    add, path = gpuagent_pb2_grpc.add_GpuAgentServiceServicer_to_server, str(tmp_path / "socket")
    async with serve(add, _WrongAgent(positions), f"unix:{path}"):  # type: ignore[abstract]
        agents = GrpcPeerAgents(ClientConfig(), lambda: [path])
        assert await agents.find(b"k" * 16, b"h" * 32, b"", PATIENCE_S) == []
        await agents.close()


class _SlowAgent(gpuagent_pb2_grpc.GpuAgentServiceServicer):
    """Names one chunk once `may_answer`."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def FindCachedChunks(self, request: Any, context: Any) -> gpuagent_pb2.FindCachedChunksResponse:
        self.asked.set()
        await self.may_answer.wait()
        zero = bytes(8)
        held = gpuagent_pb2.CachedChunks(session_id=b"s" * 16, positions=zero, block_ids=zero, generations=zero)
        return gpuagent_pb2.FindCachedChunksResponse(caches=[held])


async def test_an_agent_that_is_asked_when_it_goes_may_still_answer(tmp_path: Path) -> None:
    agent, paths = _SlowAgent(), [str(tmp_path / "socket")]  # type: ignore[abstract]
    add = gpuagent_pb2_grpc.add_GpuAgentServiceServicer_to_server
    async with serve(add, agent, f"unix:{paths[0]}"):
        agents = GrpcPeerAgents(ClientConfig(), lambda: paths)
        finding = asyncio.ensure_future(agents.find(b"k" * 16, b"h" * 16, b"", PATIENCE_S))
        await agent.asked.wait()
        paths.clear()
        await agents._look()
        assert not agents._neighbours and not finding.done()
        agent.may_answer.set()
        (held,) = await finding
        assert held.source.session_id == b"s" * 16
        await eventually(lambda: not agents._leaving)
        await agents.close()


async def test_calls_at_once_all_wait_for_the_first_look_at_who_is_there(tmp_path: Path) -> None:
    looks: list[int] = []

    def beside() -> list[str]:
        looks.append(1)
        return [str(tmp_path / "silent")]

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        agents = GrpcPeerAgents(ClientConfig(), beside)
        asked: list[int] = []

        async def one() -> None:
            await agents.find(b"k" * 16, b"h" * 16, b"", 0.02)
            asked.append(len(agents._neighbours))

        await asyncio.gather(one(), one(), one())
        assert (asked, looks) == ([1, 1, 1], [1])
        await agents.close()


async def test_a_directory_that_cannot_be_read_for_now_holds_up_no_call() -> None:
    readable = threading.Event()

    def beside() -> list[str]:
        assert readable.wait(PATIENCE_S)
        return []

    agents = GrpcPeerAgents(ClientConfig(), beside)
    try:
        async with asyncio.timeout(PATIENCE_S / 2):
            assert await agents.find(b"k" * 16, b"h" * 16, b"", 0.02) == []
    finally:
        readable.set()
        await agents.close()


def test_agents_with_a_gpu_are_found_in_the_directory_of_sockets(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    withdraws = {
        name: announce(tmp_path / "real" / f"{name}.sock", device=device, device_uuid="", host_id="")
        for name, device in (("own", "cuda"), ("other", "cuda"), ("cpu", "cpu"))
    }
    (tmp_path / "real" / "broken.sock.json").write_text("{")
    elsewhere = json.loads((tmp_path / "real" / "other.sock.json").read_text()) | {"boot_id": "another machine"}
    (tmp_path / "real" / "far.sock.json").write_text(json.dumps(elsewhere))
    for directory in ("real", "linked"):
        assert gpu_agents_beside(tmp_path / directory / "own.sock") == {str(tmp_path / "real" / "other.sock")}
    withdraws["other"]()
    assert not gpu_agents_beside(tmp_path / "real" / "own.sock")
