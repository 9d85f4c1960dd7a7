"""An engine rank that stores and loads real pages through a real agent."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.rig.machine import Bytes, random_bytes
from kvpool.client.config import ClientConfig
from kvpool.client.engine_items import StoreResult, TierTokens
from kvpool.client.engine_registration import EngineRegistration
from kvpool.client.hashing import Prompt
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.client.sync import Pool
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.core.payload import chunk_bytes
from kvpool_cli.errors import CommandFailed
from tests.fixtures.layout_presets import contiguous_layout

# An 8B Llama shape in bf16, on a rank of TP 4: two KV heads, all layers. Four pages of 2 MiB a chunk.
SPEC = KeyspaceSpec(
    model_id="kvpool-bench", model_revision="1", groups=(KvGroup(32, 8, 128),), dtype=Dtype.BF16, chunk_tokens=256
)
KEYSPACE_NAME = "kvpool-bench"
GRID = ShardGrid.of(SPEC)
LAYERS = range(SPEC.group.layers)
HEADS = range(2)
SHARDS = GRID.bitmap_for(LAYERS, HEADS)  # the rank's: all of one size
FIRST_SHARD = next(shards_in(SHARDS))
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """block_tokens 256 with blocks in order is a contiguous tensor."""

    block_tokens: int
    scattered: bool  # block ids in random order


CONTIGUOUS = EngineShape(block_tokens=256, scattered=False)
BLOCKS_OF_16 = EngineShape(block_tokens=16, scattered=True)


class BenchEngine:
    """One rank; its cache holds exactly one prompt of chunk_count chunks."""

    def __init__(self, endpoint: str, shape: EngineShape, chunk_count: int) -> None:
        """Register with the agent. Raises KvPoolError."""
        block_count = chunk_count * SPEC.chunk_tokens // shape.block_tokens
        layout = contiguous_layout(SPEC, LAYERS, HEADS, shape.block_tokens, block_count)
        self.chunk_count = chunk_count
        self.size_bytes = chunk_count * chunk_bytes(SPEC, GRID, SHARDS)
        self._region = SharedMemoryRegion(layout.handle_sizes[0])
        self._blocks: npt.NDArray[np.int64] = np.arange(block_count, dtype=np.int64)
        if shape.scattered:
            self._blocks = np.random.default_rng(5).permutation(self._blocks)
        self._cache: Bytes | None = np.frombuffer(self._region.buffer, dtype=np.uint8)
        # [layer and plane, block, bytes of a block]: to compare the first blocks of a prompt.
        self._planes = 2 * len(LAYERS)
        plan = EngineRegistration(
            endpoint=endpoint,
            engine_name="bench",
            keyspace_name=KEYSPACE_NAME,
            spec=SPEC,
            layout=layout,
            regions=(self._region,),
        )
        self._pool = Pool(plan, ClientConfig(store_timeout_s=_TIMEOUT_S, load_timeout_s=_TIMEOUT_S))

    @property
    def cache(self) -> Bytes:
        """The rank's cache as bytes."""
        assert self._cache is not None, "the engine is closed"
        return self._cache

    def fill(self, seed: int) -> None:
        """Have other KV in the cache."""
        self.cache[:] = random_bytes(self.cache.nbytes, seed)

    def in_prompt_order(self) -> Bytes:
        """The prompt's KV as [layer and plane, prompt bytes]: equal for equal prompts, whatever the blocks."""
        blocks = self.cache.reshape(self._planes, self._blocks.shape[0], -1)
        return blocks[:, self._blocks].reshape(self._planes, -1)

    def chain(self, seed: int) -> Prompt:
        """The hashes of a prompt of chunk_count chunks."""
        tokens = np.random.default_rng(seed).integers(0, 1 << 31, self.chunk_count * SPEC.chunk_tokens, dtype=np.uint32)
        return self._pool.prompt(tokens)

    def put_rate(self, chain: Prompt) -> float:
        """GB/s of a store until its pages are visible. Raises CommandFailed unless all were stored."""
        started_s = time.perf_counter()
        handle = self._pool.store(chain, self._blocks, first_chunk=0, end_chunk=self.chunk_count)
        report = handle.result(_TIMEOUT_S)
        duration_s = time.perf_counter() - started_s
        if report.stored_chunks != self.chunk_count:
            raise CommandFailed(
                f"{report.stored_chunks} of {self.chunk_count} chunks were stored: {_first_cause(report)}"
            )
        return self.size_bytes / duration_s / 1e9

    def get_rate(self, chain: Prompt) -> tuple[float, TierTokens]:
        """GB/s of a load until its bytes are in the cache. Raises CommandFailed unless all came."""
        started_s = time.perf_counter()
        report = self._pool.load(chain, self._blocks, first_chunk=0, end_chunk=self.chunk_count, timeout_s=_TIMEOUT_S)
        duration_s = time.perf_counter() - started_s
        if report.loaded_chunks != self.chunk_count:
            raise CommandFailed(f"{report.loaded_chunks} of {self.chunk_count} chunks were loaded: {report.error}")
        return self.size_bytes / duration_s / 1e9, report.tokens

    def close(self) -> None:
        """End the session."""
        self._pool.close()
        self._cache = None
        self._region.close()


def _first_cause(report: StoreResult) -> str:
    return str(next(iter(report.failed_chunks.values()), "the others were there already"))
