"""The health check of containers, against a real server and against what is none."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvpool_server import health_probe
from kvpool_server.health_probe import ProbeFailed, main, probe
from kvpool_server.listen import TcpAddress
from kvpool_server.server import ControlServer
from tests.fixtures.patience import PATIENCE_S


def control_server() -> ControlServer:
    return ControlServer(interceptors=[], service_names=["test.Echo"])


@contextmanager
def peer_that_says(answer: bytes | None) -> Iterator[str]:
    """Something that listens: it says `answer` and leaves, or accepts and says nothing at all."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer or b"")

    thread = threading.Thread(target=serve)
    if answer is not None:
        thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        if answer is not None:
            thread.join()
        listener.close()


async def test_it_reports_whether_a_server_serves_on_tcp_and_on_a_unix_socket(tmp_path: Path) -> None:
    server = control_server()
    port = server.listen_tcp(TcpAddress("127.0.0.1", 0))
    server.listen_unix(tmp_path / "s")
    await server.start()
    for address in (f"127.0.0.1:{port}", f"0.0.0.0:{port}", f"unix:{tmp_path / 's'}"):
        assert await asyncio.to_thread(probe, address, PATIENCE_S) == "NOT_SERVING"
    await server.set_serving(True)
    for address in (f"127.0.0.1:{port}", f"0.0.0.0:{port}", f"unix:{tmp_path / 's'}"):
        assert await asyncio.to_thread(probe, address, PATIENCE_S) == "SERVING"
    await server.stop(0)
    with pytest.raises(ProbeFailed, match="cannot reach"):
        await asyncio.to_thread(probe, f"127.0.0.1:{port}", PATIENCE_S)


async def test_the_exit_code_and_one_line_say_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_probe, "probe", partial(probe, timeout_s=PATIENCE_S))
    server = control_server()
    address = f"127.0.0.1:{server.listen_tcp(TcpAddress('127.0.0.1', 0))}"
    await server.start()
    assert await asyncio.to_thread(main, [address], {}) == 1
    assert capsys.readouterr().err == "NOT_SERVING\n"
    await server.set_serving(True)
    variables = {"EMPTY": "", "LISTEN": address, "LATER": "127.0.0.1:1"}
    assert await asyncio.to_thread(main, ["UNSET", "EMPTY", "LISTEN", "LATER"], variables) == 0
    assert capsys.readouterr().err == ""
    await server.stop(0)
    for words in ([], ["UNSET"]):
        assert main(words, {}) == 1
        assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not a gRPC server"),
        (b"\x00\x00\x02\x00\x01\x00\x00\x00\x01ab\x00\x00\x00\x01\x05\x00\x00\x00\x01", "the answer is not a message"),
        (b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x02", "ended the call"),
    ],
)
def test_a_peer_that_is_no_health_service_is_reported(answer: bytes, message: str) -> None:
    with peer_that_says(answer) as address, pytest.raises(ProbeFailed, match=message):
        raise ProbeFailed(probe(address, PATIENCE_S))


def test_a_peer_that_says_nothing_is_given_up() -> None:
    with peer_that_says(None) as address, pytest.raises(ProbeFailed, match=r"no answer from .* within 0\.05 s"):
        probe(address, timeout_s=0.05)


@pytest.mark.parametrize("address", ["", "7100", "host:", "host:port", ":7100"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ProbeFailed, match="expected host:port"):
        probe(address)
