"""Stores and loads of one small rank on the fakes: chunk n lies in blocks 4n to 4n + 3."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry

from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import GROUP_CHUNKS, ROOT_HASH, ChunkRange
from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import HEADER_BYTES, PageKey, page_bytes, seal
from kvpool.core.payload import payload_bytes
from kvpool_gpuagent.core.requests import ChunkSource, LoadOutcome, Rank, StoreOutcome
from kvpool_gpuagent.core.sources import CopiedBytes
from kvpool_gpuagent.engine.loading import LoadRun
from kvpool_gpuagent.engine.storing import StoreRun
from kvpool_gpuagent.metrics import AgentMetrics
from tests.fixtures.agent_fakes import Faults, MemoryCache, MemoryCluster, MemoryPool
from tests.fixtures.layout_presets import contiguous_layout

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(4, 4, 8),), dtype=Dtype.BF16, chunk_tokens=32)
GRID = ShardGrid(layers=4, kv_heads=4, layer_groups=2, splits=(2,))
SHARDS = range(4)
LAYOUT = contiguous_layout(SPEC, range(4), range(4), 8, 400)
RANK = Rank(spec=SPEC, grid=GRID, layout=LAYOUT, shards=0b1111, keyspace=b"k" * 16)


def chunk_hash(number: int) -> bytes:
    """Never zero; its first byte is the number."""
    return bytes([number, *b"c" * 15])


def span(numbers: Sequence[int], *, skip_tokens: int = 0) -> ChunkRange:
    """Consecutive chunks of one chain; skip_tokens: of the first one."""
    first = numbers[0]
    heads = sorted({number // GROUP_CHUNKS * GROUP_CHUNKS for number in numbers})
    return ChunkRange(
        chunk_hashes=b"".join(chunk_hash(number) for number in numbers),
        block_ids=np.array([range(4 * number, 4 * number + 4) for number in numbers], dtype=np.int64),
        first_chunk_index=first,
        parent_hash=chunk_hash(first - 1) if first else ROOT_HASH,
        group_head_hashes=tuple(chunk_hash(head) for head in heads),
        chain_head_hash=chunk_hash(0),
        skip_tokens=skip_tokens,
    )


def key(number: int, shard: int) -> PageKey:
    return PageKey(RANK.keyspace, chunk_hash(number), shard)


def blocks(number: int) -> bytes:
    """Where a chunk lies, as the cache names it."""
    return MemoryCache.blocks(np.arange(4 * number, 4 * number + 4))


def content(number: int, shard: int) -> bytes:
    """What the engine computed for a page."""
    return f"kv {number} {shard}".encode()


def true_page(number: int, shard: int, grid: ShardGrid = GRID) -> bytes:
    size_bytes = payload_bytes(SPEC, grid, shard)
    page = bytearray(page_bytes(size_bytes))
    page[HEADER_BYTES : HEADER_BYTES + size_bytes] = content(number, shard).ljust(size_bytes, b".")
    seal(page, key(number, shard), Codec.RAW, size_bytes)
    return bytes(page)


@dataclass
class Bench:
    """One rank's pool and cache, and runs on them."""

    faults: Faults = field(default_factory=Faults)
    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    window_pages: int = 16
    grid: ShardGrid = GRID
    stop: CancelToken = field(default_factory=CancelToken)

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = AgentMetrics(self.registry)
        self.copied = CopiedBytes()
        self.pool = MemoryPool(self.cluster, SPEC, grid=self.grid, window_pages=self.window_pages, faults=self.faults)
        self.cache = MemoryCache(lambda shard: payload_bytes(SPEC, self.grid, shard), faults=self.faults)
        self.copied_out: list[int] = []
        self.progress: list[tuple[int, list[int]]] = []
        self.still_valid: Callable[[int], bool] = lambda chunk_count: True

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kvpool_gpuagent_{name}", labels) or 0.0

    def compute(self, numbers: Sequence[int]) -> None:
        """Have the KV of chunks in the engine's blocks."""
        for number in numbers:
            for shard in SHARDS:
                self.cache.kv[(blocks(number), shard)] = content(number, shard)

    def offer(self, numbers: Sequence[int], shards: Iterable[int] = SHARDS) -> None:
        """Have pages of chunks in the cluster."""
        shards = list(shards)
        for number in numbers:
            for shard in shards:
                self.cluster.pages[key(number, shard)] = true_page(number, shard, self.grid)

    def loaded(self, number: int, shards: Iterable[int] = SHARDS) -> bool:
        """Whether these pages of a chunk are in its blocks."""
        return all(self.cache.kv.get((blocks(number), shard)) == content(number, shard) for shard in shards)

    async def passed(self, wait_s: float | None) -> None:
        """The engine's work has ended, unless a test says otherwise."""
        await self.faults.step("event")

    async def ask_still_valid(self, chunk_count: int) -> bool:
        self.copied_out.append(chunk_count)
        await self.faults.step("still_valid")
        return self.still_valid(chunk_count)

    async def store(self, numbers: Sequence[int], rank: Rank = RANK) -> StoreOutcome:
        run = StoreRun(rank, span(numbers), self.pool, self.cache, self.metrics)
        return await run.run(self.ask_still_valid, self.stop, self.passed)

    async def load(
        self,
        numbers: Sequence[int],
        *,
        rank: Rank = RANK,
        wait_s: float = 10.0,
        skip_tokens: int = 0,
        sources: Sequence[ChunkSource] | None = None,
        by_layer: bool = False,
    ) -> LoadOutcome:
        run = LoadRun(
            rank,
            span(numbers, skip_tokens=skip_tokens),
            sources or [((), rank.shards)] * len(numbers),
            self.pool,
            self.cache,
            self.metrics,
            self.copied,
            by_layer=by_layer,
        )

        def report(layers: int, failed: Sequence[int]) -> None:
            self.progress.append((layers, list(failed)))
            stop = rank.layout.first_layer + layers
            for position, number in enumerate(numbers):
                readable = shards_in(sources[position][1] if sources else rank.shards)
                shards = [shard for shard in readable if self.grid.layers_of(shard).stop <= stop]
                assert position in failed or self.loaded(number, shards), "reported before it was in"

        return await run.run(report, self.stop, asyncio.get_running_loop().time() + wait_s, self.passed)

    def nothing_is_out(self) -> None:
        assert self.pool.slots_out == 0
        assert self.cache.running == 0
        assert not self.cluster.writing
        assert self.pool.untouched()
