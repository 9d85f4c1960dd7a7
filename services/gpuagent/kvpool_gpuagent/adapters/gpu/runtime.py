"""What the transfer engine needs of a GPU: streams, marks, copies and memory. `cuda_runtime` is the real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Int64s = npt.NDArray[np.int64]


class OutOfDeviceMemory(Exception):
    """The GPU has no room for what was asked for."""


class Mark(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Block until the work before it has ended. Raises what the GPU reports."""
        ...

    def passed(self) -> bool:
        """Whether it has ended; looks, never waits."""
        ...


class Stream(Protocol):
    """Work in order."""

    address: int

    def mark(self) -> Mark:
        """After the work enqueued so far."""
        ...

    def after(self, mark: Mark) -> None:
        """Work from here on waits for a mark of another stream."""
        ...

    def synchronize(self) -> None:
        """Block until all its work has ended. Raises what the GPU reports."""
        ...


class GpuRuntime(Protocol):
    """One device of this process. Threads that use it call `attach` first."""

    def attach(self) -> None:
        """Make the device current in this thread."""
        ...

    def launch_on(self, stream: Stream) -> None:
        """Kernels that this thread launches from here on go to this stream."""
        ...

    def stream(self, *, urgent: bool) -> Stream:
        """A new stream; urgent work goes before other work of this process."""
        ...

    def copy_runs(self, destinations: Int64s, sources: Int64s, sizes_bytes: Int64s, stream: Stream) -> None:
        """Enqueue copies of [N] runs between host and device addresses. Faster where the host memory is pinned."""
        ...

    def copy_peer_runs(
        self, destinations: Int64s, sources: Int64s, sizes_bytes: Int64s, streams: Sequence[Stream]
    ) -> None:
        """Enqueue copies of [N] runs from addresses of any GPU to addresses of this one, on all of these streams."""
        ...

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin host memory of this process."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`; no copy from or to it may run."""
        ...

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        """[size_bytes] uint8 on the device, uninitialized. Raises OutOfDeviceMemory."""
        ...

    def to_device(self, array: Int64s) -> torch.Tensor:
        """A copy on the device; it has arrived when this returns. Raises OutOfDeviceMemory."""
        ...

    def host_table(self, count: int) -> torch.Tensor:
        """[count] int64 of host memory that kernels can read and write, zeroed."""
        ...
