"""The engine's GPU as the launcher needs it, by torch and the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from kvpool.client.engine_registration import GpuRegion
from kvpool.client.gpu_launch import LaunchMark, LaunchStream
from kvpool.core.errors import InvalidRequest
from kvpool.cuda.driver import Driver
from kvpool.cuda.ipc import export_memory

if TYPE_CHECKING:
    import torch

    from kvpool.kernels.cache_kernels import KernelSpace

_URGENT = -1  # of CUDA's stream priorities: lower goes first


class TorchMark:
    """See gpu_launch.LaunchMark."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        import torch

        # blocking: the waiting thread sleeps; by default it would spin on a core that the engine needs.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class TorchStream:
    """See gpu_launch.LaunchStream."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.stream = torch.cuda.Stream(device, priority=_URGENT)  # type: ignore[no-untyped-call]

    def mark(self) -> LaunchMark:
        return TorchMark(self.stream)

    def synchronize(self) -> None:
        TorchMark(self.stream).wait()


class TorchRuntime:
    """See gpu_launch.LaunchRuntime."""

    def __init__(self, device_index: int) -> None:
        """raises: NotServed without a driver."""
        import torch

        self._driver = Driver.load()
        self._device = torch.device("cuda", device_index)
        self._lent: torch.Tensor | None = None

    def launch_stream(self) -> LaunchStream:
        return TorchStream(self._device)

    def attach(self, stream: LaunchStream) -> None:
        import torch

        torch.cuda.set_device(self._device)
        self._driver.use_device(self._device.index)
        torch.cuda.set_stream(cast(TorchStream, stream).stream)

    def lend(self, size_bytes: int) -> tuple[int, GpuRegion]:
        import torch

        try:
            self._lent = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise InvalidRequest(
                f"the GPU has no room for scratch_bytes={size_bytes}; leave it more (vLLM: gpu_memory_utilization), "
                f"lend less, or register without a launcher"
            ) from error
        address = self._lent.data_ptr()
        device_uuid = self._driver.device_uuid(self._device.index)
        return address, GpuRegion(size_bytes, export_memory(self._driver, device_uuid, address, size_bytes))

    def take_back(self) -> None:
        self._lent = None

    def to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        import torch

        return torch.from_numpy(array.copy()).to(self._device)

    def kernel_space(self) -> KernelSpace:
        from kvpool.kernels.cache_kernels import KernelSpace

        return KernelSpace.allocate(self._device)

    def host_table(self, count: int) -> torch.Tensor:
        import torch

        return torch.zeros(count, dtype=torch.int64, pin_memory=True)
