"""One rank's kernels over a burst of pages of several shards: what is written at one TP degree is read at another."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.plane_table import PlaneTable
from kvpool.core.reference import gather_payload_reference, scatter_payload_reference
from kvpool_gpuagent.kernels.cache_kernels import BurstPages, BurstTables, CacheKernels
from tests.fixtures.layout_presets import (
    lightllm_quantized_layout,
    mla_per_layer_layout,
    vllm_blhnc_layout,
    vllm_hnd_layout,
)
from tests.kernels.paged_caches import poisoned, random_bytes

CHUNK, BLOCK, BLOCKS = 32, 8, 40
GQA = KvGroup(5, 4, 16)
CASES = [
    pytest.param(KeyspaceSpec("m", "r", (GQA,), Dtype.BF16, chunk_tokens=CHUNK), vllm_blhnc_layout, id="blhnc"),
    pytest.param(KeyspaceSpec("m", "r", (GQA,), Dtype.BF16, chunk_tokens=CHUNK), vllm_hnd_layout, id="hnd"),
    pytest.param(
        KeyspaceSpec("m", "r", (GQA,), Dtype.BF16, Codec.INT8_GROUP8, CHUNK), lightllm_quantized_layout, id="own scales"
    ),
    pytest.param(KeyspaceSpec("m", "r", (GQA,), Dtype.BF16, Codec.INT8_GROUP8, CHUNK), vllm_blhnc_layout, id="int8"),
    pytest.param(
        KeyspaceSpec("m", "r", (KvGroup.mla(5, 24),), Dtype.BF16, chunk_tokens=CHUNK), mla_per_layer_layout, id="mla"
    ),
]


class Rank:
    """A rank's cache, and bursts through its kernels."""

    def __init__(
        self,
        spec: KeyspaceSpec,
        grid: ShardGrid,
        layout: EngineLayout,
        fill: Callable[[tuple[int, ...], str], Tensor],
        device: str,
    ) -> None:
        self.layout, self.device = layout, device
        self.memory = [fill((size,), device) for size in layout.handle_sizes]
        self.table = PlaneTable.of(spec, grid, layout, [part.data_ptr() for part in self.memory])
        self.kernels = CacheKernels(self.table, lambda planes: torch.from_numpy(planes.copy()).to(device))
        pin = device != "cpu"
        self.tables = BurstTables(lambda count: torch.zeros(count, dtype=torch.int64, pin_memory=pin))

    def bytes(self) -> list[npt.NDArray[np.uint8]]:
        return [part.cpu().numpy().copy() for part in self.memory]

    def fill(self, shards: list[int], payloads: list[Tensor], ids: npt.NDArray[np.int64], skips: list[int]) -> None:
        addresses = np.array([payload.data_ptr() for payload in payloads], dtype=np.int64)
        present = [True] * (len(shards) - 1) + [False]
        self.tables.fill(self.table, BurstPages(shards, ids, skips, addresses, present))


@pytest.mark.parametrize(("spec", "preset"), CASES)
@pytest.mark.parametrize(("writer_tp", "reader_tp"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_any_rank_reads_what_any_other_wrote(
    spec: KeyspaceSpec, preset: Callable[..., EngineLayout], writer_tp: int, reader_tp: int, device: str
) -> None:
    layers, heads = spec.group.layers, spec.group.kv_heads
    grid = ShardGrid(layers, heads, 2, (1, 2, 4) if heads == 4 else (1,))
    ids = np.stack([np.random.default_rng(seed).permutation(BLOCKS)[: CHUNK // BLOCK] for seed in range(20)])
    pages: dict[int, Tensor] = {}
    for part in range(min(writer_tp, heads)):
        own = range(part * heads // writer_tp, (part + 1) * heads // writer_tp) if heads > 1 else range(1)
        writer = Rank(spec, grid, preset(spec, range(layers), own, BLOCK, BLOCKS), random_bytes, device)
        shards = [*shards_in(grid.bitmap_for(range(layers), own))]
        payloads = [poisoned((writer.table.of_shard(shard).payload_bytes,), device) for shard in [*shards, shards[0]]]
        writer.fill([*shards, shards[0]], payloads, ids[: len(shards) + 1], [0] * (len(shards) + 1))
        writer.kernels.gather(writer.tables)
        for shard, payload, blocks in zip(shards, payloads, ids, strict=False):
            expected = gather_payload_reference(spec, grid, shard, writer.layout, writer.bytes(), blocks)
            assert np.array_equal(payload.cpu().numpy(), expected)
            pages[shard] = payload
        assert bool((payloads[-1] == 0xA5).all())  # left out
    for part in range(min(reader_tp, heads)):
        own = range(part * heads // reader_tp, (part + 1) * heads // reader_tp) if heads > 1 else range(1)
        reader = Rank(spec, grid, preset(spec, range(layers), own, BLOCK, BLOCKS), poisoned, device)
        wanted = grid.bitmap_for(range(layers), own)
        shards = [*shards_in(grid.readable(sum(1 << shard for shard in pages), wanted))]
        skips = [0, 11, *([0] * (len(shards) - 1))]
        blocks = np.random.default_rng(30).permutation(BLOCKS)[: CHUNK // BLOCK]  # all pages of one chunk
        after = reader.bytes()
        for shard, skip in zip(shards, skips, strict=False):
            written = pages[shard].cpu().numpy()
            scatter_payload_reference(spec, grid, shard, reader.layout, after, blocks, written, skip)
        all_shards = [*shards, shards[0]]
        burst = [pages[shard] for shard in all_shards]
        reader.fill(all_shards, burst, np.stack([blocks] * len(all_shards)), skips)
        reader.kernels.scatter(reader.tables)
        assert all(np.array_equal(ours, its) for ours, its in zip(reader.bytes(), after, strict=True))
