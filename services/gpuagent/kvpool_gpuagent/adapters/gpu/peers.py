"""Pulls from other ranks' caches: one launch moves all chunks and layers of a source, on few multiprocessors.

Where blocks lie alike in both caches, in long runs, the copy engine moves them instead, and the kernel only what is
left of a block of which a load skips tokens.

Each destination GPU has one stream and one thread for its pulls: they run one after another, so that together they
never take more multiprocessors than one may. Sources whose tokens lie in the same slots (ranks of one TP group) share a
launch.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import KvPoolError, NotServed, Stopped
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool_gpuagent.adapters.gpu.cache import GpuCache
from kvpool_gpuagent.adapters.gpu.runtime import GpuRuntime, Int64s, Stream
from kvpool_gpuagent.adapters.gpu.transfer_queue import finished
from kvpool_gpuagent.core.pulls import BlockRuns, CacheSide, PeerPlanes, peer_planes
from kvpool_gpuagent.kernels.peer_pull import PullPlanes, pull_rows, pull_shape
from kvpool_gpuagent.ports import PeerCache, PulledBytes, PullPart


class PeerMemory:
    """See ports.PeerCache. Thread-safe."""

    def __init__(
        self,
        spec: KeyspaceSpec,
        layout: EngineLayout,
        home: int,
        open_at: Callable[[int], tuple[Sequence[int], Callable[[], None]]],
    ) -> None:
        """home: ordinal of the GPU that holds the cache. open_at: maps it for kernels of a GPU; returns the addresses
        of its handles and what unmaps them."""
        self.spec, self.layout, self.home = spec, layout, home
        self._open_at = open_at
        self._lock = threading.Lock()
        self._opened: dict[int, tuple[Sequence[int], Callable[[], None]]] = {}

    def addresses(self, ordinal: int) -> Sequence[int]:
        """Of each handle, for kernels of this GPU. Blocks while it maps; raises InvalidRequest, NotServed."""
        with self._lock:
            if ordinal not in self._opened:
                self._opened[ordinal] = self._open_at(ordinal)
            return self._opened[ordinal][0]

    def unmap(self) -> None:
        """Undo all mappings, also when some cannot be; no kernel uses them any more. Idempotent; may block shortly."""
        with self._lock, ExitStack() as undoing:
            while self._opened:
                _, (_, undo) = self._opened.popitem()
                undoing.callback(undo)

    async def close(self) -> None:
        """See ports.PeerCache."""
        await asyncio.to_thread(self.unmap)


_log = logging.getLogger(__name__)

# From this run length on the copy engine moves blocks. Not measured between GPUs: batched copies over the host's link
# cost 0.15 to 0.3 us a run beside their bytes, so that runs of 1 MiB would reach 0.9 of a link of 389 GB/s: as much as
# the kernel does, without a multiprocessor.
PEER_RUN_BYTES = 1 << 20
_MAX_TABLES = 64  # remembered: pairs of caches that pull again and again


def memory_of(cache: PeerCache) -> PeerMemory:
    """Return the memory of a cache that this device has mapped, a rank's own or a peer's. Raises NotServed without."""
    memory = cache.peer if isinstance(cache, GpuCache) else cache
    if not isinstance(memory, PeerMemory):
        raise NotServed("this cache cannot take part in pulls; load from staging instead")
    return memory


@dataclass(frozen=True, slots=True, eq=False)
class _PeerRows:
    """See ports.PullPart."""

    source: PeerMemory
    layers: range
    heads: range
    slots: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """Planes of one launch, on the device. token_bytes: what one token has in all of them. runs: of their blocks, of
    block_rows each, if they are long; else none."""

    data: PullPlanes
    scales: PullPlanes | None
    token_bytes: int
    runs: Sequence[BlockRuns]
    block_rows: int


class PeerPuller:
    """Pulls of all caches of one agent. Belongs to one event loop; its threads start with the first pull."""

    def __init__(
        self,
        runtime_of: Callable[[int], GpuRuntime],
        *,
        programs: int,
        on_broken: Callable[[KvPoolError], None] = lambda error: None,
    ) -> None:
        """runtime_of: of the GPU with this ordinal; blocks. programs: multiprocessors that pulls of one GPU take at
        most. on_broken: called, from a thread, when a GPU has failed for good."""
        self._runtime_of, self._programs, self._on_broken = runtime_of, programs, on_broken
        self._queues: dict[int, _PullQueue] = {}

    async def pull(self, destination: PeerCache, parts: Sequence[PullPart], stop: CancelToken) -> PulledBytes:
        """See ports.Device.pull."""
        own = memory_of(destination)
        rows = [_PeerRows(memory_of(part.source), part.layers, part.heads, part.slots) for part in parts]
        queue = self._queues.get(own.home)
        if queue is None:
            queue = self._queues[own.home] = _PullQueue(own.home, self._runtime_of, self._programs, self._on_broken)
        work = asyncio.ensure_future(
            asyncio.get_running_loop().run_in_executor(queue.thread, functools.partial(queue.pull, own, rows, stop))
        )
        pulled, cancelled = await finished(work)
        if cancelled:
            pulled.exception()  # retrieved: the caller has left
            raise asyncio.CancelledError
        return pulled.result()

    async def close(self) -> None:
        """End the threads once what they do has ended."""
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            await asyncio.to_thread(queue.thread.shutdown)


class _PullQueue:
    """Pulls into caches of one GPU. All but the constructor runs on its one thread."""

    def __init__(
        self,
        ordinal: int,
        runtime_of: Callable[[int], GpuRuntime],
        programs: int,
        on_broken: Callable[[KvPoolError], None],
    ) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"pull-{ordinal}")
        self._ordinal, self._programs, self._on_broken = ordinal, programs, on_broken
        self._runtime_of = runtime_of
        self._opened: tuple[GpuRuntime, Stream] | None = None
        self._tables: OrderedDict[tuple[object, ...], _Tables] = OrderedDict()
        self._slots = torch.zeros(0, dtype=torch.int64)  # pinned; read by the launches of the pull that runs
        self._broken: KvPoolError | None = None

    def pull(self, destination: PeerMemory, parts: Sequence[_PeerRows], stop: CancelToken) -> PulledBytes:
        if self._broken is not None:
            raise self._broken
        try:
            runtime, stream = self._attached()
            groups = _groups(parts)
            tables = [self._tables_of(runtime, destination, group) for group in groups]
            slots = self._filled(runtime, [group[0].slots for group in groups])
        except KvPoolError:
            raise
        except Exception as error:  # nothing was launched
            _log.error("a pull from a peer's cache could not be prepared", exc_info=error)
            raise KvPoolError(f"the pull could not be prepared on the GPU ({error}); recompute these tokens") from error
        if stop.cancelled:
            raise Stopped("the pull was ended before it began")
        started_s = time.perf_counter()
        try:
            for each, table in zip(slots, tables, strict=True):
                rest = _copy_blocks(runtime, stream, each, table)
                pull_rows(rest, table.data, table.scales, programs=self._programs)
            stream.mark().wait()
        except Exception as error:
            raise self._failure(stream, error) from error
        copy_s = time.perf_counter() - started_s
        return PulledBytes(
            sum(len(each) * table.token_bytes for each, table in zip(slots, tables, strict=True)), copy_s
        )

    def _attached(self) -> tuple[GpuRuntime, Stream]:
        if self._opened is None:
            runtime = self._runtime_of(self._ordinal)
            runtime.attach()
            self._opened = runtime, runtime.stream(urgent=True)
        runtime, stream = self._opened
        runtime.launch_on(stream)
        return runtime, stream

    def _failure(self, stream: Stream, error: Exception) -> KvPoolError:
        """Part of it may be running: wait for it, so that no memory is touched after this."""
        _log.error("a pull from a peer's cache failed on the GPU", exc_info=error)
        try:
            stream.synchronize()
        except Exception as broken:
            self._broken = KvPoolError(f"the GPU does not answer any more ({broken}); restart the agent")
            self._on_broken(self._broken)
        return KvPoolError(f"the GPU failed ({error}); recompute these tokens")

    def _filled(self, runtime: GpuRuntime, slots: Sequence[Int64s]) -> list[torch.Tensor]:
        """The slots of each launch, where its kernel can read them."""
        count = sum(each.size for each in slots)
        if self._slots.numel() < count:
            self._slots = runtime.host_table(2 * count)
        np.concatenate([each.reshape(-1) for each in slots], out=self._slots.numpy()[:count])
        parts = torch.split(self._slots[:count], [each.size for each in slots])
        return [part.view(-1, 2) for part in parts]

    def _tables_of(self, runtime: GpuRuntime, destination: PeerMemory, group: Sequence[_PeerRows]) -> _Tables:
        # Memory that was unmapped since is another object when it is mapped again.
        key = (destination, *((part.source, part.layers, part.heads) for part in group))
        tables = self._tables.get(key)
        if tables is None:
            own = CacheSide(destination.layout, destination.addresses(self._ordinal))
            planes = [
                peer_planes(
                    destination.spec,
                    part.layers,
                    part.heads,
                    CacheSide(part.source.layout, part.source.addresses(self._ordinal)),
                    own,
                )
                for part in group
            ]
            scales = [each for _, each in planes if each is not None]
            tables = self._tables[key] = _joined(runtime, [data for data, _ in planes], scales)
            while len(self._tables) > _MAX_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return tables


def _groups(parts: Sequence[_PeerRows]) -> list[list[_PeerRows]]:
    """Parts that one launch can move: equal slots, equal shape."""
    groups: list[list[_PeerRows]] = []
    for part in parts:
        for group in groups:
            first = group[0]
            if (
                len(part.heads) == len(first.heads)
                and part.source.layout.block_tokens == first.source.layout.block_tokens
                and np.array_equal(part.slots, first.slots)
            ):
                group.append(part)
                break
        else:
            groups.append([part])
    return groups


def _copy_blocks(runtime: GpuRuntime, stream: Stream, slots: torch.Tensor, tables: _Tables) -> torch.Tensor:
    """Have the copy engine move whole blocks, if their runs are long. Return the slots that are left."""
    if not tables.runs:
        return slots
    # Only the first block may lack rows: chunks are whole blocks, but for the tokens that a load skips.
    lead = -int(slots[0, 1]) % tables.block_rows
    blocks = slots[lead :: tables.block_rows].numpy() // tables.block_rows
    for runs in tables.runs:
        runtime.copy_peer_runs(*runs.copies(blocks), stream)
    return slots[:lead]


def _joined(runtime: GpuRuntime, data: Sequence[PeerPlanes], scales: Sequence[PeerPlanes]) -> _Tables:
    kinds = [_pull_planes(runtime, planes) if planes else None for planes in (data, scales)]
    assert kinds[0] is not None
    token_bytes = sum(len(each.source) * each.heads * each.row_bytes for each in (*data, *scales))
    parts = zip(data, scales, strict=True) if scales else ((planes,) for planes in data)
    runs = [found for found in map(BlockRuns.of, parts) if found and int(found.sizes_bytes.min()) >= PEER_RUN_BYTES]
    if len(runs) < len(data):
        runs = []
    return _Tables(kinds[0], kinds[1], token_bytes, runs, data[0].destination_block_rows)


def _pull_planes(runtime: GpuRuntime, planes: Sequence[PeerPlanes]) -> PullPlanes:
    source = np.concatenate([each.source for each in planes])
    destination = np.concatenate([each.destination for each in planes])
    shape = pull_shape(
        source.tolist(),
        destination.tolist(),
        heads=planes[0].heads,
        row_bytes=planes[0].row_bytes,
        source_block_rows=planes[0].source_block_rows,
        destination_block_rows=planes[0].destination_block_rows,
    )
    return PullPlanes(runtime.to_device(source), runtime.to_device(destination), shape)
