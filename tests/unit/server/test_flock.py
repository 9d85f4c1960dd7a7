"""Liveness of a peer by a lock that the kernel drops, with real processes."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.testing import eventually_sync
from kvpool_server.flock import create_session_file, list_session_files, peer_alive, remove_session_file

# Receives the session's descriptor over fd 0, starts a child that inherits it when asked to, and waits to be killed.
_PEER = """
import os, socket, sys, time
channel = socket.socket(fileno=0)
_, (fd,), _, _ = socket.recv_fds(channel, 1, 1)
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        channel.close()
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
else:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def start_peer() -> Iterator[Callable[[int, str], tuple[subprocess.Popen[str], int]]]:
    """Start a process that gets a descriptor by SCM_RIGHTS; it, and what it forked, is killed in the end."""
    pids: list[int] = []
    peers: list[subprocess.Popen[str]] = []

    def start(fd: int, mode: str) -> tuple[subprocess.Popen[str], int]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            peer = subprocess.Popen(
                [sys.executable, "-c", _PEER, mode], stdin=theirs.fileno(), stdout=subprocess.PIPE, text=True
            )
            peers.append(peer)
            socket.send_fds(ours, [b"x"], [fd])
            assert peer.stdout is not None
            pid = int(peer.stdout.readline())
        pids.append(pid)
        return peer, pid

    yield start
    for peer in peers:
        peer.kill()
        peer.communicate()
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_killed_peer_is_seen_dead(
    tmp_path: Path, start_peer: Callable[[int, str], tuple[subprocess.Popen[str], int]]
) -> None:
    fd = create_session_file(tmp_path, "s1")
    assert peer_alive(tmp_path, "s1")
    peer, _ = start_peer(fd, "alone")
    os.close(fd)  # as the owner does once the descriptor is passed
    assert peer_alive(tmp_path, "s1")
    peer.kill()
    peer.wait()
    eventually_sync(lambda: not peer_alive(tmp_path, "s1"))


def test_child_that_inherited_the_descriptor_counts_as_the_peer(
    tmp_path: Path, start_peer: Callable[[int, str], tuple[subprocess.Popen[str], int]]
) -> None:
    fd = create_session_file(tmp_path, "s1")
    peer, child = start_peer(fd, "fork")
    os.close(fd)
    peer.kill()
    peer.wait()
    assert peer_alive(tmp_path, "s1"), "the child still has whatever the peer had mapped"
    os.kill(child, signal.SIGKILL)
    eventually_sync(lambda: not peer_alive(tmp_path, "s1"))


def test_looking_twice_at_once_does_not_fool_itself(tmp_path: Path) -> None:
    os.close(create_session_file(tmp_path, "s1"))
    with open(tmp_path / "session-s1.lock") as other_check:
        fcntl.flock(other_check, fcntl.LOCK_SH)
        assert not peer_alive(tmp_path, "s1")


def test_descriptor_is_not_inherited_by_programs_we_start(tmp_path: Path) -> None:
    fd = create_session_file(tmp_path, "s1")
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_list_and_remove(tmp_path: Path) -> None:
    fds = [create_session_file(tmp_path, name) for name in ("b", "a")]
    (tmp_path / "other").touch()
    (tmp_path / ".new-c").touch()
    assert list_session_files(tmp_path) == ["a", "b"]
    remove_session_file(tmp_path, "a")
    remove_session_file(tmp_path, "a")
    assert list_session_files(tmp_path) == ["b"]
    assert not peer_alive(tmp_path, "a")
    for fd in fds:
        os.close(fd)


def test_id_is_used_once_and_cannot_leave_the_directory(tmp_path: Path) -> None:
    os.close(create_session_file(tmp_path, "s1"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileExistsError):
        create_session_file(tmp_path, "s1")
    assert len(os.listdir("/proc/self/fd")) == before
    assert sorted(os.listdir(tmp_path)) == ["session-s1.lock"]
    for bad in ("", "../x", "a/b", "x" * 65, "a\n"):
        with pytest.raises(ValueError, match="session id"):
            create_session_file(tmp_path, bad)
