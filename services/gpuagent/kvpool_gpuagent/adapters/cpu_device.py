"""The CPU device: engine caches in shared memory.

numpy rather than torch: its strided and indexed copies run at the same speed here and the agent stays 270 MiB smaller.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvpool.client.host_memory import fill_page_tables
from kvpool.core.errors import InvalidRequest, NotServed
from kvpool.core.grid import ShardGrid
from kvpool.core.ipc import IpcEvent, MappedSegment
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool_gpuagent.adapters.copy_threads import CopyThreads
from kvpool_gpuagent.adapters.cpu_cache import CpuCache, close_mappings
from kvpool_gpuagent.adapters.link_speed import cpu_link
from kvpool_gpuagent.ports import EngineCache, MappedHandle, PeerCache, PulledBytes, PullPart, StopFlag


class CpuDevice:
    """Maps engine memory by descriptor and copies rows with numpy, on `thread_count` threads for all caches."""

    name = "cpu"
    uuid = ""

    def __init__(self, thread_count: int = 2) -> None:
        self._threads = CopyThreads(thread_count)

    def check(
        self,
        spec: KeyspaceSpec,
        layout: EngineLayout,
        handles: Sequence[MappedHandle],
        events: Sequence[IpcEvent],
    ) -> None:
        """See ports.Device.check."""
        for index, handle in enumerate(handles):
            if handle.ipc is not None:
                raise NotServed(
                    f"handles[{index}] is a CUDA IPC handle, but this agent's device is the CPU; "
                    f"register shared memory, or start the agent with --device cuda"
                )
        if events:
            raise NotServed(
                "events are those of CUDA devices, but this agent's device is the CPU; leave `events` empty"
            )

    async def map_cache(
        self,
        spec: KeyspaceSpec,
        grid: ShardGrid,
        layout: EngineLayout,
        handles: Sequence[MappedHandle],
        events: Sequence[IpcEvent],
    ) -> EngineCache:
        """See ports.Device.map_cache. The descriptors are closed in any case; the mappings keep the memory."""
        mappings: list[mmap.mmap] = []
        try:
            await self._threads.run(partial(_map_all, handles, mappings))
            return CpuCache(spec, grid, layout, mappings, self._threads)
        except BaseException:
            close_mappings(mappings)
            raise
        finally:
            for handle in handles:
                if handle.descriptor is not None:
                    os.close(handle.descriptor)

    async def map_peer(self, spec: KeyspaceSpec, layout: EngineLayout, handles: Sequence[MappedHandle]) -> PeerCache:
        """See ports.Device.map_peer."""
        raise _no_peers()

    async def pull(self, destination: EngineCache, parts: Sequence[PullPart], stop: StopFlag) -> PulledBytes:
        """See ports.Device.pull."""
        raise _no_peers()

    def register_segment(self, segment: MappedSegment) -> Callable[[], None]:
        """Fill the page tables now: on the first copy each 4 KiB would cost more than its copying."""
        if isinstance(segment.view.obj, mmap.mmap):
            fill_page_tables(segment.view.obj)
        return lambda: None

    def measure_link(self) -> Mapping[str, float]:
        """See ports.Device.measure_link."""
        return cpu_link()

    async def close(self) -> None:
        """See ports.Device.close."""
        await asyncio.to_thread(self._threads.close)


def _no_peers() -> NotServed:
    return NotServed("PeerPull copies between GPUs, but this agent's device is the CPU; load from staging instead")


def _map_all(handles: Sequence[MappedHandle], mappings: list[mmap.mmap]) -> None:
    for index, handle in enumerate(handles):
        mappings.append(_map(index, handle))
        try:
            fill_page_tables(mappings[-1])
        except OSError as error:
            # A file may be longer than the memory behind it; touching that would kill this process.
            raise InvalidRequest(
                f"handles[{index}] has {handle.size_bytes} bytes, but not the memory for them ({error.strerror}); "
                f"allocate it (posix_fallocate) before it is lent"
            ) from error


def _map(index: int, handle: MappedHandle) -> mmap.mmap:
    if handle.descriptor is None:
        raise InvalidRequest(f"handles[{index}] is no shared memory; the CPU device maps only descriptors")
    if handle.file_offset < 0 or handle.file_offset % mmap.ALLOCATIONGRANULARITY:
        raise InvalidRequest(f"handles[{index}].file_offset must be a multiple of {mmap.ALLOCATIONGRANULARITY}")
    # Touching a mapping past the end of its file kills the process, so the file's own size decides.
    available = os.fstat(handle.descriptor).st_size
    if handle.size_bytes <= 0 or handle.file_offset + handle.size_bytes > available:
        raise InvalidRequest(
            f"handles[{index}].size_bytes is {handle.size_bytes} at offset {handle.file_offset}, "
            f"but its file has {available} bytes"
        )
    try:
        return mmap.mmap(handle.descriptor, handle.size_bytes, offset=handle.file_offset)
    except OSError as error:
        raise InvalidRequest(f"handles[{index}] cannot be mapped for writing ({error.strerror})") from error
