"""Memory of an engine's own KV blocks, which an agent maps: shared memory for a model on the CPU, else its GPU's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from kvpool.client.engine_events import EventSlots
from kvpool.client.engine_registration import GpuRegion
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.core.errors import DeadlineExceeded
from kvpool.core.ipc import EngineEvent

if TYPE_CHECKING:
    import torch


_log = logging.getLogger(__name__)
# An agent that hangs must not hang the engine: rather than wait longer for an event the stream is waited for.
_EVENT_WAIT_S = 0.05
# An agent that did not say that it has let go may still write there. This memory is not given out again then.
_abandoned: list[object] = []


class BlockMemory(Protocol):
    """One piece of memory, as an agent maps it."""

    @property
    def regions(self) -> tuple[SharedMemoryRegion, ...] | tuple[GpuRegion, ...]:
        """For EngineRegistration."""

    @property
    def events(self) -> EventSlots | None:
        """For EngineRegistration."""

    def bytes_of(self) -> memoryview | torch.Tensor:
        """All of it, writable: a buffer, or a tensor of bytes."""

    def record_event(self) -> EngineEvent | None:
        """What the next store or load has to come after: the engine's work on the blocks up to now. None: it is done.

        The event is given back by that store or load.
        """

    def close(self, *, untouched: bool) -> None:
        """Free it. untouched: no agent touches it any more. Idempotent."""


class SharedBlockMemory:
    """Of the CPU. Copies are done when they return, so there is nothing to come after."""

    events = None

    def __init__(self, size_bytes: int) -> None:
        """Raises StartupFailed if there is not so much shared memory."""
        self._region = SharedMemoryRegion(size_bytes)
        self.regions = (self._region,)

    def bytes_of(self) -> memoryview:
        """See BlockMemory."""
        return self._region.buffer

    def record_event(self) -> None:
        """See BlockMemory."""

    def close(self, *, untouched: bool) -> None:
        """See BlockMemory. What an agent may still touch stays mapped there; ours is unmapped."""
        self._region.close()


class GpuBlockMemory:
    """Of one GPU, from torch's allocator, which gets it back at the end."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """device: with its index. Raises InvalidRequest for an allocator whose memory cannot be shared (expandable
        segments, cudaMallocAsync), naming what to set; NotServed without a driver; torch.OutOfMemoryError."""
        import torch

        from kvpool.client.gpu import GpuEvents, export_tensors

        self._device = device
        self._memory: torch.Tensor | None = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.regions = export_tensors([self._memory]).regions
        self._events = GpuEvents(device.index or 0)
        self.events = self._events.slots

    def bytes_of(self) -> torch.Tensor:
        """See BlockMemory."""
        assert self._memory is not None, "not closed"
        return self._memory

    def record_event(self) -> EngineEvent | None:
        """See BlockMemory: the work that was given to the calling thread's current stream."""
        try:
            return self._events.record(timeout_s=_EVENT_WAIT_S)
        except DeadlineExceeded:
            import torch

            torch.cuda.current_stream(self._device).synchronize()
            return None

    def close(self, *, untouched: bool) -> None:
        """See BlockMemory."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        if untouched:
            self._events.close()
            return
        _abandoned.append((memory, self._events))
        _log.warning("kvpool: %d bytes of GPU memory are not reused: an agent may still touch them", memory.numel())


def block_memory(size_bytes: int, device: torch.device) -> BlockMemory:
    """Where a model on `device` keeps its blocks. Raises as the memory's kind does."""
    import torch

    if device.type != "cuda":
        return SharedBlockMemory(size_bytes)
    return GpuBlockMemory(size_bytes, torch.empty(0, device=device).device)  # that of a tensor has its index
