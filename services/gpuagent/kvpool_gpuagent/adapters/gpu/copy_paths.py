"""What moves pages between a cache on the GPU and host memory: the copy engine alone, or kernels and scratch.

Each enqueues the work of one burst on the streams of a transfer queue. Nothing here looks at the bytes: the pagestore
seals and verifies pages.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvpool.core.chunks import Int64s
from kvpool.core.page import HEADER_BYTES, SLOT_ALIGNMENT_BYTES
from kvpool.core.plane_table import PlaneTable
from kvpool_gpuagent.adapters.gpu.runtime import GpuRuntime, Mark, Stream
from kvpool_gpuagent.core.copy_runs import RunTable
from kvpool_gpuagent.core.pages import CopyBatch
from kvpool_gpuagent.kernels.cache_kernels import BurstPages, BurstTables, CacheKernels, TablePool

MOST_KERNEL_STREAMS = 4  # as many as bursts are in flight


class QueueStreams:
    """The streams of one transfer queue. Kernel streams are made when first needed."""

    def __init__(self, runtime: GpuRuntime, most_streams: int = MOST_KERNEL_STREAMS) -> None:
        """most_streams: bursts beyond them share one."""
        self.copies = runtime.stream(urgent=True)
        self._runtime, self._most_streams = runtime, most_streams
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._bursts: list[int] = []  # of each stream, in flight; one that failed counts for good: see `take`

    def take(self) -> Stream:
        """A stream for one burst; kernels launched in this thread go to it.

        One that no burst in flight uses, if there may be one. Else the burst follows others on theirs: slower, and
        right, because the queue's one issuing thread launches all kernels of a burst before those of the next. So no
        one waits here for what a burst that failed never gives back.
        """
        with self._lock:
            if not self._bursts or (min(self._bursts) and len(self._streams) < self._most_streams):
                self._streams.append(self._runtime.stream(urgent=True))
                self._bursts.append(0)
            number = self._bursts.index(min(self._bursts))
            self._bursts[number] += 1
            stream = self._streams[number]
        self._runtime.launch_on(stream)
        return stream

    def give(self, stream: Stream) -> None:
        """Its burst is over."""
        with self._lock:
            self._bursts[self._streams.index(stream)] -= 1

    def synchronize(self) -> None:
        """Block until all work of the queue has ended. Raises what the GPU reports."""
        with self._lock:
            streams = [self.copies, *self._streams]
        for stream in streams:
            stream.synchronize()


MOST_RUN_PAGES = 1024  # of a burst that needs no scratch
MOST_KERNEL_PAGES = 512


class Issued(Protocol):
    """Work of one burst on the GPU."""

    def finish(self) -> None:
        """Wait for it. Raises what the GPU reports."""
        ...

    @property
    def turn_s(self) -> float | None:
        """Once finished: seconds that its kernels and their turn were waited for, 0.0 if they had ended before; None
        without kernels."""
        ...


class CopyPath(Protocol):
    """Moves pages of one cache in one direction by one path. Transfers with the same path share bursts."""

    needs_scratch: bool
    most_pages: int  # of a burst

    def sizes_bytes(self, batch: CopyBatch) -> Int64s:
        """[N]: what each page takes of a burst, and of the scratch if it needs some."""
        ...

    def issue(self, batch: CopyBatch, scratch_address: int) -> Issued:
        """Enqueue the work of a burst; page after page in the scratch, each as large as sizes_bytes says."""
        ...


class RunCopies:
    """The copy engine takes each contiguous run to its place: no kernel, nothing beside an engine's own work."""

    needs_scratch = False
    most_pages = MOST_RUN_PAGES

    def __init__(
        self, runs: RunTable, payload_bytes: Int64s, runtime: GpuRuntime, stream: Stream, *, out: bool
    ) -> None:
        """payload_bytes: [shard_count]. out: from the cache to pages."""
        self._runs, self._payload_bytes, self._runtime, self._stream = runs, payload_bytes, runtime, stream
        self._out = out

    def sizes_bytes(self, batch: CopyBatch) -> Int64s:
        """See CopyPath."""
        return self._payload_bytes[batch.shards]

    def issue(self, batch: CopyBatch, scratch_address: int) -> Issued:
        """See CopyPath."""
        runs = self._runs.runs(batch.shards, batch.block_ids, batch.skip_tokens)
        pages = batch.addresses[runs.pages] + (HEADER_BYTES + runs.payload_offsets)
        if self._out:
            self._runtime.copy_runs(pages, runs.addresses, runs.sizes_bytes, self._stream)
        else:
            self._runtime.copy_runs(runs.addresses, pages, runs.sizes_bytes, self._stream)
        return _Copied(self._stream.mark())


@dataclass(slots=True, eq=False)
class _Copied:
    """See Issued."""

    copied: Mark
    turn_s: None = None

    def finish(self) -> None:
        self.copied.wait()


class KernelBursts:
    """Kernels gather and scatter rows of any layout between cache and scratch, the copy engine moves whole payloads.

    Kernels of two processes take turns, so beside a busy engine few large bursts cost it least.
    """

    needs_scratch = True
    most_pages = MOST_KERNEL_PAGES

    def __init__(
        self,
        table: PlaneTable,
        kernels: CacheKernels,
        tables: TablePool,
        runtime: GpuRuntime,
        streams: QueueStreams,
        *,
        out: bool,
    ) -> None:
        """out: from the cache to pages."""
        self._table, self._kernels, self._tables = table, kernels, tables
        self._runtime, self._streams, self._out = runtime, streams, out
        self._payload_bytes = payload_sizes(table)
        # As in the arena: kernels read and write 16 bytes at once.
        self._scratch_bytes = -(-self._payload_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES

    def sizes_bytes(self, batch: CopyBatch) -> Int64s:
        """See CopyPath."""
        return self._scratch_bytes[batch.shards]

    def issue(self, batch: CopyBatch, scratch_address: int) -> Issued:
        """See CopyPath."""
        sizes = self._scratch_bytes[batch.shards]
        scratch: Int64s = scratch_address + np.cumsum(sizes) - sizes
        pages = batch.addresses + HEADER_BYTES
        lengths = self._payload_bytes[batch.shards]
        copies = self._streams.copies
        tables, stream = self._tables.take(), self._streams.take()
        tables.fill(
            self._table,
            BurstPages(
                shards=batch.shards.tolist(),
                block_ids=batch.block_ids,
                skip_tokens=batch.skip_tokens.tolist(),
                payloads=scratch,
                present=[True] * batch.count,
            ),
        )
        burst = _Burst(self._tables, tables, self._streams, stream, time.perf_counter())
        if self._out:
            self._kernels.gather(tables)
            burst.kernels = stream.mark()
            copies.after(burst.kernels)
            self._runtime.copy_runs(pages, scratch, lengths, copies)
            burst.copied = copies.mark()
        else:
            self._runtime.copy_runs(scratch, pages, lengths, copies)
            burst.copied = copies.mark()
            stream.after(burst.copied)
            self._kernels.scatter(tables)
            burst.kernels = stream.mark()
        return burst


@dataclass(slots=True, eq=False)
class _Burst:
    """See Issued. One that fails keeps its tables and its stream: that is rare, and nothing may use them then."""

    pool: TablePool
    tables: BurstTables
    streams: QueueStreams
    stream: Stream
    issued_s: float
    kernels: Mark | None = None
    copied: Mark | None = None
    turn_s: float = 0.0

    def finish(self) -> None:
        assert self.kernels is not None and self.copied is not None
        if not self.kernels.passed():  # then it is now that we see it end
            self.kernels.wait()
            self.turn_s = time.perf_counter() - self.issued_s
        self.copied.wait()
        self.pool.give(self.tables)
        self.streams.give(self.stream)


def payload_sizes(table: PlaneTable) -> Int64s:
    """[highest shard + 1]: bytes of a payload of each shard in the table, 0 for others."""
    sizes = np.zeros(max(table.shards) + 1, dtype=np.int64)
    for shard, planes in table.shards.items():
        sizes[shard] = planes.payload_bytes
    return sizes
