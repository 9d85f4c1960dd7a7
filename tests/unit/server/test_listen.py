"""Addresses are refused with words that help; only sockets of dead processes are removed."""

import socket
import stat
from pathlib import Path

import pytest

from kvpool.core.errors import StartupFailed
from kvpool_server.listen import TcpAddress, check_directory, check_tcp, claim_unix_path


@pytest.mark.parametrize(
    ("text", "expected"), [("127.0.0.1:80", TcpAddress("127.0.0.1", 80)), ("[::1]:0", TcpAddress("::1", 0))]
)
def test_parse_and_print(text: str, expected: TcpAddress) -> None:
    assert TcpAddress.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:-1", "host:65536", "host:http", "host:²"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        TcpAddress.parse(text)


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = TcpAddress("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(StartupFailed, match=rf"cannot listen on {address}: it is in use; stop .* another port"):
            check_tcp(address)


def test_address_of_another_host() -> None:
    with pytest.raises(StartupFailed, match="no interface of this host"):
        check_tcp(TcpAddress("192.0.2.1", 0))


def test_stale_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.listen()
    dead.close()
    assert stat.S_ISSOCK(path.stat().st_mode)
    claim_unix_path(path)
    assert not path.exists()


def test_live_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        with pytest.raises(StartupFailed, match="in use"):
            claim_unix_path(path)
        assert path.exists()


def test_file_in_the_way_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with pytest.raises(StartupFailed, match="a file is in the way"):
        claim_unix_path(path)
    assert path.read_text() == "precious"


def test_long_path_and_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match="longer than 107 bytes"):
        claim_unix_path(tmp_path / ("x" * 108))
    with pytest.raises(StartupFailed, match="does not exist; create it"):
        claim_unix_path(tmp_path / "no" / "s.sock")


def test_unwritable_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # a superuser may write anywhere
    with pytest.raises(StartupFailed, match="is not writable by uid"):
        check_directory(tmp_path)
