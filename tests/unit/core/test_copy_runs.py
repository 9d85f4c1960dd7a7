from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.errors import InvalidRequest, NotServed
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from kvpool.core.payload import ShardPayload
from kvpool.core.plane_table import PlaneTable
from kvpool.core.reference import gather_payload_reference, scatter_payload_reference
from kvpool_gpuagent.core.copy_runs import Runs, RunTable
from tests.fixtures.layout_presets import (
    block_scales_layout,
    contiguous_layout,
    mla_per_layer_layout,
    vllm_bhlnc_layout,
    vllm_blhnc_layout,
    vllm_cpu_opaque_layout,
    vllm_lbhnc_layout,
    vllm_lbnhc_layout,
    vllm_nhd_layout,
)
from tests.unit.core.random_layouts import noise_of, random_layouts, small_grids, small_specs
from tests.unit.core.strategies import head_borders, split_at
from tests.unit.core.test_plane_table import rank_of

Bytes = npt.NDArray[np.uint8]


class FakeMemory:
    """Handles back to back in one address space: joining runs over their borders would go unnoticed by address."""

    def __init__(self, layout: EngineLayout, noise: np.random.Generator) -> None:
        self.handles = noise_of(layout, noise)
        self.bases = [4096]
        for handle in self.handles:
            self.bases.append(self.bases[-1] + handle.size)

    def view(self, address: int, size_bytes: int) -> Bytes:
        """Of memory that must lie in one handle."""
        number = int(np.searchsorted(self.bases, address, side="right")) - 1
        first = address - self.bases[number]
        assert number >= 0 and first + size_bytes <= self.handles[number].size
        return self.handles[number][first : first + size_bytes]


def page_runs(runs: Runs, page: int) -> list[tuple[int, int, int]]:
    chosen = runs.pages == page
    columns = (column[chosen].tolist() for column in (runs.addresses, runs.payload_offsets, runs.sizes_bytes))
    return list(zip(*columns, strict=True))


def some_blocks(layout: EngineLayout, spec: KeyspaceSpec, noise: np.random.Generator) -> npt.NDArray[np.int64]:
    """In random order, with neighbours here and there."""
    count = spec.chunk_tokens // layout.block_tokens
    if noise.integers(2):
        return noise.permutation(layout.block_count)[:count].astype(np.int64)
    return np.roll(np.arange(layout.block_count, dtype=np.int64), -int(noise.integers(layout.block_count)))[:count]


@settings(max_examples=100)
@given(st.data())
@pytest.mark.slow
def test_replayed_runs_are_the_gather_and_the_scatter(data: st.DataObject) -> None:
    """Of pages of any split, for a rank with any heads."""
    spec = data.draw(small_specs())
    grid = data.draw(small_grids(spec))
    heads = data.draw(st.sampled_from(split_at(data.draw, head_borders(grid))))
    layout = rank_of(data.draw(random_layouts(spec)), heads)
    noise = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    memory = FakeMemory(layout, noise)
    expected = [handle.copy() for handle in memory.handles]
    table = PlaneTable.of(spec, grid, layout, memory.bases[:-1])
    step = spec.opaque.block_tokens if spec.opaque else 1
    shards = noise.permutation([*table.shards, *table.shards]).astype(np.uint8)
    block_ids = np.stack([some_blocks(layout, spec, noise) for _ in shards])
    skips = noise.integers(0, spec.chunk_tokens // step + 1, len(shards)) * step
    skips[::2] = 0
    run_table = RunTable.of(table)
    runs = run_table.runs(shards, block_ids, skips)
    assert np.array_equal(runs.pages, np.sort(runs.pages))
    for page, shard in enumerate(shards.tolist()):
        payload = noise.integers(0, 256, ShardPayload.of(spec, grid, shard).payload_bytes, dtype=np.uint8)
        gathered, count = payload.copy(), np.zeros(payload.size, dtype=np.int8)
        for address, offset, size_bytes in page_runs(runs, page):
            assert size_bytes >= run_table.run_bytes(shard) or skips[page]
            gathered[offset : offset + size_bytes] = memory.view(address, size_bytes)
            count[offset : offset + size_bytes] += 1
        assert count.max(initial=0) <= 1
        if table.shards[shard].heads == grid.heads_of(shard) and not skips[page]:
            assert count.min() == 1
            wanted = gather_payload_reference(spec, grid, shard, layout, memory.handles, block_ids[page])
            assert np.array_equal(gathered, wanted)
        for address, offset, size_bytes in page_runs(runs, page):
            memory.view(address, size_bytes)[:] = payload[offset : offset + size_bytes]
        scatter_payload_reference(spec, grid, shard, layout, expected, block_ids[page], payload, int(skips[page]))
        for handle, wanted in zip(memory.handles, expected, strict=True):
            assert np.array_equal(handle, wanted)


LLAMA_8B = KeyspaceSpec("m", "r", (KvGroup(32, 8, 128),), Dtype.BF16)
GRID_8B = ShardGrid.of(LLAMA_8B)
KIB = 1 << 10


@pytest.mark.parametrize(
    "preset, block_tokens, heads, split, run_bytes, count",
    [
        # Whole pages of the rank: 8 layers of all heads, in blocks of 16 tokens of 8 KiB a layer and head.
        (vllm_blhnc_layout, 16, range(8), 1, 512 * KIB, 16),
        (vllm_lbhnc_layout, 16, range(8), 1, 64 * KIB, 128),
        (vllm_bhlnc_layout, 16, range(8), 1, 8 * KIB, 1024),
        (vllm_lbnhc_layout, 16, range(8), 1, 512, 16384),
        (vllm_nhd_layout, 16, range(8), 1, 256, 32768),
        # TP 2: its own pages, pages of all heads in part, pages of two heads, of one.
        (vllm_blhnc_layout, 16, range(4, 8), 2, 256 * KIB, 16),
        (vllm_blhnc_layout, 16, range(4, 8), 1, 32 * KIB, 128),
        (vllm_blhnc_layout, 16, range(4, 8), 4, 16 * KIB, 128),
        (vllm_blhnc_layout, 16, range(4, 8), 8, 8 * KIB, 128),
        # TP 8, the only rank with runs of BHLNC: one head over all layers.
        (vllm_bhlnc_layout, 16, range(3, 4), 8, 64 * KIB, 16),
        (vllm_bhlnc_layout, 16, range(8), 8, 64 * KIB, 16),
        # Other blocks than those of a payload.
        (vllm_blhnc_layout, 8, range(8), 1, 4 * KIB, 2048),
        (vllm_blhnc_layout, 32, range(8), 1, 8 * KIB, 1024),
        (vllm_blhnc_layout, 128, range(8), 1, 8 * KIB, 1024),
        (vllm_lbhnc_layout, 64, range(3, 4), 8, 8 * KIB, 128),
    ],
)
def test_known_run_lengths(
    preset: Callable[..., EngineLayout], block_tokens: int, heads: range, split: int, run_bytes: int, count: int
) -> None:
    layout = preset(LLAMA_8B, range(32), heads, block_tokens, 4096 // block_tokens)
    layout.validate(LLAMA_8B)
    table = PlaneTable.of(LLAMA_8B, GRID_8B, layout, [index << 40 for index in range(len(layout.handle_sizes))])
    runs = RunTable.of(table)
    shard = next(shard for shard in table.shards if GRID_8B.kv_heads // len(GRID_8B.heads_of(shard)) == split)
    assert runs.run_bytes(shard) == run_bytes
    blocks = np.random.default_rng(1).permutation(layout.block_count)[np.newaxis, : 256 // block_tokens]
    found = runs.runs(np.array([shard]), blocks, np.array([0]))
    assert (len(found.sizes_bytes), set(found.sizes_bytes.tolist())) == (count, {run_bytes})


def test_known_run_lengths_of_latents_and_cells() -> None:
    latents = KeyspaceSpec("m", "r", (KvGroup.mla(61, 576),), Dtype.BF16)
    layout = mla_per_layer_layout(latents, range(61), range(1), 64, 8)
    table = PlaneTable.of(latents, ShardGrid.of(latents), layout, [index << 40 for index in range(61)])
    assert RunTable.of(table).run_bytes(3) == 16 * 1152
    opaque = OpaqueLayout("vllm-cpu", "amx", "", 64, 1000)
    cells = KeyspaceSpec("m", "r", (KvGroup(2, 2, 64),), Dtype.BF16, payload=PayloadKind.OPAQUE, opaque=opaque)
    layout = vllm_cpu_opaque_layout(cells, range(2), range(2), 64, 8)
    assert RunTable.of(PlaneTable.of(cells, ShardGrid(2, 2, 1, (1,)), layout, [0, 1 << 40])).run_bytes(0) == 2000


LLAMA = KeyspaceSpec("m", "r", (KvGroup(2, 4, 8),), Dtype.BF16, chunk_tokens=32)
WHOLE, BY_HEAD = ShardGrid(2, 4, 1, (1,)), ShardGrid(2, 4, 1, (4,))
HEADS = range(4)


def runs_of(table: PlaneTable, shard: int, block_ids: list[int], skip_tokens: int = 0) -> list[tuple[int, int, int]]:
    """Of one page."""
    ids = np.array([block_ids], dtype=np.int64)
    return page_runs(RunTable.of(table).runs(np.array([shard]), ids, np.array([skip_tokens])), 0)


def test_skipped_tokens_cut_the_first_block_that_is_left() -> None:
    layout = vllm_blhnc_layout(LLAMA, range(2), HEADS, 16, 8)
    table = PlaneTable.of(LLAMA, WHOLE, layout, [1 << 40])
    token, block = 2 * 16, 2 * 4 * 16 * 2 * 16
    cells = [cell * 16 * token for cell in range(8)]  # of layers and heads
    whole = ((1 << 40) + 2 * block, block, block)
    assert runs_of(table, 0, [5, 2], 13) == [
        *(((1 << 40) + 5 * block + cell + 13 * token, cell + 13 * token, 3 * token) for cell in cells),
        whole,
    ]
    assert runs_of(table, 0, [5, 2], 16) == [whole]
    assert runs_of(table, 0, [5, 2], 32) == []


def test_pages_come_in_order_whatever_their_shards() -> None:
    layout = vllm_blhnc_layout(LLAMA, range(2), HEADS, 16, 8)
    table = RunTable.of(PlaneTable.of(LLAMA, ShardGrid(2, 4, 2, (1, 2)), layout, [0]))
    shards, ids = np.array([3, 0, 4, 0], dtype=np.uint8), np.array([[0, 1], [2, 3], [4, 5], [6, 7]])
    runs = table.runs(shards, ids, np.array([0, 16, 0, 0]))
    assert runs.pages.tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert (runs.addresses // (4 * KIB)).tolist() == [0, 1, 3, 4, 5, 6, 7]
    none = table.runs(shards[:0], ids[:0], shards[:0])
    assert none.pages.size == none.addresses.size == none.sizes_bytes.size == none.payload_offsets.size == 0


def test_runs_end_at_the_border_of_a_handle() -> None:
    """Layers in allocations of their own that happen to be adjacent."""
    layout = vllm_lbhnc_layout(LLAMA, range(2), HEADS, 16, 2)
    table = PlaneTable.of(LLAMA, WHOLE, layout, [64, 64 + layout.handle_sizes[0]])
    assert RunTable.of(table).run_bytes(0) == 4 * 16 * 2 * 16
    one = replace(layout, block_count=1, handle_sizes=(layout.handle_sizes[0] // 2,) * 2)
    short = KeyspaceSpec("m", "r", (KvGroup(2, 4, 8),), Dtype.BF16, chunk_tokens=16)
    adjacent = PlaneTable.of(short, WHOLE, one, [64, 64 + one.handle_sizes[0]])
    assert RunTable.of(adjacent).run_bytes(0) == 4 * 16 * 2 * 16


def test_blocks_that_lie_at_other_distances_are_not_joined() -> None:
    """Two layers that touch in block 0 alone."""
    spec = KeyspaceSpec("m", "r", (KvGroup.mla(2, 8),), Dtype.BF16, chunk_tokens=32)
    planes = [RowPlane(0, 0, 1024, 16, 0, 16), RowPlane(0, 256, 2048, 16, 0, 16)]
    layout = EngineLayout(16, 2, tuple(LayerLayout((plane,)) for plane in planes), 0, 0, 1, (4096,))
    table = PlaneTable.of(spec, ShardGrid(2, 1, 1, (1,)), layout, [0])
    assert runs_of(table, 0, [0, 1]) == [(0, 0, 256), (256, 256, 256), (1024, 512, 256), (2304, 768, 256)]


def test_runs_end_where_the_payload_has_a_gap() -> None:
    """Scales lie right behind the rows of their block, but in the payload behind the rows of all layers."""
    spec = KeyspaceSpec("m", "r", (KvGroup.mla(2, 8),), Dtype.BF16, Codec.FP8_E4M3, chunk_tokens=16)
    layout = block_scales_layout(spec, range(2), range(1), 16, 2)
    table = PlaneTable.of(spec, ShardGrid(2, 1, 1, (1,)), layout, [0, 4096])
    assert runs_of(table, 0, [1]) == [
        (192, 0, 128), (4096 + 192, 128, 128), (192 + 128, 256, 64), (4096 + 192 + 128, 320, 64),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "shards, block_ids, skips, words",
    [
        ([4], [[0, 1, 2, 3]], [0], r"shard 4 has no layer and head of the rank; these have: \[0, 1, 2, 3\]"),
        ([0], [[0]], [0], r"block_ids must be \(1, 4\) int64"),
        ([0], [[0, 1, 2, 4]], [0], r"block_ids must lie in \[0, 4\)"),
        ([0], [[-1, 0, 1, 2]], [0], r"block_ids must lie in \[0, 4\)"),
        ([0], [[0, 1, 2, 3]], [33], "skip_tokens 33"),
        ([0], [[0, 1, 2, 3]], [-1], "skip_tokens -1"),
        ([0], [[0, 1, 2, 3]], [], "skip_tokens must be 1"),
    ],
)
def test_bad_copies_are_refused(shards: list[int], block_ids: list[list[int]], skips: list[int], words: str) -> None:
    table = PlaneTable.of(LLAMA, BY_HEAD, vllm_nhd_layout(LLAMA, range(2), HEADS, 8, 4), [0, 0])
    runs = RunTable.of(table)
    ids = np.array(block_ids, dtype=np.int64)
    with pytest.raises(InvalidRequest, match=words):
        runs.runs(np.array(shards), ids, np.array(skips, dtype=np.int64))
    with pytest.raises(InvalidRequest, match=r"int64, got .* int32"):
        runs.runs(np.array([0]), np.zeros((1, 4), dtype=np.int32), np.array([0]))
    with pytest.raises(InvalidRequest, match="shard 9"):
        runs.run_bytes(9)


def test_a_codec_at_work_leaves_no_runs() -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 4, 8),), Dtype.BF16, Codec.FP8_E4M3, chunk_tokens=16)
    table = RunTable.of(PlaneTable.of(spec, WHOLE, contiguous_layout(spec, range(2), HEADS, 8, 4), [0]))
    assert table.run_bytes(0) == 0
    with pytest.raises(NotServed, match="FP8_E4M3"):
        table.runs(np.array([0]), np.array([[0, 1]]), np.array([0]))
