"""Engine memory that an agent can map, and how the engine knows that no agent maps it any more."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kvpool.client.host_memory import populate
from kvpool.client.retry import Backoff
from kvpool.core.errors import InvalidRequest, StartupFailed

# An agent that maps it must never find the memory gone behind its mapping, and can change nothing of this.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POLL_MAX_S = 0.5


class SharedMemoryRegion:
    """Anonymous shared memory of a fixed size, zeroed, made of a memfd. All of it is in place once it is made: an agent
    that maps it only fills in page tables, while an engine waits to be registered.

    `buffer` is what engine tensors are made over (`torch.frombuffer(region.buffer, ...)`). Each descriptor that goes to
    an agent is an open file description of its own, with a shared lock on it. The kernel keeps that lock for as long as
    anything refers to the description: the descriptor itself, a copy of it in any process, or a mapping made of it. So
    once an exclusive lock can be had, the agent has unmapped the memory, or its process has gone.
    """

    def __init__(self, size_bytes: int, name: str = "kvpool-engine", *, adopted_fd: int | None = None) -> None:
        """adopted_fd: see `adopt`.

        raises: InvalidRequest for a size that is not > 0; StartupFailed when there is not so much memory.
        """
        if size_bytes <= 0:
            raise InvalidRequest(f"size_bytes must be > 0, got {size_bytes}")
        self.size_bytes = size_bytes
        if adopted_fd is None:
            self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            self._fd = os.dup(adopted_fd)
        try:
            os.posix_fallocate(self._fd, 0, size_bytes)
            if adopted_fd is None:
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = mmap.mmap(self._fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            populate(self._memory)
        except OSError as error:
            os.close(self._fd)
            raise StartupFailed(f"cannot have {size_bytes} bytes of shared memory ({error}); ask for less") from error

    @classmethod
    def adopt(cls, fd: int, size_bytes: int) -> Self:
        """Of a file in memory that is there already, that of another library, say. The descriptor stays the caller's.

        raises: as the constructor. The file must not shrink.
        """
        return cls(size_bytes, adopted_fd=fd)

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self._memory)

    def lent_descriptor(self) -> int:
        """A new locked descriptor to hand to an agent; the caller closes its copy at once."""
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    def is_lent(self) -> bool:
        """Whether some process still has a lent descriptor or a mapping made of one."""
        if self._fd < 0:
            return False  # it was closed: there is nothing left to protect
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(fd)

    def close(self) -> bool:
        """Unmap. Idempotent; False if views still live: then the memory goes with the last of them."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        try:
            self._memory.close()
        except BufferError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SharedMemoryHold:
    """Of memory whose descriptors the agent gets: the lock on each says whether it is still mapped anywhere."""

    def __init__(self, regions: Sequence[SharedMemoryRegion]) -> None:
        self.lent = tuple(regions)  # what the agent is to be offered descriptors of, in order

    def agent_at(self, socket_path: str) -> None:
        """The kernel's locks tell all: no need to know the process."""

    @property
    def ends_with_successor(self) -> bool:
        """Whether the hold is over once the engine has registered again. The new session locks the same memory, so
        nothing else shows it; the agent answers only after all work of the old one has ended."""
        return True

    async def ended(self) -> None:
        """Return when the agent has let go of the memory, or its process has ended."""
        await until(lambda: not any(region.is_lent() for region in self.lent))

    def close(self) -> None:
        """The regions belong to the engine."""


async def until(condition: Callable[[], bool]) -> None:
    """Return once it holds. The kernel does not announce a dropped lock or the end of a process, so it is polled."""
    backoff = Backoff(0.005, _POLL_MAX_S)
    while True:
        if condition():
            return
        await asyncio.sleep(backoff.next_s())
