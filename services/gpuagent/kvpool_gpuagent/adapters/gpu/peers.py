"""Pulls from other ranks' caches: one launch moves all chunks and layers of a source, on few multiprocessors.

Where blocks lie alike in both caches, in long runs, the copy engine moves them instead, and the kernel only what is
left of a block of which a load skips tokens.

Each destination GPU has one thread that launches its pulls and waits for them, one after another on the same streams:
together they never take more multiprocessors than one may. Launches are prepared beside the copies of the pull before,
and the next one is launched before that has ended, so that the link does not wait for its launch; one that is stopped
until then copies nothing. Sources whose tokens lie in the same slots (ranks of one TP group) share one launch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np
import torch

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import KvPoolError, NotServed, Stopped
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool_gpuagent.adapters.gpu.cache import GpuCache
from kvpool_gpuagent.adapters.gpu.runtime import GpuRuntime, Int64s, Mark, Stream
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
        self._unmapped = False

    def addresses(self, ordinal: int) -> Sequence[int]:
        """Of each handle, for kernels of this GPU. Blocks while it maps; raises InvalidRequest, NotServed; Stopped
        once it is unmapped: its owner was notified, and a pull that has failed may still be prepared on a thread."""
        with self._lock:
            if self._unmapped:
                raise Stopped("the source's cache is not mapped any more")
            if ordinal not in self._opened:
                self._opened[ordinal] = self._open_at(ordinal)
            return self._opened[ordinal][0]

    def unmap(self) -> None:
        """Undo all mappings, also when some cannot be; no kernel uses them any more. Idempotent; may block shortly."""
        with self._lock, ExitStack() as undoing:
            self._unmapped = True
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
_STREAMS = 4  # of the copy engine: what each run costs beside its bytes they pay at the same time; not measured
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
        pulled, cancelled = await finished(queue.start(_Pull(own, rows, stop)))
        if cancelled:
            pulled.exception()  # retrieved: the caller has left
            raise asyncio.CancelledError
        return pulled.result()

    async def close(self) -> None:
        """End the threads once what they do has ended."""
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            await asyncio.to_thread(queue.close)


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """What moves one group of parts: copies of whole blocks, and rows by the kernel.

    copies: (destinations, sources, sizes), each [N] int64. slots: [T, 2], where the kernel can read them.
    """

    tables: _Tables
    copies: Sequence[tuple[Int64s, Int64s, Int64s]]
    slots: torch.Tensor
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """The launches of one pull. slots: the memory of all their slots."""

    launches: Sequence[_Launch]
    slots: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A pull that the GPU has been given, whole or (error) in part. marks: behind all of it."""

    at_s: float
    marks: Sequence[Mark] = ()
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Pull:
    """One pull. prepared, launched: None until it is."""

    destination: PeerMemory
    parts: Sequence[_PeerRows]
    stop: CancelToken
    prepared: _Prepared | None = None
    launched: _Launched | None = None


class _PullQueue:
    """Pulls into caches of one GPU. The copying thread prepares a pull itself unless it was busy when that came."""

    def __init__(
        self,
        ordinal: int,
        runtime_of: Callable[[int], GpuRuntime],
        programs: int,
        on_broken: Callable[[KvPoolError], None],
    ) -> None:
        self._copying = ThreadPoolExecutor(1, thread_name_prefix=f"pull-{ordinal}")
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix=f"prepare-pull-{ordinal}")
        self._ordinal, self._programs, self._on_broken = ordinal, programs, on_broken
        self._runtime_of = runtime_of
        self._running = 0  # pulls that have not ended; touched on the event loop only
        self._waiting: deque[_Pull] = deque()  # whose turn has not come; appended on the event loop
        self._ended_s = 0.0  # when the last copy had
        self._here = threading.local()  # whether the GPU is attached
        self._streams: list[Stream] = []  # of the copying thread; kernels run on the first
        self._lock = threading.Lock()  # of what preparing needs
        self._runtime: GpuRuntime | None = None
        self._tables: OrderedDict[tuple[object, ...], _Tables] = OrderedDict()
        self._free_slots: list[torch.Tensor] = []  # read by no launch
        self._broken: KvPoolError | None = None

    def start(self, pull: _Pull) -> asyncio.Future[PulledBytes]:
        """Begin a pull, on the event loop; the future says when nothing of it runs any more."""
        if self._running:
            self._preparing.submit(self._prepare_ahead, pull)
        self._running += 1
        self._waiting.append(pull)
        copying = asyncio.get_running_loop().run_in_executor(self._copying, self._pull, pull)
        copying.add_done_callback(self._ended)
        return copying

    def close(self) -> None:
        """End the threads once what they do has ended. Blocks."""
        self._copying.shutdown()
        self._preparing.shutdown()

    def _ended(self, copying: asyncio.Future[PulledBytes]) -> None:
        self._running -= 1

    # On the copying thread

    def _pull(self, pull: _Pull) -> PulledBytes:
        self._waiting.popleft()  # this one: threads take them in order
        if self._broken is not None:
            raise self._broken
        prepared = self._ready(pull)
        try:
            if pull.launched is None:
                if pull.stop.cancelled:
                    raise Stopped("the pull was ended before it began")
                pull.launched = self._launch(prepared)
            self._launch_next()
            return self._copied(pull.launched, prepared)
        finally:
            with self._lock:
                self._free_slots.append(prepared.slots)

    def _ready(self, pull: _Pull) -> _Prepared:
        """What is launched of it, on a thread that can launch it. Raises only if nothing of it was launched."""
        if pull.launched is not None and pull.prepared is not None:
            return pull.prepared
        try:
            prepared = self._prepared(pull)
            runtime = self._attached()
            if not self._streams:
                self._streams = [runtime.stream(urgent=True) for _ in range(_STREAMS)]
            runtime.launch_on(self._streams[0])
        except KvPoolError:
            raise
        except Exception as error:
            _log.error("a pull from a peer's cache could not be prepared", exc_info=error)
            raise KvPoolError(f"the pull could not be prepared on the GPU ({error}); recompute these tokens") from error
        return prepared

    def _launch_next(self) -> None:
        """Give the GPU the pull whose turn is next, if it is prepared."""
        following = next(iter(self._waiting), None)
        if following is not None and following.prepared is not None and not following.stop.cancelled:
            following.launched = self._launch(following.prepared)

    def _launch(self, prepared: _Prepared) -> _Launched:
        """Never raises: what was launched must be waited for."""
        started_s = time.perf_counter()
        try:
            for launch in prepared.launches:
                for destinations, sources, sizes_bytes in launch.copies:
                    self._attached().copy_peer_runs(destinations, sources, sizes_bytes, self._streams)
                pull_rows(launch.slots, launch.tables.data, launch.tables.scales, programs=self._programs)
            return _Launched(started_s, [stream.mark() for stream in self._streams])
        except Exception as error:  # the pull fails with it in its turn
            return _Launched(started_s, error=error)

    def _copied(self, launched: _Launched, prepared: _Prepared) -> PulledBytes:
        """Wait for it."""
        try:
            if launched.error is not None:
                raise launched.error
            for mark in launched.marks:
                if not mark.passed():  # each wait gives the interpreter away, and gets it back when the loop lets go
                    mark.wait()
        except Exception as error:
            raise self._failure(error) from error
        began_s, self._ended_s = max(launched.at_s, self._ended_s), time.perf_counter()
        return PulledBytes(sum(launch.size_bytes for launch in prepared.launches), self._ended_s - began_s)

    def _failure(self, error: Exception) -> KvPoolError:
        """Part of it may be running: wait for it, so that no memory is touched after this."""
        _log.error("a pull from a peer's cache failed on the GPU", exc_info=error)
        try:
            for stream in self._streams:
                stream.synchronize()
        except Exception as broken:
            self._broken = KvPoolError(f"the GPU does not answer any more ({broken}); restart the agent")
            self._on_broken(self._broken)
        return KvPoolError(f"the GPU failed ({error}); recompute these tokens")

    # On either thread

    def _prepare_ahead(self, pull: _Pull) -> None:
        with suppress(Exception):  # the copying thread tries again, and says so
            self._prepared(pull)

    def _prepared(self, pull: _Pull) -> _Prepared:
        if pull.prepared is None:  # else without the lock, under which a later one may be prepared
            with self._lock:
                if pull.prepared is None:
                    pull.prepared = self._prepare(self._attached(), pull)
        return pull.prepared

    def _attached(self) -> GpuRuntime:
        """The runtime, for this thread."""
        if self._runtime is None:
            self._runtime = self._runtime_of(self._ordinal)
        if not getattr(self._here, "is_attached", False):
            self._runtime.attach()
            self._here.is_attached = True
        return self._runtime

    def _prepare(self, runtime: GpuRuntime, pull: _Pull) -> _Prepared:
        groups = _groups(pull.parts)
        tables = [self._tables_of(runtime, pull.destination, group) for group in groups]
        cut = [_cut(group[0].slots, table) for group, table in zip(groups, tables, strict=True)]
        memory = self._slots(runtime, sum(rows.size for rows, _ in cut))
        launches, start = list[_Launch](), 0
        for (rows, copies), group, table in zip(cut, groups, tables, strict=True):
            slots = memory[start : start + rows.size].view(-1, 2)
            slots.numpy()[:] = rows
            start += rows.size
            launches.append(_Launch(table, copies, slots, len(group[0].slots) * table.token_bytes))
        return _Prepared(launches, memory)

    def _slots(self, runtime: GpuRuntime, count: int) -> torch.Tensor:
        """Memory for so many numbers that the kernel can read and no launch does."""
        for place, memory in enumerate(self._free_slots):
            if memory.numel() >= count:
                return self._free_slots.pop(place)
        self._free_slots.clear()  # too small from now on
        return runtime.host_table(2 * max(count, 1))  # memory of no bytes is not known to be pinned

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


def _cut(slots: Int64s, tables: _Tables) -> tuple[Int64s, list[tuple[Int64s, Int64s, Int64s]]]:
    """Return the slots that the kernel moves, and the copies of whole blocks, if their runs are long."""
    if not tables.runs:
        return slots, []
    # Only the first block may lack rows: chunks are whole blocks, but for the tokens that a load skips.
    lead = -int(slots[0, 1]) % tables.block_rows
    blocks = slots[lead :: tables.block_rows] // tables.block_rows
    return slots[:lead], [runs.copies(blocks) for runs in tables.runs]


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
