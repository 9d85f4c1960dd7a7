"""The transfer engine of one GPU: two queues, their scratch, and for each cache the paths that its pages can take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import KvPoolError
from kvpool.core.page import slot_bytes
from kvpool.core.plane_table import PlaneTable
from kvpool_gpuagent.adapters.gpu.copy_paths import CopyPath, KernelBursts, QueueStreams, RunCopies, payload_sizes
from kvpool_gpuagent.adapters.gpu.runtime import GpuRuntime, OutOfDeviceMemory
from kvpool_gpuagent.adapters.gpu.scratch import Scratch
from kvpool_gpuagent.adapters.gpu.transfer_queue import TransferQueue
from kvpool_gpuagent.core.copy_runs import RunTable
from kvpool_gpuagent.core.pages import CopyBatch
from kvpool_gpuagent.kernels.cache_kernels import CacheKernels, TablePool
from kvpool_gpuagent.ports import PeerCache


@dataclass(frozen=True, slots=True, eq=False)
class PathSelector:
    """One direction of a cache.

    runs:    the copy engine alone; None if a codec makes other bytes of the rows.
    kernels: kernels and scratch; None where the GPU has no room for them.
    by_runs: [shard_count] bool: shards whose runs are long enough for the copy engine alone.
    """

    queue: TransferQueue
    runs: CopyPath | None
    kernels: CopyPath | None
    by_runs: npt.NDArray[np.bool_]

    def path(self, batch: CopyBatch) -> CopyPath:
        """What moves these pages."""
        path = self.runs if self.by_runs[batch.shards].all() else self.kernels
        path = path or self.runs or self.kernels
        assert path is not None
        return path

    async def move(self, batch: CopyBatch, stop: CancelToken) -> bool:
        """See TransferQueue.move."""
        return await self.queue.move(self.path(batch), batch, stop) if batch.count else True


class GpuCache:
    """See ports.EngineCache."""

    def __init__(
        self,
        store: PathSelector,
        load: PathSelector,
        event_passed: Callable[[int], bool],
        unmap: Callable[[], None],
        peer: PeerCache | None = None,
    ) -> None:
        """event_passed: asks one of the engine's events. unmap: closes memory and events; both may block shortly.
        peer: the same cache for pulls."""
        self.store, self.load, self.peer = store, load, peer
        self._event_passed, self._unmap = event_passed, unmap
        self._closed = False

    async def event_passed(self, slot: int) -> bool:
        """See ports.EngineCache."""
        return self._event_passed(slot)

    async def gather(self, batch: CopyBatch, stop: CancelToken) -> bool:
        """See ports.EngineCache."""
        return await self.store.move(batch, stop)

    async def scatter(self, batch: CopyBatch) -> None:
        """See ports.EngineCache."""
        await self.load.move(batch, CancelToken())

    async def close(self) -> None:
        """See ports.EngineCache."""
        if not self._closed:
            self._closed = True
            try:
                if self.peer is not None:
                    await self.peer.close()
            finally:
                await asyncio.to_thread(self._unmap)


_log = logging.getLogger(__name__)

_SCRATCH_PAGES = 4  # two of each direction: one on the link, one in kernels
# From this run length on the copy engine alone is as fast as any other path: measured on an H200, runs of 16 / 32 / 64
# / 256 KiB reach 34 / 53 / 53.6 / 54.4 of 55.3 GB/s, and cost an engine beside them nothing.
LONG_RUN_BYTES = 32 << 10


class TransferEngine:
    """Stores and loads of all caches share the queues and the scratch. Nothing ever synchronizes the whole device."""

    def __init__(
        self,
        runtime: GpuRuntime,
        *,
        scratch_bytes: int,
        on_broken: Callable[[KvPoolError], None] = lambda error: None,
    ) -> None:
        """on_broken: called, from a thread, when the GPU has failed for good; the process must be started again."""
        self._runtime = runtime
        self._scratch = Scratch(runtime, scratch_bytes)
        self._tables = TablePool(runtime.host_table)
        self._store_streams, self._load_streams = QueueStreams(runtime), QueueStreams(runtime)
        self._stores = TransferQueue(runtime, self._store_streams, self._scratch, "store", on_broken)
        self._loads = TransferQueue(runtime, self._load_streams, self._scratch, "load", on_broken)

    def directions(self, table: PlaneTable, own_shards: Sequence[int]) -> tuple[PathSelector, PathSelector]:
        """Store and load of one cache. The calling thread is attached; blocks while scratch is allocated and kernels
        are compiled, where they are needed.

        own_shards: those that the rank writes. If their runs are long the copy engine moves all pages, also those of
        ranks of other TP degrees, whose runs may be short: that is slower, and the GPU's memory is left alone.
        Raises KvPoolError if the GPU has no room for what a codec needs.
        """
        runs = RunTable.of(table) if table.layout.holds_codec_rows(table.spec) else None
        by_runs = np.zeros(max(table.shards) + 1, dtype=np.bool_)
        if runs is not None:
            for shard in table.shards:
                by_runs[shard] = runs.run_bytes(shard) >= LONG_RUN_BYTES
        kernels = None if by_runs[list(own_shards)].all() else self._kernels(table)
        if kernels is None and runs is None:
            raise KvPoolError("the GPU has no room for the scratch that a codec needs; leave the agent more memory")
        sizes, runtime = payload_sizes(table), self._runtime
        directions = []
        for queue, streams, out in (
            (self._stores, self._store_streams, True),
            (self._loads, self._load_streams, False),
        ):
            directions.append(
                PathSelector(
                    queue,
                    RunCopies(runs, sizes, runtime, streams.copies, out=out) if runs is not None else None,
                    KernelBursts(table, kernels, self._tables, runtime, streams, out=out) if kernels else None,
                    by_runs,
                )
            )
        return directions[0], directions[1]

    def _kernels(self, table: PlaneTable) -> CacheKernels | None:
        """Kernels for this cache, compiled, which takes seconds; None if the GPU has no room for what they need."""
        largest = max(slot_bytes(shard.payload_bytes) for shard in table.shards.values())
        tables = self._tables.take()
        try:
            kernels = CacheKernels(table, self._runtime.to_device)
            if self._scratch.size_bytes < _SCRATCH_PAGES * largest:
                return None
            for streams in (self._store_streams, self._load_streams):
                stream = streams.take()
                kernels.warm_up(tables)
                stream.synchronize()
                streams.give(stream)
        except OutOfDeviceMemory as error:
            _log.warning("the GPU has no room for kernels: pages are copied run by run, slower (%s)", error)
            return None
        finally:
            self._tables.give(tables)
        return kernels

    async def close(self) -> None:
        """End the queues once what was submitted has ended."""
        for queue in (self._stores, self._loads):
            await asyncio.to_thread(queue.close)
