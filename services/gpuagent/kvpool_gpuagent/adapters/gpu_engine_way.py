"""The way on which the engine launches the kernels, in its own process, and the copy engine does the rest.

Pages pass through scratch that the engine lends. A store asks it to gather, then copies to the slots; a load copies
from the slots, then asks it to scatter. Kernels of two processes take turns on a GPU, those of one do not: the engine
hardly notices, and no burst waits for a turn. Sums are made and checked as for our own kernels: on the GPU, but beside
a busy engine on the CPU.

An engine that fails or does not answer in time is not asked again in its session, and its pages go on one of our own
ways. A gather that it may still be running then reads its own cache and writes its own scratch, which is used no more;
a scatter writes the cache, so it is waited for, until the answer or the end of the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.core.errors import InvalidRequest
from kvpool.core.launches import LaunchKind, most_pages
from kvpool.core.page import HEADER_BYTES, PageFault
from kvpool_gpuagent.adapters.gpu_lane import Lane
from kvpool_gpuagent.adapters.gpu_lent_scratch import LentCopy, LentScratch
from kvpool_gpuagent.adapters.gpu_mover_parts import MoverParts
from kvpool_gpuagent.adapters.gpu_movers import page_addresses, scratch_bytes
from kvpool_gpuagent.adapters.gpu_moving import Moved, move_on_lane
from kvpool_gpuagent.adapters.gpu_runtime import Int64s, Mark
from kvpool_gpuagent.adapters.gpu_streams import LaneStreams
from kvpool_gpuagent.ports import PageCopy, StopFlag

OwnWay = Callable[[Sequence[PageCopy], StopFlag], Awaitable[Moved]]
"""Moves pages on a way that needs no engine."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineWay:
    """One direction of a cache on this way. own_way: for what the engine did not launch."""

    lent: LentScratch
    lane: Lane
    mover: PagesOut | PagesIn
    own_way: OwnWay

    async def move(self, copies: Sequence[PageCopy], stop: StopFlag) -> Moved:
        """As gpu_moving.move_on_lane, but never cancelled."""
        moving = [self._move_burst(burst, stop) for burst in self._bursts(copies)]
        results = await asyncio.gather(*moving, return_exceptions=True)
        faults: list[PageFault | None] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            if isinstance(result, bool):
                return False
            faults += result
        return faults

    def _bursts(self, copies: Sequence[PageCopy]) -> list[list[PageCopy]]:
        bursts: list[list[PageCopy]] = []
        size_bytes = 0
        for copy in copies:
            size_bytes += scratch_bytes(copy)
            if not bursts or size_bytes > self.lent.burst_bytes or len(bursts[-1]) == self.mover.most_pages:
                bursts.append([])
                size_bytes = scratch_bytes(copy)
            bursts[-1].append(copy)
        return bursts

    async def _move_burst(self, copies: Sequence[PageCopy], stop: StopFlag) -> Moved:
        if stop():
            return False
        places = await self.lent.take(copies, sums=self.mover.sums_on_device and not self.lane.sums_on_cpu())
        if places is None:
            return await self.own_way(copies, stop)
        try:
            if isinstance(self.mover, PagesOut):
                return await self._store(copies, places, stop)
            return await self._load(copies, places, stop)
        finally:
            # Also what was not answered: after that nothing is given out.
            self.lent.give(places)

    async def _store(self, copies: Sequence[PageCopy], places: Sequence[LentCopy], stop: StopFlag) -> Moved:
        if await self.lent.launch(LaunchKind.GATHER, places) is None:
            return await self.own_way(copies, stop)
        return await move_on_lane(self.lane, self.mover, places, stop)

    async def _load(self, copies: Sequence[PageCopy], places: Sequence[LentCopy], stop: StopFlag) -> Moved:
        copied = await move_on_lane(self.lane, self.mover, places, stop)
        if isinstance(copied, bool):
            return copied
        faults = list(copied)
        good = [number for number, fault in enumerate(faults) if fault is None]
        if good:
            found: Moved | None = await self._scatter([places[number] for number in good])
            if found is None:
                found = await self.own_way([copies[number] for number in good], stop)
            if isinstance(found, bool):
                return found
            for number, fault in zip(good, found, strict=True):
                faults[number] = fault
        return faults

    async def _scatter(self, places: Sequence[LentCopy]) -> Sequence[PageFault | None] | None:
        launched = await self.lent.launch(LaunchKind.SCATTER, places)
        if launched is None:
            return None
        try:
            return launched.found([copy.key.shard for copy in places], self.mover.table)
        except InvalidRequest as error:
            self.lent.give_up(error.message)
            return None


def _payloads(copies: Sequence[PageCopy]) -> Int64s:
    return np.array([copy.payload_address for copy in copies if isinstance(copy, LentCopy)], dtype=np.int64)


def _is_summed(copy: PageCopy) -> bool:
    return isinstance(copy, LentCopy) and copy.sums


class _Pages:
    needs_scratch = False

    def __init__(self, parts: MoverParts, streams: LaneStreams) -> None:
        self._parts, self._copies, self.table = parts, streams.copies, parts.table
        layout, spec = parts.table.layout, parts.table.spec
        self.sums_on_device = parts.kernels.sums_on_device
        self.most_pages = min(parts.kernels.most_pages, most_pages(spec.chunk_tokens // layout.block_tokens))

    def page_bytes(self, copy: PageCopy) -> int:
        """See gpu_transfer.Mover."""
        return len(copy.page)


class PagesOut(_Pages):
    """Payloads and sum tables that lie in the engine's scratch, one piece a page, to their slots. Copies: LentCopy."""

    def issue(self, copies: Sequence[PageCopy], scratch_address: int) -> CopiedOut:
        """See gpu_transfer.Mover."""
        slots = page_addresses(copies) + HEADER_BYTES
        self._parts.runtime.copy_runs(slots, _payloads(copies), self._parts.body_bytes(copies), self._copies)
        return CopiedOut(self._parts, copies, self._copies.mark())


@dataclass(slots=True, eq=False)
class CopiedOut:
    """See gpu_transfer.Issued."""

    parts: MoverParts
    copies: Sequence[PageCopy]
    copied: Mark
    turn_s: float | None = field(default=None, init=False)

    def finish(self) -> Sequence[PageFault | None]:
        """See gpu_transfer.Issued."""
        self.copied.wait()
        for copy in self.copies:
            if _is_summed(copy):
                self.parts.write_header(copy)
        self.parts.seal_all([copy for copy in self.copies if not _is_summed(copy)])
        return [None] * len(self.copies)


class PagesIn(_Pages):
    """Payloads and sum tables of pages whose headers are good to the engine's scratch. Copies: LentCopy."""

    def issue(self, copies: Sequence[PageCopy], scratch_address: int) -> CopiedIn:
        """See gpu_transfer.Mover."""
        parts = self._parts
        faults = [parts.verify_header(copy) if _is_summed(copy) else None for copy in copies]
        ours = [number for number, copy in enumerate(copies) if not _is_summed(copy)]
        for number, fault in zip(ours, parts.verify_all([copies[number] for number in ours]), strict=True):
            faults[number] = fault
        good = [copy for copy, fault in zip(copies, faults, strict=True) if fault is None]
        if good:
            slots = page_addresses(good) + HEADER_BYTES
            parts.runtime.copy_runs(_payloads(good), slots, parts.body_bytes(good), self._copies)
        return CopiedIn(faults, self._copies.mark())


@dataclass(slots=True, eq=False)
class CopiedIn:
    """See gpu_transfer.Issued."""

    faults: Sequence[PageFault | None]
    copied: Mark
    turn_s: float | None = field(default=None, init=False)

    def finish(self) -> Sequence[PageFault | None]:
        """See gpu_transfer.Issued."""
        self.copied.wait()
        return self.faults
