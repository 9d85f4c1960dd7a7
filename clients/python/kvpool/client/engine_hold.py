"""How an engine knows that its agent touches the engine's memory no more, also when the agent cannot say so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvpool.client.peer_process import PeerProcess
from kvpool.client.retry import Backoff
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.core.ipc import HOLD_ENDED, HOLD_FILE_BYTES

DRIVER_GRACE_S = 1.0
"""From the end of an agent's process until the driver is trusted to have taken its GPU work down.

The kernel closes the process's device files before it reports the end, and the driver stops the channels of a closed
file there and then, save for what it hands to a thread of its own. Nothing announces that; a second is far more than it
takes.
"""
_POLL_MAX_S = 0.5


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
        await _until(lambda: not any(region.is_lent() for region in self.lent))

    def close(self) -> None:
        """The regions belong to the engine."""


class GpuMemoryHold:
    """Of memory that is mapped by CUDA IPC, of which the kernel knows nothing.

    The agent keeps a file of ours open as long as it maps the memory (EngineRegister.hold_file). When the lock on that
    file is gone, either the agent has said in it that it has let go, after its GPU work had ended, or its process is
    ending: then so does its GPU work, with the process and a grace period for the driver.
    """

    def __init__(self, driver_grace_s: float = DRIVER_GRACE_S) -> None:
        self._file = SharedMemoryRegion(HOLD_FILE_BYTES, "kvpool-hold")
        self._driver_grace_s = driver_grace_s
        self._process: PeerProcess | None = None
        self.lent = (self._file,)

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
        await _until(lambda: not self._file.is_lent())
        if self._has_said_so:
            return
        if self._process is not None:  # the lock goes early in the end of a process, its device files perhaps later
            await _until(self._process.has_ended)
        await asyncio.sleep(self._driver_grace_s)

    def close(self) -> None:
        """Nothing waits for it any more. Idempotent."""
        self._file.close()
        if self._process is not None:
            self._process.close()


MemoryHold = SharedMemoryHold | GpuMemoryHold


async def _until(condition: Callable[[], bool]) -> None:
    backoff = Backoff(0.005, _POLL_MAX_S)
    while True:
        # The kernel does not announce a dropped lock, so it is polled.
        if condition():
            return
        await asyncio.sleep(backoff.next_s())
