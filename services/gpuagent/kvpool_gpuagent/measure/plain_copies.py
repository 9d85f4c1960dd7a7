"""Plain copies between host and device memory: what the link itself does."""

from __future__ import annotations

from collections.abc import Callable

from kvpool_gpuagent.adapters.gpu_runtime import GpuRuntime
from kvpool_gpuagent.measure.moved import Moved, repeat_on_stream

Copy = Callable[[int, int, int, int], None]
"""Enqueues (destination, source, bytes, address of the stream)."""


class PlainCopies:
    """One direction: whole contiguous pieces, always the next one of both sides, so that no cache of the CPU helps."""

    def __init__(self, runtime: GpuRuntime, copy: Copy, host: tuple[int, int], *, buffer_bytes: int, out: bool) -> None:
        """host: (address, bytes) of pinned memory. Raises OutOfDeviceMemory."""
        self._runtime, self._copy, self._out = runtime, copy, out
        self._host_address, self._host_bytes = host
        self._buffer = runtime.device_bytes(buffer_bytes)
        self._stream = runtime.stream(urgent=True)

    def run(self, size_bytes: int, in_flight: int, seconds: float) -> Moved:
        """Copy for some seconds; blocks. Raises ValueError for more than there is memory."""
        device_bytes = self._buffer.numel()
        if not 0 < size_bytes <= min(self._host_bytes, device_bytes):
            raise ValueError(f"size_bytes must be at most {min(self._host_bytes, device_bytes)}, got {size_bytes}")
        device_address = int(self._buffer.data_ptr())

        def enqueue(number: int) -> int:
            host = self._host_address + number % (self._host_bytes // size_bytes) * size_bytes
            device = device_address + number % (device_bytes // size_bytes) * size_bytes
            destination, source = (host, device) if self._out else (device, host)
            self._copy(destination, source, size_bytes, self._stream.address)
            return size_bytes

        return repeat_on_stream(self._runtime, self._stream, enqueue, in_flight, seconds)
