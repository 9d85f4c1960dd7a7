"""Descriptor passing against peers that break the protocol: nothing is taken, nothing leaks, others are served."""

import array
import asyncio
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.client.fds import fetch_fd
from kvpool.core.errors import InvalidRequest, ServiceUnavailable
from kvpool.testing import eventually
from kvpool.wire.fd_frames import FdKind, FdRequest, pack_reply, pack_request
from kvpool_server.fds import FdServer, PeerCredentials
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.standstill import stood_still
from tests.unit.client.fd_owner import TOKEN, Owner, open_fds, serving


async def exchange(path: Path, frame: bytes, fds: list[int], pieces: int = 1) -> bytes:
    """Send raw bytes with raw descriptors on the first piece, and read until the server closes."""
    raw = socket.socket(socket.AF_UNIX)
    raw.setblocking(False)
    with raw:
        raw.connect(str(path))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        step = max(1, -(-len(frame) // pieces))
        for start in range(0, len(frame), step):
            try:
                raw.sendmsg([frame[start : start + step]], rights if start == 0 else [])
            except BrokenPipeError:
                break  # the server has seen enough
            await asyncio.sleep(0)
        raw.shutdown(socket.SHUT_WR)
        loop = asyncio.get_running_loop()
        data = b""
        try:
            while part := await loop.sock_recv(raw, 4096):
                data += part
        except ConnectionResetError:
            pass
        return data


FETCH = pack_request(FdRequest(FdKind.FETCH, TOKEN, 1))
OFFER = pack_request(FdRequest(FdKind.OFFER, TOKEN, 1, 9))


@pytest.mark.parametrize(
    ("frame", "fd_count", "answered"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything, really\r\n\r\n", 0, True),
        (bytes(range(200, 256)), 1, True),
        (FETCH[:30], 0, False),
        (OFFER[:30], 1, False),
        (b"", 0, False),
        (FETCH, 1, True),
        (OFFER, 0, True),
        (OFFER, 2, False),
        (OFFER, 8, False),
        (OFFER, 250, False),
        (FETCH[:4] + b"\x02" + FETCH[5:], 0, True),
        (FETCH[:5] + b"\x07" + FETCH[6:], 0, True),
    ],
)
async def test_hostile_peer_gets_nothing_and_leaks_nothing(
    tmp_path: Path, frame: bytes, fd_count: int, answered: bool
) -> None:
    async with serving(tmp_path) as (owner, _, path):
        for pieces in (1, 5):
            answer = await exchange(path, frame, [owner.fd] * fd_count, pieces)
            assert bool(answer) == answered
            assert answer[:6] != pack_reply(0)[:6]
        assert owner.offers == []
        fetched = await asyncio.to_thread(fetch_fd, path, TOKEN, 1, timeout_s=PATIENCE_S)  # and others are still served
        os.close(fetched.fd)


async def test_descriptors_on_several_pieces_are_all_closed(tmp_path: Path) -> None:
    async with serving(tmp_path) as (owner, _, path):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            for start in range(0, 50, 10):
                socket.send_fds(raw, [OFFER[start : start + 10]], [owner.fd])
            raw.shutdown(socket.SHUT_WR)
            raw.settimeout(0)
            await eventually(lambda: _closed_by_peer(raw))
        assert owner.offers == []


async def test_frame_in_many_pieces_is_understood(tmp_path: Path) -> None:
    async with serving(tmp_path) as (owner, _, path):
        await exchange(path, OFFER, [owner.fd], pieces=56)
        assert [(number, size_bytes) for number, size_bytes, _ in owner.offers] == [(1, 9)]


async def test_silent_peer_is_dropped(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server, path):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            raw.send(FETCH[:10])
            await eventually(lambda: server.connection_count == 1)
            stood_still(2 * PATIENCE_S)
            await eventually(lambda: server.connection_count == 0)


async def test_connections_are_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, connection_limit=2) as (_, server, path):
        idle = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for raw in idle:
            raw.connect(str(path))
        await eventually(lambda: server.connection_count == 2)
        with pytest.raises(ServiceUnavailable):
            await asyncio.to_thread(fetch_fd, path, TOKEN, 1, timeout_s=PATIENCE_S)
        for raw in idle:
            raw.close()
        await eventually(lambda: server.connection_count == 0)
        fetched = await asyncio.to_thread(fetch_fd, path, TOKEN, 1, timeout_s=PATIENCE_S)
        os.close(fetched.fd)


async def test_peer_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = PeerCredentials(1, os.getuid() + 1, 1)
    async with serving(tmp_path) as (owner, _, path):
        monkeypatch.setattr("kvpool_server.fds._credentials", lambda _: stranger)
        with pytest.raises(ServiceUnavailable):
            await asyncio.to_thread(fetch_fd, path, TOKEN, 1, timeout_s=PATIENCE_S)
        assert owner.peers == []


async def test_member_of_the_group_is_served_where_the_group_is_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    friend = PeerCredentials(1, os.getuid() + 1, 1)
    owner = Owner()
    server = FdServer(tmp_path / "s", on_fetch=owner.fetch, group_access=True)
    server.start()
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
    monkeypatch.setattr("kvpool_server.fds._credentials", lambda _: friend)
    fetched = await asyncio.to_thread(fetch_fd, tmp_path / "s", TOKEN, 1, timeout_s=PATIENCE_S)
    assert owner.peers == [friend]
    server.close()
    os.close(fetched.fd)
    os.close(owner.fd)


@pytest.mark.parametrize(
    ("reply", "fd_count", "expected"),
    [
        (b"", 0, ServiceUnavailable),
        (pack_reply(1)[:9], 1, ServiceUnavailable),
        (b"x" * 28, 1, InvalidRequest),
        (pack_reply(1), 0, ServiceUnavailable),
        (pack_reply(1), 2, ServiceUnavailable),
    ],
)
def test_hostile_server_cannot_leak_descriptors_into_a_client(
    tmp_path: Path, reply: bytes, fd_count: int, expected: type[Exception]
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        thread = threading.Thread(target=_answer_once(listener, reply, fd_count))
        before = open_fds()
        thread.start()
        with pytest.raises(expected):
            fetch_fd(tmp_path / "s", TOKEN, 1, timeout_s=PATIENCE_S)
        thread.join()
        assert not open_fds() - before


def _answer_once(listener: socket.socket, reply: bytes, fd_count: int) -> Callable[[], None]:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(56)
            if reply:
                socket.send_fds(connection, [reply], [listener.fileno()] * fd_count)

    return serve


def _closed_by_peer(raw: socket.socket) -> bool:
    try:
        return raw.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
