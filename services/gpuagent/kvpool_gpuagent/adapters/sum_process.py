"""One sum worker process as the agent has it: its life, its control socket and its channels."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from kvpool.core.page import SUM_BLOCK_BYTES
from kvpool_gpuagent.core.sum_frames import COMMAND, DONE, MOST_BLOCKS, Command

READY_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 5.0  # of work that takes 0.2 s: who is later hangs
_END_TIMEOUT_S = 2.0
_MODULE = "kvpool_gpuagent.sum_worker"
_TIMEVAL = struct.Struct("@ll")


def sum_process_count() -> int:
    """How many are enough for a link of 55 GB/s, on a machine that engines need too."""
    return min(8, len(os.sched_getaffinity(0)) // 2)


class Channel:
    """A socket to one worker, for one request at a time. Calls raise OSError if the worker has gone or hangs."""

    def __init__(self, local: socket.socket) -> None:
        self._socket = local

    def ask(self, request: bytes) -> None:
        """Send a request; does not wait."""
        self._socket.send(request)

    def answer(self) -> bytes:
        """Wait for what was asked. One system call: each takes the interpreter's lock anew."""
        answer = self._socket.recv(MOST_BLOCKS * 8)
        if not answer:
            raise ConnectionResetError("the sum worker has closed its channel")
        return answer

    def close(self) -> None:
        """What is still asked is not answered."""
        self._socket.close()


class SumProcess:
    """Starts in the constructor. Start it from a thread that lives as long as it: the kernel ends it with that one."""

    def __init__(self) -> None:
        """Raises OSError if no process can be started."""
        self._control, theirs = _socket_pair()
        self._lock = threading.Lock()  # of the control socket
        self._idle: list[Channel] = []
        self.is_lost = False
        command = [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(os.getpid()), str(SUM_BLOCK_BYTES)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL
                )
        except OSError:
            self._control.close()
            raise
        self.exit_descriptor = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_ready(self, stop_descriptor: int) -> None:
        """Until it serves. Raises OSError if it has ended or takes too long, or stop_descriptor becomes readable."""
        ready = wait_readable([self._control.fileno(), stop_descriptor], READY_TIMEOUT_S)
        if self._control.fileno() not in ready:
            raise TimeoutError(f"sum worker {self.pid} was not waited for any longer")
        if self._control.recv(1) != DONE:
            raise ConnectionResetError(f"sum worker {self.pid} has ended while it started")

    def map(self, segment: int, descriptor: int, size_bytes: int) -> bool:
        """Have it map a segment; False if it cannot. Raises OSError if it has gone or hangs."""
        return self._command(Command.MAP, segment, size_bytes, descriptor)

    def unmap(self, segment: int) -> None:
        """Have it unmap a segment; it has when this returns. Raises OSError if it has gone or hangs."""
        self._command(Command.UNMAP, segment)

    def take(self) -> Channel:
        """A channel that nobody else uses. Raises OSError if it has gone."""
        with suppress(IndexError):
            return self._idle.pop()
        ours, theirs = _socket_pair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._control, [COMMAND.pack(Command.ANSWER_ON, 0, 0)], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return Channel(ours)

    def give(self, channel: Channel) -> None:
        """Back; what was asked on it has been answered."""
        self._idle.append(channel)
        if self.is_lost:
            self._drop_idle()

    def lose(self) -> None:
        """It has failed: end it, so that whoever watches its exit_descriptor starts another."""
        self.is_lost = True
        self._process.kill()

    def wait_ended(self) -> bool:
        """Whether it has ended, after waiting for a short time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        return self.exit_code() is not None

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End it and wait until it has: by its socket, and if that takes too long, by force."""
        self.is_lost = True
        with self._lock:
            self._control.close()
        self._drop_idle()
        if not self.wait_ended():
            self._process.kill()
            self._process.wait()
        os.close(self.exit_descriptor)

    def _drop_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _command(self, command: Command, segment: int, size_bytes: int = 0, descriptor: int | None = None) -> bool:
        descriptors = [] if descriptor is None else [descriptor]
        with self._lock:
            socket.send_fds(self._control, [COMMAND.pack(command, segment, size_bytes)], descriptors)
            answer = self._control.recv(1)
        if not answer:
            raise ConnectionResetError(f"sum worker {self.pid} has ended")
        return answer == DONE


def wait_readable(descriptors: Sequence[int], timeout_s: float | None) -> set[int]:
    """Those of the descriptors that are readable, as soon as there is one; none after the time."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1e3)}


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Ours and theirs. Ours gives up after a time by itself: Python's own timeouts make two system calls of one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    limit = _TIMEVAL.pack(int(ANSWER_TIMEOUT_S), 0)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return ours, theirs
