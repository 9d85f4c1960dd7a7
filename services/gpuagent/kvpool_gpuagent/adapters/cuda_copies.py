"""Many copies in one driver call: the copy engine moves scattered runs without a kernel."""

from __future__ import annotations

from ctypes import byref, c_size_t

import numpy as np
import numpy.typing as npt

from kvpool.cuda.driver import Driver
from kvpool.cuda.symbols import CopyAttributes

Int64s = npt.NDArray[np.int64]

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
        for destination, source, size_bytes in zip(
            destinations.tolist(), sources.tolist(), sizes_bytes.tolist(), strict=True
        ):
            driver.copy(destination, source, size_bytes, stream)
        return
    for start in range(0, count, _CALL_COPIES):
        part = slice(start, start + _CALL_COPIES)
        _copy_batch(driver, destinations[part], sources[part], sizes_bytes[part], stream)


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
