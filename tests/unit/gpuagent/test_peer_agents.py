"""Sockets that a peer names: only those of agents of the same user are connected to."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.client.config import ClientConfig
from kvpool.core.errors import InvalidRequest, ServiceUnavailable
from kvpool_gpuagent.adapters.grpc_clients import GrpcPeerAgents


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
