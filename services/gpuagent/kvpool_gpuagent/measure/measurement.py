"""What can be measured, by command."""

from __future__ import annotations

import asyncio
import importlib.metadata
import mmap
import os
import platform
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvpool.core.grid import ShardGrid
from kvpool.core.ipc import IpcEvent
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.page import PageFault
from kvpool.core.segment import MappedSegment
from kvpool_gpuagent.adapters.gpu_cache import Direction, GpuCache
from kvpool_gpuagent.adapters.gpu_engine_way import EngineWay
from kvpool_gpuagent.adapters.gpu_moving import Moved as MovedPages
from kvpool_gpuagent.adapters.gpu_runtime import GpuRuntime
from kvpool_gpuagent.adapters.gpu_transfer import Mover
from kvpool_gpuagent.core.ways import Way
from kvpool_gpuagent.measure.cache_plan import BenchPages, CachePlan, Part
from kvpool_gpuagent.measure.launch_desk import LaunchDesk
from kvpool_gpuagent.measure.moved import Moved, joined, repeat
from kvpool_gpuagent.measure.peers import PeerMeasurement
from kvpool_gpuagent.measure.plain_copies import Copy, PlainCopies
from kvpool_gpuagent.ports import EngineCache, EngineLaunches, MappedHandle, PageCopy, StopFlag

Command = Mapping[str, Any]
Answer = Mapping[str, Any]

DIRECTION_BYTES = 1 << 30  # of the arena, for each direction
BUFFER_BYTES = 520 << 20  # of GPU memory for plain copies, for each direction: 512 MiB in whole pages may be more


class MeasuredDevice(Protocol):
    """The part of ports.Device that is measured."""

    @property
    def runtime(self) -> GpuRuntime:
        """Where it runs."""
        ...

    async def map_cache(
        self,
        spec: KeyspaceSpec,
        grid: ShardGrid,
        layout: EngineLayout,
        handles: Sequence[MappedHandle],
        events: Sequence[IpcEvent],
        launches: EngineLaunches | None = None,
    ) -> EngineCache:
        """See ports.Device; a GpuCache."""
        ...

    def register_segment(self, segment: MappedSegment) -> Callable[[], None]:
        """See ports.Device."""
        ...

    async def close(self) -> None:
        """See ports.Device."""
        ...


class CountedMovers(Mapping[Way, Mover]):
    """The movers of a direction, and how often each was taken."""

    def __init__(self, movers: Mapping[Way, Mover]) -> None:
        self._movers = movers
        self.taken: Counter[str] = Counter()

    def __getitem__(self, way: Way) -> Mover:
        self.taken[way.value] += 1
        return self._movers[way]

    def __iter__(self) -> Iterator[Way]:
        return iter(self._movers)

    def __len__(self) -> int:
        return len(self._movers)


@dataclass(frozen=True, slots=True, eq=False)
class CountedEngineWay(EngineWay):
    """The way on which the engine launches, and how often it was taken."""

    taken: Counter[str]

    async def move(self, copies: Sequence[PageCopy], stop: StopFlag) -> MovedPages:
        self.taken[Way.ENGINE.value] += 1
        return await EngineWay.move(self, copies, stop)  # a class with slots is not the one that super() looks for


class Measurement:
    """One mapped cache and an arena: half of it is stored to, the other half loaded from."""

    def __init__(
        self,
        device: MeasuredDevice,
        copy: Copy,
        *,
        direction_bytes: int = DIRECTION_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Raises OSError if there is no memory for the arena, OutOfDeviceMemory if there is none for the buffers."""
        self._device, self._runtime, self._copy = device, device.runtime, copy
        self._buffer_bytes = buffer_bytes
        descriptor, arena = _shared_memory(2 * direction_bytes)
        self._slots = memoryview(arena)[:direction_bytes], memoryview(arena)[direction_bytes:]
        address = int(np.frombuffer(arena, dtype=np.uint8).ctypes.data)
        try:
            device.register_segment(MappedSegment(memoryview(arena), descriptor))
        finally:
            os.close(descriptor)
        self._plain = {"arena": self._plain_copies(address, address + direction_bytes, direction_bytes)}
        self._cache: GpuCache | None = None
        self._pages: BenchPages | None = None
        self._taken: list[Counter[str]] = []
        self._peers = PeerMeasurement(self._runtime, copy)
        self._desk = LaunchDesk()
        self.commands: dict[str, Callable[[Command], Awaitable[Answer]]] = {
            "listen": self._desk.listen,
            "map": self.map,
            "unmap": self.unmap,
            "way": self.way,
            "run": self.run,
            "peer": self._peers.open,
            "peer-run": self._peers.run,
            "peer-end": self._peers.end,
        }

    def about(self) -> Answer:
        """What is measured here."""
        return {
            "device": self._runtime.name,
            "torch": importlib.metadata.version("torch"),
            "triton": importlib.metadata.version("triton"),
            "python": platform.python_version(),
        }

    async def map(self, command: Command) -> Answer:
        """Map a cache in place of the one before, and seal pages for loads."""
        await self.unmap({})
        plan = CachePlan.of(command)
        pages = BenchPages(plan, *self._slots)
        launches = self._desk.launches_for(plan) if command.get("lent") else None
        cache = await self._device.map_cache(plan.spec, plan.grid, plan.layout, plan.handles, [], launches)
        if not isinstance(cache, GpuCache):
            raise TypeError(f"a GpuCache is measured, got {type(cache).__name__}")
        cache.store, cache.load = self._counted(cache.store), self._counted(cache.load)
        self._cache, self._pages = cache, pages
        if not await cache.gather(pages.loads, lambda: False):
            raise RuntimeError("the pages to load could not be made")
        payloads = plan.payloads
        logical_bytes = sum(plan.logical_bytes(shard) for shard in payloads)
        return {
            "pages": len(pages.stores),
            "page_bytes": max(payload.slot_bytes for payload in payloads.values()),
            "logical_page_bytes": logical_bytes // len(payloads),
            "logical_ratio": logical_bytes / sum(payload.payload_bytes for payload in payloads.values()),
            "run_bytes": plan.run_bytes,
            "copies_bytes": plan.layout.holds_codec_rows(plan.spec),
            "ways": [way.value for way in cache.store.chooser.ways],
        }

    async def unmap(self, command: Command) -> Answer:
        """Let go of the cache, so that its engine can free it."""
        cache, self._cache, self._pages, self._taken = self._cache, None, None, []
        if cache is not None:
            await cache.close()
        return {}

    async def way(self, command: Command) -> Answer:
        """Hold both directions to one way; null: as before."""
        cache, _ = self._mapped()
        name = command["way"]
        if name == Way.ENGINE.value and cache.store.engine is None:
            raise ValueError("no engine launches for this cache; map it with lent")
        for direction in (cache.store, cache.load):
            direction.chooser.pin(None if name is None else Way(name))
        return {}

    async def run(self, command: Command) -> Answer:
        """Move for some seconds."""
        what, in_flight, seconds = command["what"], command["in_flight"], command["seconds"]
        directions = {"out": (0,), "in": (1,), "both": (0, 1)}
        if what.startswith("copy-"):
            size_bytes = command["size_bytes"]
            if self._pages is not None:
                size_bytes = self._pages.transfer_bytes(size_bytes)
            copies = self._plain_of(command.get("memory", "arena"))
            runs = [
                asyncio.to_thread(copies[number].run, size_bytes, in_flight, seconds)
                for number in directions[what.removeprefix("copy-")]
            ]
            return joined(await asyncio.gather(*runs))
        moves = {"store": (self._store,), "load": (self._load,), "both": (self._store, self._load)}[what]
        for taken in self._taken:
            taken.clear()
        results = await asyncio.gather(*(move(command["size_bytes"], in_flight, seconds) for move in moves))
        taken = sum(self._taken, Counter[str]())
        self._check_launches(taken)
        return joined(results) | {"ways": dict(taken)}

    async def close(self) -> None:
        """Unmap and end the device."""
        await self._peers.end({})
        await self.unmap({})
        await self._desk.close()
        await self._device.close()

    async def _store(self, size_bytes: int, in_flight: int, seconds: float) -> Moved:
        cache, pages = self._mapped()
        parts = pages.parts(pages.stores, size_bytes)

        async def store(number: int) -> int:
            part = parts[number % len(parts)]
            if not await cache.gather(part.copies, lambda: False):
                raise RuntimeError("a store stopped")
            return part.logical_bytes

        return await repeat(store, in_flight, seconds)

    async def _load(self, size_bytes: int, in_flight: int, seconds: float) -> Moved:
        cache, pages = self._mapped()
        parts = pages.parts(pages.loads, size_bytes)

        async def load(number: int) -> int:
            part = parts[number % len(parts)]
            _check(await cache.scatter(part.copies), part)
            return part.logical_bytes

        return await repeat(load, in_flight, seconds)

    def _mapped(self) -> tuple[GpuCache, BenchPages]:
        if self._cache is None or self._pages is None:
            raise ValueError("no cache is mapped; send map first")
        return self._cache, self._pages

    def _counted(self, direction: Direction) -> Direction:
        movers = CountedMovers(direction.movers)
        self._taken.append(movers.taken)
        way = direction.engine
        engine = None if way is None else CountedEngineWay(way.lent, way.lane, way.mover, way.own_way, movers.taken)
        return replace(direction, movers=movers, engine=engine)

    def _check_launches(self, taken: Mapping[str, int]) -> None:
        """Figures of the engine's way must not be those of another. Raises RuntimeError."""
        engine = self._cache.store.engine if self._cache is not None else None
        if taken.get(Way.ENGINE.value) and engine is not None and engine.lent.given_up:
            raise RuntimeError(f"the engine launches no more: {self._desk.failure()}")

    def _plain_of(self, memory: str) -> tuple[PlainCopies, PlainCopies]:
        """Copies from and to the arena, which is registered, or memory that the driver allocated for that."""
        if memory == "allocated" and memory not in self._plain:
            self._allocated = [self._runtime.host_table(self._buffer_bytes // 8) for _ in range(2)]
            out_address, in_address = (int(table.data_ptr()) for table in self._allocated)
            self._plain[memory] = self._plain_copies(out_address, in_address, self._buffer_bytes)
        return self._plain[memory]

    def _plain_copies(self, out_address: int, in_address: int, host_bytes: int) -> tuple[PlainCopies, PlainCopies]:
        out, back = (
            PlainCopies(self._runtime, self._copy, (address, host_bytes), buffer_bytes=self._buffer_bytes, out=is_out)
            for address, is_out in ((out_address, True), (in_address, False))
        )
        return out, back


def _check(faults: Any, part: Part) -> None:
    found: list[PageFault] = [fault for fault in faults if fault is not None]
    if found:
        raise RuntimeError(f"{len(found)} of {len(part.copies)} pages failed: {found[0]}")


def _shared_memory(size_bytes: int) -> tuple[int, mmap.mmap]:
    """As an arena is: a file in memory that no file system limits, there before it is pinned; and its mapping."""
    descriptor = os.memfd_create("kvpool-bench")
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        return descriptor, mmap.mmap(descriptor, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
