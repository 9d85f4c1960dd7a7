"""How an engine knows that its agent touches the engine's GPU memory no more, also when the agent cannot say so."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Sequence

from kvpool.client.shared_memory import SharedMemoryRegion, until
from kvpool.core.ipc import HOLD_ENDED, HOLD_FILE_BYTES

DRIVER_GRACE_S = 1.0
"""From the end of an agent's process until the driver is trusted to have taken its GPU work down.

The kernel closes the process's device files before it reports the end, and the driver stops the channels of a closed
file there and then, save for what it hands to a thread of its own. Nothing announces that; a second is far more than it
takes.
"""
_SO_PEERPIDFD = 77  # since Linux 6.5; the socket module of Python 3.11 does not name it
_UCRED = struct.Struct("3i")  # pid, uid, gid
_CONNECT_TIMEOUT_S = 5.0


class GpuMemoryHold:
    """Of memory that is mapped by CUDA IPC, of which the kernel knows nothing.

    The agent keeps a file of ours open as long as it maps the memory (EngineRegister.hold_file). When the lock on that
    file is gone, either the agent has said in it that it has let go, after its GPU work had ended, or its process is
    ending: then so does its GPU work, with the process and a grace period for the driver.
    """

    def __init__(self, driver_grace_s: float = DRIVER_GRACE_S, *, beside: Sequence[SharedMemoryRegion] = ()) -> None:
        """beside: what else the agent is to be offered descriptors of. Whether they are mapped says nothing."""
        self._file = SharedMemoryRegion(HOLD_FILE_BYTES, "kvpool-hold")
        self._driver_grace_s = driver_grace_s
        self._process: PeerProcess | None = None
        self.lent = (self._file, *beside)

    def agent_at(self, socket_path: str) -> None:
        """Remember whose process it is; blocks for a moment."""
        self._process = PeerProcess.behind(socket_path)

    @property
    def ends_with_successor(self) -> bool:
        """Whether the hold is over once the engine has registered again. An agent that has taken the place of the old
        one knows nothing of its GPU work: only the old one's word counts, or its process's end."""
        return not self._file.is_lent() and self._has_said_so

    @property
    def _has_said_so(self) -> bool:
        return self._file.buffer[:1] == HOLD_ENDED

    async def ended(self) -> None:
        """Return when the agent has let go of the memory, or its process and its GPU work have ended."""
        await until(lambda: not self._file.is_lent())
        if self._has_said_so:
            return
        if self._process is not None:  # the lock goes early in the end of a process, its device files perhaps later
            await until(self._process.has_ended)
        await asyncio.sleep(self._driver_grace_s)

    def close(self) -> None:
        """Nothing waits for it any more. Idempotent."""
        self._file.close()
        if self._process is not None:
            self._process.close()


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
