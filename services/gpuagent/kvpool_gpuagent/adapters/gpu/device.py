"""The CUDA device: engine caches by CUDA IPC, arena segments pinned, a transfer queue for each direction."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import KvPoolError, NotServed
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.ipc import IpcEvent
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.plane_table import PlaneTable
from kvpool.cuda.driver import CudaError
from kvpool.cuda.ipc import IpcMappings, open_event
from kvpool_gpuagent.adapters.gpu.cache import GpuCache, TransferEngine
from kvpool_gpuagent.adapters.gpu.cuda_runtime import CudaRuntime
from kvpool_gpuagent.adapters.gpu.peers import PeerMemory, PeerPuller
from kvpool_gpuagent.adapters.gpu.transfer_queue import finished
from kvpool_gpuagent.adapters.link_speed import gpu_link
from kvpool_gpuagent.ports import EngineCache, MappedHandle, PeerCache, PulledBytes, PullPart

_log = logging.getLogger(__name__)


class CudaDevice:
    """One GPU of this process; caches on other GPUs that it can reach are copied over their links."""

    name = "cuda"

    def __init__(
        self,
        *,
        ordinal: int = 0,
        scratch_bytes: int = 256 << 20,
        peer_programs: int = 24,
        on_broken: Callable[[KvPoolError], None] = lambda error: None,
    ) -> None:
        """peer_programs: multiprocessors that pulls take at most. on_broken: called, from a thread, when the GPU has
        failed for good; the process must be started again."""
        self.runtime = CudaRuntime(ordinal)
        self.runtime.attach()
        self.uuid = self.runtime.device_uuid
        self._mappings = IpcMappings(self.runtime.driver)
        self._transfers = TransferEngine(
            self.runtime,
            scratch_bytes=scratch_bytes,
            on_broken=on_broken,
        )
        self._peers = PeerPuller(self._runtime_of, programs=peer_programs, on_broken=on_broken)

    def check(self, handles: Sequence[MappedHandle], events: Sequence[IpcEvent]) -> None:
        """See ports.Device.check."""
        for number, handle in enumerate(handles):
            if handle.ipc is None:
                raise NotServed(
                    f"handles[{number}] is shared memory, but this agent serves GPU memory: register CUDA IPC handles, "
                    f"or start an agent with --device cpu for this engine"
                )
            self.runtime.driver.ordinal_of(handle.ipc.device_uuid)
        for event in events:
            self.runtime.driver.ordinal_of(event.device_uuid)

    async def map_cache(
        self,
        spec: KeyspaceSpec,
        grid: ShardGrid,
        layout: EngineLayout,
        handles: Sequence[MappedHandle],
        events: Sequence[IpcEvent],
    ) -> EngineCache:
        """See ports.Device.map_cache."""
        work = asyncio.ensure_future(asyncio.to_thread(self._map, spec, grid, layout, handles, events))
        mapped, cancelled = await finished(work)
        if cancelled:
            if mapped.exception() is None:
                await mapped.result().close()
            raise asyncio.CancelledError
        try:
            return mapped.result()
        except CudaError as error:
            raise KvPoolError(f"the engine's memory or events could not be taken over: {error}") from error

    async def map_peer(self, spec: KeyspaceSpec, layout: EngineLayout, handles: Sequence[MappedHandle]) -> PeerCache:
        """See ports.Device.map_peer. Mapped for this agent's own GPU; for another one by the first pull into it."""
        self.check(handles, [])
        memory = self._peer_memory(spec, layout, handles)
        work = asyncio.ensure_future(asyncio.to_thread(memory.addresses, self.runtime.ordinal))
        mapped, cancelled = await finished(work)
        if cancelled:
            mapped.exception()  # retrieved: the caller has left
            await memory.close()
            raise asyncio.CancelledError
        try:
            mapped.result()
        except CudaError as error:
            raise KvPoolError(f"the memory of another rank could not be mapped: {error}") from error
        return memory

    async def pull(self, destination: EngineCache, parts: Sequence[PullPart], stop: CancelToken) -> PulledBytes:
        """See ports.Device.pull. The kernel runs on the GPU of the destination's cache."""
        return await self._peers.pull(destination, parts, stop)

    def register_segment(self, segment: memoryview) -> Callable[[], None]:
        """See ports.Device.register_segment. What cannot be pinned is copied through the driver's staging: slower."""
        address, size_bytes = int(np.frombuffer(segment, dtype=np.uint8).ctypes.data), len(segment)
        try:
            self.runtime.pin(address, size_bytes)
        except CudaError as error:
            _log.warning("an arena segment of %d bytes could not be pinned: %s", size_bytes, error)
            return lambda: None
        return lambda: self._unpin(address)

    def measure_link(self) -> Mapping[str, float]:
        """See ports.Device.measure_link."""
        return gpu_link(self.runtime.device)

    async def close(self) -> None:
        """See ports.Device.close."""
        await self._peers.close()
        await self._transfers.close()

    def _unpin(self, address: int) -> None:
        try:
            self.runtime.unpin(address)
        except RuntimeError as error:  # the driver's or torch's: on a broken GPU the rest must still be undone
            _log.warning("an arena segment could not be unpinned: %s", error)

    def _map(
        self,
        spec: KeyspaceSpec,
        grid: ShardGrid,
        layout: EngineLayout,
        handles: Sequence[MappedHandle],
        events: Sequence[IpcEvent],
    ) -> GpuCache:
        runtime = self.runtime
        runtime.attach()
        with ExitStack() as undo:
            addresses: list[int] = []
            for handle in handles:
                assert handle.ipc is not None, "checked"
                addresses.append(self._mappings.open(handle.ipc, handle.size_bytes, ordinal=runtime.ordinal))
                undo.callback(self._mappings.close, handle.ipc, ordinal=runtime.ordinal)
            opened: list[int] = []
            for event in events:
                opened.append(open_event(runtime.driver, event))
                undo.callback(runtime.driver.event_destroy, opened[-1])
            table = PlaneTable.of(spec, grid, layout, addresses)
            own_shards = list(shards_in(grid.bitmap_for(layout.layer_range, layout.head_range)))
            store, load = self._transfers.directions(table, own_shards)
            peer = self._peer_memory(spec, layout, handles)
            closing = undo.pop_all()

        def event_passed(slot: int) -> bool:
            runtime.driver.use_device(runtime.ordinal)
            try:
                return runtime.driver.event_query(opened[slot])
            except CudaError as error:
                raise KvPoolError(f"the engine's event {slot} cannot be asked: {error}") from error

        def unmap() -> None:
            runtime.attach()
            closing.close()

        return GpuCache(store, load, event_passed, unmap, peer)

    def _runtime_of(self, ordinal: int) -> CudaRuntime:
        return self.runtime if ordinal == self.runtime.ordinal else CudaRuntime(ordinal)

    def _peer_memory(self, spec: KeyspaceSpec, layout: EngineLayout, handles: Sequence[MappedHandle]) -> PeerMemory:
        memory = [(handle.ipc, handle.size_bytes) for handle in handles if handle.ipc is not None]

        def open_at(ordinal: int) -> tuple[list[int], Callable[[], None]]:
            with ExitStack() as undo:
                addresses: list[int] = []
                for ipc, size_bytes in memory:
                    addresses.append(self._mappings.open(ipc, size_bytes, ordinal=ordinal))
                    undo.callback(self._mappings.close, ipc, ordinal=ordinal)
                return addresses, undo.pop_all().close

        return PeerMemory(spec, layout, self.runtime.driver.ordinal_of(memory[0][0].device_uuid), open_at)
