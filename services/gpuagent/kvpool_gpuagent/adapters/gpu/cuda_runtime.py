"""The GPU runtime on CUDA: torch for streams, marks and memory, the driver for what torch has no call for."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from ctypes import byref, c_size_t
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from kvpool.cuda.driver import CudaError, Driver
from kvpool.cuda.symbols import CopyAttributes
from kvpool_gpuagent.adapters.gpu.runtime import Int64s, Mark, OutOfDeviceMemory, Stream

_log = logging.getLogger(__name__)

_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_CALL_COPIES = 128  # one call with thousands is slower: 64 KiB runs by 8192 reach 36 to 44 GB/s, by 128 53.6


def copy_runs(driver: Driver, destinations: Int64s, sources: Int64s, sizes_bytes: Int64s, stream: int) -> None:
    """Enqueue copies between device memory and pinned host memory, in no order among themselves.

    destinations, sources, sizes_bytes: [N] int64; sizes > 0. Measured on an H200 in calls of 128: runs of
    8 / 16 / 32 / 64 / 256 KiB at 17 / 32 / 53 / 53.6 / 54.4 GB/s, where one call a copy reaches 6.5 for 16 and 18 for
    64. Before CUDA 12.8 it is one call a copy here, too. Raises CudaError; some of the copies may have been enqueued
    then.
    """
    count = int(destinations.size)
    if count == 0:
        return
    destinations, sources, sizes_bytes = (
        np.ascontiguousarray(array, dtype=np.int64) for array in (destinations, sources, sizes_bytes)
    )
    if not destinations.size == sources.size == sizes_bytes.size:
        raise ValueError("copy_runs wants three arrays of one length")
    if driver.batched_copies is None or count == 1 or stream == 0:
        copy_each(driver, destinations, sources, sizes_bytes, stream)
        return
    for start in range(0, count, _CALL_COPIES):
        part = slice(start, start + _CALL_COPIES)
        _copy_batch(driver, destinations[part], sources[part], sizes_bytes[part], stream)


def copy_each(driver: Driver, destinations: Int64s, sources: Int64s, sizes_bytes: Int64s, stream: int) -> None:
    """The same by one call a copy, from and to any memory. Raises CudaError."""
    for destination, source, size_bytes in zip(
        destinations.tolist(), sources.tolist(), sizes_bytes.tolist(), strict=True
    ):
        driver.copy(destination, source, size_bytes, stream)


def copy_peer_runs(driver: Driver, destinations: Int64s, sources: Int64s, sizes_bytes: Int64s, stream: int) -> bool:
    """The same between GPUs. Return whether the driver takes batches of such copies; if it does not, they are enqueued
    one by one, all of them: copying some again is harmless. Raises CudaError."""
    try:
        copy_runs(driver, destinations, sources, sizes_bytes, stream)
    except CudaError as error:
        _log.warning("copies between GPUs are enqueued one by one, as a batch was refused: %s", error)
        copy_each(driver, destinations, sources, sizes_bytes, stream)
        return False
    return True


def dealt(count: int, streams: int) -> Iterator[tuple[int, slice]]:
    """Deal so many copies out to streams: yield the number of a stream and a part for it, the first copies first.

    The first parts run while the calls for others are made. All have about as many copies, a call's at most.
    """
    calls = -(-count // (streams * _CALL_COPIES)) * streams
    ends = [count * (number + 1) // calls for number in range(calls)]
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start < end:
            yield number % streams, slice(start, end)


def _copy_batch(driver: Driver, destinations: Int64s, sources: Int64s, sizes_bytes: Int64s, stream: int) -> None:
    assert driver.batched_copies is not None
    attributes = CopyAttributes(source_access_order=_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE)
    first = c_size_t(0)
    arguments: list[object] = [
        destinations.ctypes.data,
        sources.ctypes.data,
        sizes_bytes.ctypes.data,
        destinations.size,
        byref(attributes),
        byref(first),
        1,
    ]
    if driver.batched_copies == "cuMemcpyBatchAsync":
        arguments.append(byref(c_size_t()))
    driver.call(driver.batched_copies, *arguments, stream)


class PinnedExtents:
    """Pinned ranges of addresses. Thread-safe: segments come and go while copies are being enqueued."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._extents: tuple[tuple[int, int], ...] = ()  # (start, end), ascending; replaced as a whole

    def add(self, start: int, size_bytes: int) -> None:
        """A range is pinned now."""
        with self._lock:
            extents = list(self._extents)
            insort(extents, (start, start + size_bytes))
            self._extents = tuple(extents)

    def remove(self, start: int) -> None:
        """The range that starts there is going to be unpinned; none: nothing happens."""
        with self._lock:
            self._extents = tuple(extent for extent in self._extents if extent[0] != start)

    def has_all(self, addresses: npt.NDArray[np.int64]) -> bool:
        """Whether each of [N > 0] addresses lies in a pinned range."""
        extents = self._extents  # once: another thread may replace it meanwhile

        def end_beyond(address: int) -> int:
            at = bisect_right(extents, (address, 1 << 63)) - 1
            return extents[at][1] if at >= 0 else 0

        low, high = int(addresses.min()), int(addresses.max())
        if end_beyond(low) > high:  # the usual case: all in one segment
            return True
        return all(end_beyond(address) > address for address in addresses.tolist())


_URGENT = -1  # of CUDA's stream priorities: lower goes first


class CudaMark:
    """See runtime.Mark."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def passed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """See runtime.Stream."""

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
    """See runtime.GpuRuntime."""

    def __init__(self, ordinal: int = 0) -> None:
        """ordinal: among the devices visible to this process. Raises NotServed without a driver."""
        self.driver = Driver.load()
        self.ordinal = ordinal
        self.device = torch.device("cuda", ordinal)
        self.device_uuid = self.driver.device_uuid(ordinal)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # raises if this torch was built without CUDA
        self._pinned = PinnedExtents()
        self._batches_peers = True

    def attach(self) -> None:
        """See runtime.GpuRuntime."""
        torch.cuda.set_device(self.device)
        self.driver.use_device(self.ordinal)

    def launch_on(self, stream: Stream) -> None:
        """See runtime.GpuRuntime."""
        torch.cuda.set_stream(cast(CudaStream, stream).stream)

    def stream(self, *, urgent: bool) -> Stream:
        """See runtime.GpuRuntime."""
        return CudaStream(self.device, _URGENT if urgent else 0)

    def copy_runs(self, destinations: Int64s, sources: Int64s, sizes_bytes: Int64s, stream: Stream) -> None:
        """See runtime.GpuRuntime. Pageable memory goes through the driver's own staging, and blocks meanwhile."""
        if destinations.size == 0:
            return
        if self._pinned.has_all(destinations) or self._pinned.has_all(sources):
            copy_runs(self.driver, destinations, sources, sizes_bytes, stream.address)
        else:
            copy_each(self.driver, destinations, sources, sizes_bytes, stream.address)

    def copy_peer_runs(
        self, destinations: Int64s, sources: Int64s, sizes_bytes: Int64s, streams: Sequence[Stream]
    ) -> None:
        """See runtime.GpuRuntime."""
        for number, part in dealt(int(destinations.size), len(streams)):
            runs = destinations[part], sources[part], sizes_bytes[part]
            if self._batches_peers:
                self._batches_peers = copy_peer_runs(self.driver, *runs, streams[number].address)
            else:
                copy_each(self.driver, *runs, streams[number].address)

    def pin(self, address: int, size_bytes: int) -> None:
        """See runtime.GpuRuntime. Raises CudaError, for instance where the locked-memory limit is too low."""
        self.attach()
        self.driver.register_host(address, size_bytes)
        self._pinned.add(address, size_bytes)

    def unpin(self, address: int) -> None:
        """See runtime.GpuRuntime."""
        self._pinned.remove(address)
        self.attach()
        self.driver.unregister_host(address)

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        """See runtime.GpuRuntime."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(str(error)) from error

    def to_device(self, array: Int64s) -> torch.Tensor:
        """See runtime.GpuRuntime."""
        try:
            return torch.from_numpy(array.copy()).to(self.device)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(str(error)) from error

    def host_table(self, count: int) -> torch.Tensor:
        """See runtime.GpuRuntime."""
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)
