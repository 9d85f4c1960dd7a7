"""The process behind a unix socket, to know when it has ended."""

from __future__ import annotations

import os
import select
import socket
import struct

_SO_PEERPIDFD = 77  # since Linux 6.5; the socket module of Python 3.11 does not name it
_UCRED = struct.Struct("3i")  # pid, uid, gid
_CONNECT_TIMEOUT_S = 5.0


class PeerProcess:
    """A process, held by a descriptor of it rather than by its number, which the kernel may use again."""

    def __init__(self, descriptor: int) -> None:
        """Owns the pidfd."""
        self._descriptor = descriptor

    @classmethod
    def behind(cls, path: str) -> PeerProcess | None:
        """The process that listens on the socket; None when the kernel does not show it to us: it is in a PID
        namespace that we do not see, or has ended."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            try:
                connection.connect(path)
                return cls(_pidfd_of(connection))
            except OSError:
                return None

    def has_ended(self) -> bool:
        """Whether all its threads are gone and its files are closed, those of drivers included."""
        if self._descriptor < 0:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _pidfd_of(connection: socket.socket) -> int:
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pid, _, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if pid <= 0:
            raise
        # It listened a moment ago: a number is not used again so soon.
        return os.pidfd_open(pid)
