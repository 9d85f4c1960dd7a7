"""The ways between a cache on the GPU and pages in host memory: kernels and scratch, or runs without either.

Each enqueues the work of one burst on a lane's two streams and later completes its pages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.core.copy_runs import runs_of_pages
from kvpool.core.page import HEADER_BYTES, SLOT_ALIGNMENT_BYTES, PageFault
from kvpool.kernels.burst_tables import BurstPages, BurstTables, TablePool
from kvpool_gpuagent.adapters.gpu_mover_parts import MoverParts
from kvpool_gpuagent.adapters.gpu_runtime import Int64s, Mark
from kvpool_gpuagent.adapters.gpu_streams import KernelLine, LaneStreams
from kvpool_gpuagent.adapters.page_sums import address_of
from kvpool_gpuagent.ports import PageCopy


def page_addresses(copies: Sequence[PageCopy]) -> Int64s:
    """[N] addresses of the pages' slots."""
    return np.array([address_of(copy.page) for copy in copies], dtype=np.int64)


def scratch_bytes(copy: PageCopy) -> int:
    """Of the scratch, for one page. As in the arena, whatever the page's length: kernels read and write 16 bytes at
    once, and a page ends with its sums, 8 bytes for each."""
    return -(-len(copy.page) // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def scratch_payloads(copies: Sequence[PageCopy], scratch_address: int) -> Int64s:
    """[N] addresses of payloads in the scratch, where slot follows slot as in the arena, headers left out."""
    sizes = np.array([scratch_bytes(copy) for copy in copies], dtype=np.int64)
    return scratch_address + np.cumsum(sizes) - sizes + HEADER_BYTES


def burst_pages(copies: Sequence[PageCopy], payloads: Int64s, present: Sequence[bool]) -> BurstPages:
    """The pages for kernels whose payloads lie at these device addresses."""
    return BurstPages(
        shards=[copy.key.shard for copy in copies],
        block_ids=np.stack([copy.block_ids for copy in copies]),
        skip_tokens=[copy.skip_tokens for copy in copies],
        payloads=payloads,
        present=present,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """What a burst has while it is in flight. One that fails keeps it: that is rare, and nothing may use it then."""

    pool: TablePool
    tables: BurstTables
    streams: LaneStreams
    line: KernelLine

    def give_back(self) -> None:
        """No kernel of the burst runs any more."""
        self.pool.give(self.tables)
        self.streams.give(self.line)


class StoreBursts:
    """Gather into scratch by kernel, sum there, copy payload and sum table out in one piece a page.

    Summing there costs another kernel, and no CPU: measured on an H200, 1.1 TB/s, where one core sums 12 GB/s.
    """

    needs_scratch = True

    def __init__(self, parts: MoverParts, streams: LaneStreams) -> None:
        self._parts = parts
        self._streams, self._copies = streams, streams.copies
        self.most_pages = parts.kernels.most_pages

    def page_bytes(self, copy: PageCopy) -> int:
        """See gpu_transfer.Mover."""
        return scratch_bytes(copy)

    def issue(self, copies: Sequence[PageCopy], scratch_address: int) -> StoredBurst:
        """See gpu_transfer.Mover."""
        parts = self._parts
        payloads = scratch_payloads(copies, scratch_address)
        tables = parts.tables.take()
        tables.fill(parts.table, burst_pages(copies, payloads, [True] * len(copies)))
        line = self._streams.take()
        parts.kernels.gather(tables)
        parts.kernels.sum(tables, line.space)
        gathered = line.stream.mark()
        self._copies.after(gathered)
        bodies = parts.body_bytes(copies)
        parts.runtime.copy_runs(page_addresses(copies) + HEADER_BYTES, payloads, bodies, self._copies)
        lent = Lent(parts.tables, tables, self._streams, line)
        return StoredBurst(parts, copies, lent, gathered, self._copies.mark(), time.perf_counter())


@dataclass(slots=True, eq=False)
class StoredBurst:
    """See gpu_transfer.Issued."""

    parts: MoverParts
    copies: Sequence[PageCopy]
    lent: Lent
    gathered: Mark
    copied: Mark
    issued_s: float
    turn_s: float = 0.0

    def finish(self) -> Sequence[PageFault | None]:
        """See gpu_transfer.Issued. The header, which names the sums, is the CPU's in any case."""
        if not self.gathered.passed():  # then it is now that we see it end
            self.gathered.wait()
            self.turn_s = time.perf_counter() - self.issued_s
        self.copied.wait()
        self.lent.give_back()
        if not self.parts.kernels.sums_on_device:
            self.parts.seal_all(self.copies)
            return [None] * len(self.copies)
        for copy in self.copies:
            self.parts.write_header(copy)
        return [None] * len(self.copies)


class LoadBursts:
    """Copy payload and sum table of pages into scratch, verify them there, scatter those that are whole, by kernel."""

    needs_scratch = True

    def __init__(self, parts: MoverParts, streams: LaneStreams) -> None:
        self._parts = parts
        self._streams, self._copies = streams, streams.copies
        self.most_pages = parts.kernels.most_pages

    def page_bytes(self, copy: PageCopy) -> int:
        """See gpu_transfer.Mover."""
        return scratch_bytes(copy)

    def issue(self, copies: Sequence[PageCopy], scratch_address: int) -> LoadedBurst:
        """See gpu_transfer.Mover."""
        parts = self._parts
        if parts.kernels.sums_on_device:
            faults = [parts.verify_header(copy) for copy in copies]
        else:
            faults = parts.verify_all(copies)
        good = np.array([fault is None for fault in faults])
        payloads = scratch_payloads(copies, scratch_address)
        sources = page_addresses(copies) + HEADER_BYTES
        parts.runtime.copy_runs(payloads[good], sources[good], parts.body_bytes(copies)[good], self._copies)
        copied = self._copies.mark()
        tables = parts.tables.take()
        tables.fill(parts.table, burst_pages(copies, payloads, good.tolist()))
        line = self._streams.take()
        line.stream.after(copied)
        parts.kernels.verify(tables, line.space)
        parts.kernels.scatter(tables, line.space)
        return LoadedBurst(faults, Lent(parts.tables, tables, self._streams, line), copied, line.stream.mark())


@dataclass(slots=True, eq=False)
class LoadedBurst:
    """See gpu_transfer.Issued."""

    faults: list[PageFault | None]
    lent: Lent
    copied: Mark
    scattered: Mark
    turn_s: float = 0.0

    def finish(self) -> Sequence[PageFault | None]:
        """See gpu_transfer.Issued."""
        self.copied.wait()
        if not self.scattered.passed():
            waited_s = time.perf_counter()
            self.scattered.wait()
            self.turn_s = time.perf_counter() - waited_s
        found = self.lent.tables.found_faults()
        self.lent.give_back()
        return [known or seen for known, seen in zip(self.faults, found, strict=True)]


class StoreRuns:
    """The copy engine takes each contiguous run to its place; the CPU sums."""

    needs_scratch = False
    most_pages = 1024

    def __init__(self, parts: MoverParts, streams: LaneStreams) -> None:
        self._parts, self._copies = parts, streams.copies

    def page_bytes(self, copy: PageCopy) -> int:
        """See gpu_transfer.Mover."""
        return len(copy.page)

    def issue(self, copies: Sequence[PageCopy], scratch_address: int) -> StoredRuns:
        """See gpu_transfer.Mover."""
        engine, pages, sizes = copy_arguments(self._parts, copies)
        self._parts.runtime.copy_runs(pages, engine, sizes, self._copies)
        return StoredRuns(self._parts, copies, self._copies.mark())


@dataclass(slots=True, eq=False)
class StoredRuns:
    """See gpu_transfer.Issued."""

    parts: MoverParts
    copies: Sequence[PageCopy]
    copied: Mark
    turn_s: None = None

    def finish(self) -> Sequence[PageFault | None]:
        """See gpu_transfer.Issued."""
        self.copied.wait()
        self.parts.seal_all(self.copies)
        return [None] * len(self.copies)


class LoadRuns:
    """The CPU verifies, then the copy engine takes each run to its place."""

    needs_scratch = False
    most_pages = 1024

    def __init__(self, parts: MoverParts, streams: LaneStreams) -> None:
        self._parts, self._copies = parts, streams.copies

    def page_bytes(self, copy: PageCopy) -> int:
        """See gpu_transfer.Mover."""
        return len(copy.page)

    def issue(self, copies: Sequence[PageCopy], scratch_address: int) -> LoadedRuns:
        """See gpu_transfer.Mover. While this verifies, the burst before is on the link."""
        faults = self._parts.verify_all(copies)
        good = [copy for copy, fault in zip(copies, faults, strict=True) if fault is None]
        if good:
            engine, pages, sizes = copy_arguments(self._parts, good)
            self._parts.runtime.copy_runs(engine, pages, sizes, self._copies)
        return LoadedRuns(faults, self._copies.mark())


@dataclass(slots=True, eq=False)
class LoadedRuns:
    """See gpu_transfer.Issued."""

    faults: list[PageFault | None]
    copied: Mark
    turn_s: None = None

    def finish(self) -> Sequence[PageFault | None]:
        """See gpu_transfer.Issued."""
        self.copied.wait()
        return self.faults


def copy_arguments(parts: MoverParts, copies: Sequence[PageCopy]) -> tuple[Int64s, Int64s, Int64s]:
    """Engine addresses, page addresses and sizes of all runs, each [R]."""
    runs = runs_of_pages(
        parts.table,
        [copy.key.shard for copy in copies],
        np.stack([copy.block_ids for copy in copies]),
        [copy.skip_tokens for copy in copies],
    )
    pages = page_addresses(copies)[runs.pages] + (HEADER_BYTES + runs.payload_offsets)
    return runs.addresses, pages, runs.sizes_bytes
