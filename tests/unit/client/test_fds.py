"""Descriptor passing, both directions, against the real server and against hostile peers."""

import array
import asyncio
import hmac
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvpool.client.fds import fetch_fd, offer_fd
from kvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvPoolError,
    ServiceUnavailable,
    SessionUnknown,
    StartupFailed,
)
from kvpool.testing import eventually
from kvpool.wire.fd_frames import FdKind, FdRequest, pack_reply, pack_request
from kvpool_server.fds import FdGrant, FdServer, PeerCredentials

TOKEN = bytes(range(32))


def open_fds() -> set[str]:
    """What this process has open, by number and target."""
    targets = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            targets.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue  # the listing's own
    return targets


class Owner:
    """Owns one memfd that it hands out, and takes what is offered."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("segment")
        os.write(self.fd, b"arena bytes")
        self.close_after = False
        self.offers: list[tuple[int, int, int]] = []  # id, size, descriptor
        self.peers: list[PeerCredentials] = []

    def fetch(self, peer: PeerCredentials, token: bytes, number: int) -> FdGrant:
        self._check(peer, token)
        if number == 666:
            raise KeyError("a bug with a secret")
        return FdGrant(self.fd, size_bytes=11, generation=number, close_after=self.close_after)

    def offer(self, peer: PeerCredentials, token: bytes, number: int, size_bytes: int, fd: int) -> None:
        self._check(peer, token)
        self.offers.append((number, size_bytes, fd))

    def _check(self, peer: PeerCredentials, token: bytes) -> None:
        if not hmac.compare_digest(token, TOKEN):
            raise SessionUnknown("no session has this token")
        self.peers.append(peer)


@asynccontextmanager
async def serving(
    tmp_path: Path, connection_limit: int = 64, timeout_s: float = 30.0
) -> AsyncIterator[tuple[Owner, FdServer, Path]]:
    """A server on a fresh socket; asserts that no descriptor is left over in the end."""
    before = open_fds()
    owner, path = Owner(), tmp_path / "fds.sock"
    server = FdServer(
        path,
        on_fetch=owner.fetch,
        on_offer=owner.offer,
        connection_limit=connection_limit,
        timeout_s=timeout_s,
    )
    server.start()
    try:
        yield owner, server, path
    finally:
        await eventually(lambda: server.connection_count == 0)
        server.close()
        for _, _, fd in owner.offers:
            os.close(fd)
        if not owner.close_after:
            os.close(owner.fd)
    # The default executor keeps its threads, and they have no descriptors.
    assert open_fds() == before
    assert not path.exists()


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


async def test_fetch(tmp_path: Path) -> None:
    async with serving(tmp_path) as (owner, _, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        fetched = await asyncio.to_thread(fetch_fd, path, TOKEN, 7)
        try:
            assert os.pread(fetched.fd, 100, 0) == b"arena bytes"
            assert (fetched.size_bytes, fetched.generation) == (11, 7)
            assert not os.get_inheritable(fetched.fd)
            assert owner.peers == [PeerCredentials(os.getpid(), os.getuid(), os.getgid())]
        finally:
            os.close(fetched.fd)


async def test_server_can_let_go_of_what_it_hands_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as (owner, server, path):
        owner.close_after = True
        fetched = await asyncio.to_thread(fetch_fd, path, TOKEN, 1)
        await eventually(lambda: server.connection_count == 0)
        # The client's may have got the number of the server's, which was free by then.
        assert sum("memfd:segment" in line for line in open_fds()) == 1
        assert os.pread(fetched.fd, 5, 0) == b"arena"
        os.close(fetched.fd)


async def test_offer(tmp_path: Path) -> None:
    async with serving(tmp_path) as (owner, _, path):
        mine = os.memfd_create("cache")
        os.write(mine, b"kv")
        await asyncio.to_thread(offer_fd, path, TOKEN, 3, 2, mine)
        os.close(mine)
        [(number, size_bytes, fd)] = owner.offers
        assert (number, size_bytes, os.pread(fd, 9, 0)) == (3, 2, b"kv")
        assert not os.get_inheritable(fd)


async def test_refusals_reach_the_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as (owner, _, path):
        with pytest.raises(SessionUnknown, match="no session has this token"):
            await asyncio.to_thread(fetch_fd, path, bytes(32), 1)
        with pytest.raises(SessionUnknown):
            await asyncio.to_thread(offer_fd, path, bytes(32), 1, 0, owner.fd)
        with pytest.raises(KvPoolError) as bug:
            await asyncio.to_thread(fetch_fd, path, TOKEN, 666)
        assert type(bug.value) is KvPoolError and "secret" not in bug.value.message
        assert owner.offers == []


async def test_server_without_handlers_refuses(tmp_path: Path) -> None:
    server = FdServer(tmp_path / "s")
    server.start()
    with pytest.raises(InvalidRequest, match="hands out no descriptors"):
        await asyncio.to_thread(fetch_fd, tmp_path / "s", TOKEN, 1)
    with pytest.raises(InvalidRequest, match="takes no descriptors"):
        await asyncio.to_thread(offer_fd, tmp_path / "s", TOKEN, 1, 1, 0)
    server.close()


@pytest.mark.parametrize("token", [b"", b"short", bytes(33)])
def test_bad_token_is_refused_before_it_is_sent(token: bytes) -> None:
    with pytest.raises(InvalidRequest, match="32 bytes"):
        fetch_fd("/nowhere", token, 1)


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
            assert answer[:6] != pack_reply(0, 0)[:6]
        assert owner.offers == []
        fetched = await asyncio.to_thread(fetch_fd, path, TOKEN, 1)  # and others are still served
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
    async with serving(tmp_path, timeout_s=0.05) as (_, server, path):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            raw.send(FETCH[:10])
            await eventually(lambda: server.connection_count == 1)
            await eventually(lambda: server.connection_count == 0)


async def test_connections_are_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, connection_limit=2) as (_, server, path):
        idle = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for raw in idle:
            raw.connect(str(path))
        await eventually(lambda: server.connection_count == 2)
        with pytest.raises(ServiceUnavailable):
            await asyncio.to_thread(fetch_fd, path, TOKEN, 1)
        for raw in idle:
            raw.close()
        await eventually(lambda: server.connection_count == 0)
        fetched = await asyncio.to_thread(fetch_fd, path, TOKEN, 1)
        os.close(fetched.fd)


async def test_peer_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = PeerCredentials(1, os.getuid() + 1, 1)
    async with serving(tmp_path) as (owner, _, path):
        monkeypatch.setattr("kvpool_server.fds._credentials", lambda _: stranger)
        with pytest.raises(ServiceUnavailable):
            await asyncio.to_thread(fetch_fd, path, TOKEN, 1)
        assert owner.peers == []


async def test_allowed_user_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    friend = PeerCredentials(1, os.getuid() + 1, 1)
    owner = Owner()
    server = FdServer(tmp_path / "s", on_fetch=owner.fetch, allowed_uids=[friend.uid])
    server.start()
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o666
    monkeypatch.setattr("kvpool_server.fds._credentials", lambda _: friend)
    fetched = await asyncio.to_thread(fetch_fd, tmp_path / "s", TOKEN, 1)
    assert owner.peers == [friend]
    server.close()
    os.close(fetched.fd)
    os.close(owner.fd)


async def test_socket_of_a_live_server_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, path):
        with pytest.raises(StartupFailed, match="in use"):
            FdServer(path).start()


def test_nobody_there(tmp_path: Path) -> None:
    before = open_fds()
    with pytest.raises(ServiceUnavailable, match="cannot be reached"):
        fetch_fd(tmp_path / "missing", TOKEN, 1)
    assert open_fds() == before


def test_server_that_never_answers(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(DeadlineExceeded, match=r"within 0.05 s"):
            fetch_fd(tmp_path / "s", TOKEN, 1, timeout_s=0.05)


@pytest.mark.parametrize(
    ("reply", "fd_count", "expected"),
    [
        (b"", 0, ServiceUnavailable),
        (pack_reply(1, 1)[:9], 1, ServiceUnavailable),
        (b"x" * 28, 1, InvalidRequest),
        (pack_reply(1, 1), 0, ServiceUnavailable),
        (pack_reply(1, 1), 2, ServiceUnavailable),
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
            fetch_fd(tmp_path / "s", TOKEN, 1)
        thread.join()
        assert open_fds() == before


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
