"""The GPU runtime on CUDA: torch for streams, marks and memory, the driver for what torch has no call for."""

from __future__ import annotations

from typing import cast

import torch

from kvpool.cuda.driver import Driver
from kvpool_gpuagent.adapters.cuda_copies import copy_runs
from kvpool_gpuagent.adapters.gpu_runtime import Int64s, Mark, OutOfDeviceMemory, Stream
from kvpool_gpuagent.adapters.pinned_extents import PinnedExtents

_URGENT = -1  # of CUDA's stream priorities: lower goes first


class CudaMark:
    """See gpu_runtime.Mark."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def passed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """See gpu_runtime.Stream."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self.address = int(self.stream.cuda_stream)

    def mark(self) -> Mark:
        return CudaMark(self.stream)

    def after(self, mark: Mark) -> None:
        self.stream.wait_event(cast(CudaMark, mark).event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class CudaRuntime:
    """See gpu_runtime.GpuRuntime."""

    def __init__(self, ordinal: int = 0) -> None:
        """ordinal: among the devices visible to this process. Raises NotServed where there is no driver."""
        self.driver = Driver.load()
        self.ordinal = ordinal
        self.device = torch.device("cuda", ordinal)
        self.device_uuid = self.driver.device_uuid(ordinal)
        self.name = torch.cuda.get_device_name(self.device)
        self._pinned = PinnedExtents()

    def attach(self) -> None:
        """See gpu_runtime.GpuRuntime."""
        torch.cuda.set_device(self.device)
        self.driver.use_device(self.ordinal)

    def launch_on(self, stream: Stream) -> None:
        """See gpu_runtime.GpuRuntime."""
        torch.cuda.set_stream(cast(CudaStream, stream).stream)

    def stream(self, *, urgent: bool) -> Stream:
        """See gpu_runtime.GpuRuntime."""
        return CudaStream(self.device, _URGENT if urgent else 0)

    def copy_runs(self, destinations: Int64s, sources: Int64s, sizes_bytes: Int64s, stream: Stream) -> None:
        """See gpu_runtime.GpuRuntime. Pageable memory goes through the driver's own staging, and blocks meanwhile."""
        if destinations.size == 0:
            return
        if self._pinned.has_all(destinations) or self._pinned.has_all(sources):
            copy_runs(self.driver, destinations, sources, sizes_bytes, stream.address)
            return
        for destination, source, size_bytes in zip(
            destinations.tolist(), sources.tolist(), sizes_bytes.tolist(), strict=True
        ):
            self.driver.copy(destination, source, size_bytes, stream.address)

    def pin(self, address: int, size_bytes: int) -> None:
        """See gpu_runtime.GpuRuntime. Raises CudaError, for instance where the locked-memory limit is too low."""
        self.attach()
        self.driver.register_host(address, size_bytes)
        self._pinned.add(address, size_bytes)

    def unpin(self, address: int) -> None:
        """See gpu_runtime.GpuRuntime."""
        self._pinned.remove(address)
        self.attach()
        self.driver.unregister_host(address)

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        """See gpu_runtime.GpuRuntime."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(str(error)) from error

    def to_device(self, array: Int64s) -> torch.Tensor:
        """See gpu_runtime.GpuRuntime."""
        try:
            return torch.from_numpy(array.copy()).to(self.device)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(str(error)) from error

    def host_table(self, count: int) -> torch.Tensor:
        """See gpu_runtime.GpuRuntime."""
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)
