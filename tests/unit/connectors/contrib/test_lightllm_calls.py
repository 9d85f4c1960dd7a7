"""Calls between lightllm's processes: who is heard, what breaks a connection, and when pages are given back."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvpool.connectors.contrib.lightllm import calls as lightllm_calls
from kvpool.connectors.contrib.lightllm.calls import CallClient, CallServer
from kvpool.connectors.contrib.lightllm.peers import Peers
from kvpool.core.errors import InvalidRequest, KeyspaceMismatch, ServiceUnavailable
from kvpool.testing import eventually_sync


def answer(name: str, arguments: list[Any]) -> Any:
    """echo gives its argument back, everything else fails in a way of its own."""
    if name == "echo":
        return arguments[0]
    if name == "pid":
        return os.getpid()
    raise {"missing": KeyError("missing"), "mismatch": KeyspaceMismatch("another dtype")}[name]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    server = CallServer(str(tmp_path / "calls"), lambda pid: answer)
    try:
        yield str(tmp_path / "calls")
    finally:
        server.close()


@pytest.mark.parametrize("name", ["missing", "mismatch"])
def test_whatever_fails_in_the_owner_is_an_answer_and_the_connection_goes_on(path: str, name: str) -> None:
    client = CallClient(path)
    with pytest.raises(InvalidRequest):
        client.call(name)
    assert client.call("echo", [1]) == [1]
    client.close()


def test_another_users_socket_is_not_believed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(lightllm_calls, "_TRUSTED_USERS", ())
    with pytest.raises(ServiceUnavailable, match="belongs to user"):
        CallClient(path).call("echo", 1)


def test_pages_of_one_owner_are_never_named_to_another(tmp_path: Path) -> None:
    path = str(tmp_path / "calls")
    first = CallServer(path, lambda pid: answer)
    client = CallClient(path)
    assert client.call("echo", 1) == 1
    first.close()
    second = CallServer(path, lambda pid: answer)
    try:
        for _ in range(2):
            with pytest.raises(ServiceUnavailable):
                client.call("echo", 1)
        with pytest.raises(ServiceUnavailable, match="restart this process"):
            client.call("echo", 1)
        with closing(CallClient(path)) as other:
            assert other.call("echo", 1) == 1
    finally:
        second.close()


def test_a_forked_process_has_a_connection_of_its_own(path: str) -> None:
    client = CallClient(path)
    assert client.call("echo", "parent") == "parent"
    with client._lock:  # as another thread might have it at the fork
        child = os.fork()
        if not child:  # pragma: no cover - another process
            os._exit(0 if client.call("echo", "child") == "child" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.call("echo", "parent") == "parent"
    client.close()


def test_a_process_that_is_gone_already_is_not_served(tmp_path: Path) -> None:
    server = CallServer(str(tmp_path / "calls"), lambda pid: None)
    try:
        with pytest.raises(ServiceUnavailable):
            CallClient(str(tmp_path / "calls")).call("echo", 1)
    finally:
        server.close()


def test_pages_come_back_with_the_end_of_their_process_and_not_before() -> None:
    given_back: list[int] = []
    peers = Peers(given_back.extend)
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        peer = peers.connected(process.pid)
        assert peer is not None and peers.hold(peer, [3, 4, 4, 5])
        assert peers.connected(process.pid) is peer, "another connection of it"
        peers.let_go(peer, [4, 5, 9])
        assert not given_back
        process.kill()
        process.wait()
        eventually_sync(lambda: sorted(given_back) == [3, 4])
        assert not peers.hold(peer, [6]) and peers.connected(process.pid) is None
    finally:
        process.kill()
        process.communicate()
        peers.close()
        peers.close()
    assert peers.connected(os.getpid()) is None


def test_a_connection_that_breaks_gives_no_page_back(tmp_path: Path) -> None:
    """Its kernels may still write: the process lives."""
    given_back: list[int] = []
    peers = Peers(given_back.extend)

    def connected(pid: int) -> Any:
        peer = peers.connected(pid)
        assert peer is not None

        def handle(name: str, arguments: list[Any]) -> Any:
            return peers.hold(peer, arguments)

        return handle

    server = CallServer(str(tmp_path / "calls"), connected)
    try:
        client = CallClient(str(tmp_path / "calls"))
        assert client.call("hold", 7)
        assert isinstance(client._socket, socket.socket)
        client._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ServiceUnavailable):
            client.call("hold", 8)
        assert client.call("hold", 9)
        peer = peers.connected(os.getpid())
        assert peer is not None and sorted(peer.held) == [7, 9] and not given_back
        client.close()
    finally:
        server.close()
        peers.close()
