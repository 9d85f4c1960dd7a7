"""The transfer engine of one GPU: two lanes, their scratch, and for each cache the ways that its pages can take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.core.copy_runs import run_bytes_of
from kvpool.core.errors import KvPoolError
from kvpool.core.page import slot_bytes
from kvpool.core.plane_table import PlaneTable
from kvpool.kernels.burst_tables import TablePool
from kvpool.kernels.cache_kernels import CacheKernels
from kvpool_gpuagent.adapters.gpu_cache import Direction
from kvpool_gpuagent.adapters.gpu_engine_way import EngineWay, PagesIn, PagesOut
from kvpool_gpuagent.adapters.gpu_lane import Lane
from kvpool_gpuagent.adapters.gpu_lent_scratch import LentScratch
from kvpool_gpuagent.adapters.gpu_mover_parts import MoverParts
from kvpool_gpuagent.adapters.gpu_movers import LoadBursts, LoadRuns, StoreBursts, StoreRuns
from kvpool_gpuagent.adapters.gpu_moving import Moved, move_on_lane
from kvpool_gpuagent.adapters.gpu_runtime import GpuRuntime, OutOfDeviceMemory
from kvpool_gpuagent.adapters.gpu_scratch import Scratch
from kvpool_gpuagent.adapters.gpu_streams import LaneStreams
from kvpool_gpuagent.adapters.gpu_transfer import Mover
from kvpool_gpuagent.adapters.page_sums import PageSums, ThreadSums
from kvpool_gpuagent.adapters.sum_workers import SumWorkers
from kvpool_gpuagent.core.ways import LONG_RUN_BYTES, Way, WayChooser
from kvpool_gpuagent.ports import PageCopy, StopFlag

_log = logging.getLogger(__name__)

_SCRATCH_PAGES = 4  # two of each direction: one on the link, one in kernels


class TransferEngine:
    """Stores and loads of all caches share the lanes and the scratch. Nothing ever synchronizes the whole device."""

    def __init__(
        self,
        runtime: GpuRuntime,
        *,
        scratch_bytes: int,
        sum_threads: int,
        sum_processes: int = 0,
        on_broken: Callable[[KvPoolError], None] = lambda error: None,
    ) -> None:
        """sum_processes: none: the sum_threads of this one do all. on_broken: called, from a thread, when the GPU has
        failed for good; the process must be started again."""
        self._runtime = runtime
        self._scratch = Scratch(runtime, scratch_bytes)
        self._tables = TablePool(runtime.host_table)
        threads = ThreadSums(sum_threads)
        self.sums: PageSums = SumWorkers(sum_processes, threads) if sum_processes else threads
        self._store_streams, self._load_streams = LaneStreams(runtime), LaneStreams(runtime)
        self._stores = Lane(runtime, self._store_streams, self._scratch, "store", self._sums_are_fast, on_broken)
        self._loads = Lane(runtime, self._load_streams, self._scratch, "load", self._sums_are_fast, on_broken)

    def directions(self, table: PlaneTable, lent: LentScratch | None = None) -> tuple[Direction, Direction]:
        """Store and load of one cache. The calling thread is attached; blocks while scratch is allocated.

        lent: by the engine, for launches of its own.
        Raises KvPoolError if the GPU has no room for the tables, or for what a codec needs.
        """
        try:
            kernels = CacheKernels(table, self._runtime.to_device)
        except OutOfDeviceMemory as error:
            raise KvPoolError(
                f"the GPU has no room for a cache's tables ({error}); leave the agent more memory"
            ) from error
        parts = MoverParts(table, kernels, self._runtime, self._tables, self.sums)
        largest = max(slot_bytes(shard.payload_bytes) for shard in table.shards.values())
        copies_bytes = table.layout.holds_codec_rows(table.spec)
        if self._can_launch(parts) and self._scratch.size_bytes >= _SCRATCH_PAGES * largest:
            ways = [Way.BURSTS, Way.RUNS]
        elif copies_bytes:
            ways = [Way.RUNS]  # without scratch even short runs are copied one by one: slower, still right
        else:
            raise KvPoolError("the GPU has no room for the scratch that a codec needs; leave the agent more memory")
        if lent is not None and lent.has_room(table):
            ways.append(Way.ENGINE)
        run_bytes = min(run_bytes_of(table, shard) for shard in table.shards)
        choices = _Choices(ways, run_bytes if Way.BURSTS in ways else LONG_RUN_BYTES, copies_bytes)
        store: dict[Way, Mover] = {
            Way.BURSTS: StoreBursts(parts, self._store_streams),
            Way.RUNS: StoreRuns(parts, self._store_streams),
        }
        load: dict[Way, Mover] = {
            Way.BURSTS: LoadBursts(parts, self._load_streams),
            Way.RUNS: LoadRuns(parts, self._load_streams),
        }
        return (
            _direction(self._stores, store, PagesOut(parts, self._store_streams), choices, lent),
            _direction(self._loads, load, PagesIn(parts, self._load_streams), choices, lent),
        )

    def _sums_are_fast(self) -> bool:
        return self.sums.is_fast

    def _can_launch(self, parts: MoverParts) -> bool:
        """Whether kernels have what they need on the GPU; has them compiled for this cache, which takes seconds."""
        if not parts.kernels.most_pages:
            return False
        tables = self._tables.take()
        try:
            for streams in (self._store_streams, self._load_streams):
                line = streams.ensure()
                self._runtime.launch_on(line.stream)
                parts.kernels.warm_up(tables, line.space)
                line.stream.synchronize()
        except OutOfDeviceMemory as error:
            _log.warning("the GPU has no room for kernels: pages are copied run by run, slower (%s)", error)
            return False
        finally:
            self._tables.give(tables)
        return True

    async def close(self) -> None:
        """End the lanes once what was submitted has settled."""
        for lane in (self._stores, self._loads):
            await asyncio.to_thread(lane.close)
        await asyncio.to_thread(self.sums.close)


@dataclass(frozen=True, slots=True)
class _Choices:
    ways: Sequence[Way]
    run_bytes: int
    copies_bytes: bool


def _direction(
    lane: Lane,
    movers: dict[Way, Mover],
    page_mover: PagesOut | PagesIn,
    choices: _Choices,
    lent: LentScratch | None,
) -> Direction:
    by_engine = Way.ENGINE in choices.ways
    chooser = WayChooser(choices.run_bytes, copies_bytes=choices.copies_bytes, engine_launches=by_engine)
    chooser.keep(choices.ways)
    if lent is None or not by_engine:
        return Direction(lane, movers, chooser)

    own_ways = [way for way in choices.ways if way is not Way.ENGINE]

    async def own_way(copies: Sequence[PageCopy], stop: StopFlag) -> Moved:
        way = chooser.choose(lane.turn_s, sums_are_fast=lane.sums_are_fast())
        return await move_on_lane(lane, movers[way if way in own_ways else own_ways[0]], copies, stop)

    lent.on_given_up.append(lambda: chooser.keep(own_ways))
    return Direction(lane, movers, chooser, EngineWay(lent, lane, page_mover, own_way))
