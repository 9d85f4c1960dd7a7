"""Descriptor passing, both directions, against the real server."""

import asyncio
import gc
import os
import socket
import stat
from pathlib import Path

import pytest

from kvpool.client.fds import descriptor_path, fetch_fd, offer_fd
from kvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvPoolError,
    ServiceUnavailable,
    SessionUnknown,
    StartupFailed,
)
from kvpool.testing import eventually
from kvpool.wire.fd_frames import pack_reply
from kvpool_server.fds import FdServer, PeerCredentials
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.fd_owner import TOKEN, open_fds, serving


async def test_fetch(tmp_path: Path) -> None:
    async with serving(tmp_path) as (owner, _, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        fetched = await asyncio.to_thread(fetch_fd, path, TOKEN, 7, timeout_s=PATIENCE_S)
        try:
            assert os.pread(fetched.fd, 100, 0) == b"arena bytes"
            assert fetched.size_bytes == 11
            assert not os.get_inheritable(fetched.fd)
            assert owner.peers == [PeerCredentials(os.getpid(), os.getuid(), os.getgid())]
        finally:
            os.close(fetched.fd)


async def test_server_can_let_go_of_what_it_hands_out(tmp_path: Path) -> None:
    gc.collect()  # descriptors of tests before
    async with serving(tmp_path) as (owner, server, path):
        owner.close_after = True
        fetched = await asyncio.to_thread(fetch_fd, path, TOKEN, 1, timeout_s=PATIENCE_S)
        await eventually(lambda: server.connection_count == 0)
        # The client's may have got the number of the server's, which was free by then.
        assert sum("memfd:segment" in line for line in open_fds()) == 1
        assert os.pread(fetched.fd, 5, 0) == b"arena"
        os.close(fetched.fd)


async def test_offer(tmp_path: Path) -> None:
    async with serving(tmp_path) as (owner, _, path):
        mine = os.memfd_create("cache")
        os.write(mine, b"kv")
        await asyncio.to_thread(offer_fd, path, TOKEN, 3, 2, mine, timeout_s=PATIENCE_S)
        os.close(mine)
        [(number, size_bytes, fd)] = owner.offers
        assert (number, size_bytes, os.pread(fd, 9, 0)) == (3, 2, b"kv")
        assert not os.get_inheritable(fd)


async def test_refusals_reach_the_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as (owner, _, path):
        with pytest.raises(SessionUnknown, match="no session has this token"):
            await asyncio.to_thread(fetch_fd, path, bytes(32), 1, timeout_s=PATIENCE_S)
        with pytest.raises(SessionUnknown):
            await asyncio.to_thread(offer_fd, path, bytes(32), 1, 0, owner.fd, timeout_s=PATIENCE_S)
        with pytest.raises(KvPoolError) as bug:
            await asyncio.to_thread(fetch_fd, path, TOKEN, 666, timeout_s=PATIENCE_S)
        assert type(bug.value) is KvPoolError and "secret" not in bug.value.message
        assert owner.offers == []


async def test_server_without_handlers_refuses(tmp_path: Path) -> None:
    server = FdServer(tmp_path / "s")
    server.start()
    with pytest.raises(InvalidRequest, match="hands out no descriptors"):
        await asyncio.to_thread(fetch_fd, tmp_path / "s", TOKEN, 1, timeout_s=PATIENCE_S)
    with pytest.raises(InvalidRequest, match="takes no descriptors"):
        await asyncio.to_thread(offer_fd, tmp_path / "s", TOKEN, 1, 1, 0, timeout_s=PATIENCE_S)
    server.close()


def test_bytes_of_a_reply() -> None:
    assert pack_reply(5).hex() == "4b564644" + "01010000" + "0500000000000000" + 12 * "00"


@pytest.mark.parametrize("token", [b"", b"short", bytes(33)])
def test_bad_token_is_refused_before_it_is_sent(token: bytes) -> None:
    with pytest.raises(InvalidRequest, match="32 bytes"):
        fetch_fd("/nowhere", token, 1)


async def test_socket_of_a_live_server_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, path):
        with pytest.raises(StartupFailed, match="in use"):
            FdServer(path).start()


def test_the_descriptor_socket_is_looked_for_beside_the_one_that_reached_the_server(tmp_path: Path) -> None:
    (tmp_path / "agent.sock.fds").touch()
    reported = "/where/the/server/has/it/agent.sock.fds"
    assert descriptor_path(f"unix:{tmp_path}/agent.sock", reported) == str(tmp_path / "agent.sock.fds")
    assert descriptor_path(f"unix:{tmp_path}/elsewhere/agent.sock", reported) == reported
    assert descriptor_path("127.0.0.1:7200", reported) == reported
    assert descriptor_path(f"unix:{tmp_path}/agent.sock", "") == ""


def test_no_server_there(tmp_path: Path) -> None:
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
