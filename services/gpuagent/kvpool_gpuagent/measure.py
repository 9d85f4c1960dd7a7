"""The CUDA device alone, measured: `python -m kvpool_gpuagent.measure`, one JSON command a line, one JSON answer each.

What `kvpool bench gpu` starts as the agent's side: it maps an engine's cache as an agent would, with an arena of its
own, and moves pages for so long, or copies the same bytes plainly: the link's own figure.

  {"op": "map", "geometry": [layers, kv_heads, head_dim, latent_dim], "codec": name, "layout": preset, "heads": [a, b],
   "block_tokens": n, "block_count": n, "handles": [[uuid, hex, offset, allocation_bytes, size_bytes], ...]}
  {"op": "run", "what": "store" | "load" | "both" | "copy-out" | "copy-in" | "copy-both", "size_bytes": n,
   "in_flight": n, "seconds": s}
  {"op": "way", "way": "runs" | "bursts" | null}
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvpool.core import layout_presets
from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.grid import ShardGrid
from kvpool.core.ipc import IpcMemory
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import PageKey
from kvpool.core.payload import ShardPayload
from kvpool_gpuagent.adapters.cuda_device import CudaDevice
from kvpool_gpuagent.adapters.gpu_cache import GpuCache
from kvpool_gpuagent.core.ways import Way
from kvpool_gpuagent.ports import MappedHandle, PageCopy

ARENA_BYTES = 1 << 30  # of each direction
CHUNK_TOKENS = 256


class Measurement:
    """One mapped cache and an arena: half of it is stored to, the other half loaded from."""

    def __init__(self, scratch_bytes: int, sum_threads: int) -> None:
        self._device = CudaDevice(scratch_bytes=scratch_bytes, sum_threads=sum_threads)
        self._runtime = self._device.runtime
        self._cache: GpuCache | None = None
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * ARENA_BYTES)
            self._arena = mmap.mmap(file.fileno(), 2 * ARENA_BYTES)
        self._view = memoryview(self._arena)
        self._device.register_segment(self._view)
        self._address = np.frombuffer(self._arena, dtype=np.uint8).ctypes.data
        self._streams = [self._runtime.stream(urgent=True) for _ in range(2)]
        self._beside = [self._runtime.device_bytes(ARENA_BYTES // 2) for _ in range(2)]
        self._stores: list[PageCopy] = []
        self._loads: list[PageCopy] = []

    async def map(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Map a cache in place of the one before, and seal pages for loads."""
        if self._cache is not None:
            await self._cache.close()
        layers, kv_heads, head_dim, latent_dim = command["geometry"]
        spec = KeyspaceSpec(
            model_id="bench",
            model_revision="1",
            groups=(KvGroup(layers, kv_heads, head_dim, latent_dim=latent_dim),),
            dtype=Dtype.BF16,
            codec=Codec[command["codec"]],
            chunk_tokens=CHUNK_TOKENS,
        )
        preset = getattr(layout_presets, f"{command['layout']}_layout")
        layout = preset(spec, range(layers), range(*command["heads"]), command["block_tokens"], command["block_count"])
        layout.validate(spec)
        handles = [
            MappedHandle(size_bytes=size, ipc=IpcMemory(uuid, bytes.fromhex(handle), offset, allocation))
            for uuid, handle, offset, allocation, size in command["handles"]
        ]
        grid = ShardGrid.of(spec)
        cache = await self._device.map_cache(spec, grid, layout, handles, [])
        assert isinstance(cache, GpuCache)
        self._cache = cache
        shards = [
            shard
            for shard in range(grid.shard_count)
            if grid.bitmap_for(layout.layer_range, layout.head_range) >> shard & 1
        ]
        sizes = [ShardPayload.of(spec, grid, shard).slot_bytes for shard in shards]
        blocks = np.random.default_rng(5).permutation(command["block_count"]).astype(np.int64)
        blocks = blocks[: blocks.size // (CHUNK_TOKENS // layout.block_tokens) * (CHUNK_TOKENS // layout.block_tokens)]
        chunks = blocks.reshape(-1, CHUNK_TOKENS // layout.block_tokens)
        half = len(chunks) // 2
        self._stores = self._copies(chunks[:half], shards, sizes, 0)
        self._loads = self._copies(chunks[half:], shards, sizes, ARENA_BYTES)
        await cache.gather(self._loads, lambda: False)
        row_elements = latent_dim or 2 * head_dim
        logical = layers * row_elements * (1 if latent_dim else len(range(*command["heads"]))) * CHUNK_TOKENS * 2
        return {
            "pages": len(self._stores),
            "page_bytes": sizes[0],
            "logical_ratio": logical / sum(ShardPayload.of(spec, grid, shard).payload_bytes for shard in shards),
            "ways": [way.value for way in cache.store.chooser.ways],
        }

    def _copies(self, chunks: Any, shards: Sequence[int], sizes: Sequence[int], offset: int) -> list[PageCopy]:
        copies: list[PageCopy] = []
        end = offset + ARENA_BYTES
        for number, blocks in enumerate(chunks):
            for shard, size in zip(shards, sizes, strict=True):
                if offset + size > end:
                    return copies
                key = PageKey(b"bench-----------", number.to_bytes(16, "big"), shard)
                copies.append(PageCopy(key=key, page=self._view[offset : offset + size], block_ids=blocks))
                offset += size
        return copies

    def way(self, name: str | None) -> dict[str, Any]:
        """Hold both directions to one way; None: as before."""
        assert self._cache is not None
        for direction in (self._cache.store, self._cache.load):
            direction.chooser.pin(None if name is None else Way(name))
        return {}

    async def run(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Move for some seconds."""
        what, size_bytes, in_flight = command["what"], command["size_bytes"], command["in_flight"]
        jobs = {
            "store": [self._store],
            "load": [self._load],
            "both": [self._store, self._load],
            "copy-out": [self._copy_out],
            "copy-in": [self._copy_in],
            "copy-both": [self._copy_out, self._copy_in],
        }[what]
        if what.startswith("copy"):
            return await asyncio.to_thread(self._plain, jobs, size_bytes, in_flight, command["seconds"])
        results = await asyncio.gather(*(self._repeat(job, size_bytes, in_flight, command["seconds"]) for job in jobs))
        return _joined(results)

    async def _repeat(
        self, job: Callable[[int, int], Awaitable[int]], size_bytes: int, in_flight: int, seconds: float
    ) -> tuple[int, float, list[float]]:
        for _ in range(2):
            await job(0, size_bytes)
        moved, durations = 0, list[float]()
        started_s = time.perf_counter()
        numbers = iter(range(1 << 30))

        async def one() -> None:
            nonlocal moved
            while time.perf_counter() - started_s < seconds:
                begun_s = time.perf_counter()
                size = await job(next(numbers), size_bytes)  # not `moved += await`: that would read `moved` too early
                moved += size
                durations.append(time.perf_counter() - begun_s)

        await asyncio.gather(*(one() for _ in range(in_flight)))
        return moved, time.perf_counter() - started_s, durations

    async def _store(self, number: int, size_bytes: int) -> int:
        assert self._cache is not None
        copies = _slice(self._stores, number, size_bytes)
        if not await self._cache.gather(copies, lambda: False):
            raise RuntimeError("a gather stopped")
        return sum(len(copy.page) for copy in copies)

    async def _load(self, number: int, size_bytes: int) -> int:
        assert self._cache is not None
        copies = _slice(self._loads, number, size_bytes)
        faults = [fault for fault in await self._cache.scatter(copies) if fault is not None]
        if faults:
            raise RuntimeError(f"pages failed: {faults[0]}")
        return sum(len(copy.page) for copy in copies)

    def _plain(self, jobs: Sequence[Any], size_bytes: int, in_flight: int, seconds: float) -> dict[str, Any]:
        self._runtime.attach()
        moved, durations = 0, list[float]()
        for job in jobs:
            job(size_bytes)
        for stream in self._streams:
            stream.synchronize()
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < seconds:
            begun_s = time.perf_counter()
            for _ in range(in_flight):
                for job in jobs:
                    moved += job(size_bytes)
            for stream in self._streams:
                stream.synchronize()
            durations.append((time.perf_counter() - begun_s) / in_flight)
        return _joined([(moved, time.perf_counter() - started_s, durations)])

    def _copy_out(self, size_bytes: int) -> int:
        self._runtime.driver.copy(self._address, self._beside[0].data_ptr(), size_bytes, self._streams[0].address)
        return size_bytes

    def _copy_in(self, size_bytes: int) -> int:
        source = self._address + ARENA_BYTES
        self._runtime.driver.copy(self._beside[1].data_ptr(), source, size_bytes, self._streams[1].address)
        return size_bytes


def _slice(copies: Sequence[PageCopy], number: int, size_bytes: int) -> list[PageCopy]:
    """So many bytes of pages, others for each number."""
    count = max(1, round(size_bytes / len(copies[0].page)))
    parts = max(1, len(copies) // count)
    return list(copies[number % parts * count :][:count])


def _joined(results: Sequence[tuple[int, float, list[float]]]) -> dict[str, Any]:
    durations = sorted(duration for result in results for duration in result[2])
    return {
        "bytes_per_s": sum(moved / seconds for moved, seconds, _ in results),
        "p50_s": durations[len(durations) // 2],
        "transfers": len(durations),
    }


async def main() -> None:
    """Serve commands until the input ends."""
    measurement = Measurement(int(os.environ.get("SCRATCH_BYTES", 256 << 20)), 4)
    print(json.dumps({"device": measurement._runtime.name}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if command["op"] == "map":
            answer = await measurement.map(command)
        elif command["op"] == "way":
            answer = measurement.way(command["way"])
        else:
            answer = await measurement.run(command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
