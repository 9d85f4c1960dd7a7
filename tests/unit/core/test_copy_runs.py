from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.copy_runs import Runs, run_bytes_of, runs_of, runs_of_pages
from kvpool.core.errors import InvalidRequest, NotServed
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from kvpool.core.layout_presets import (
    block_scales_layout,
    contiguous_layout,
    mla_layout,
    vllm_hnd_layout,
    vllm_nhd_layout,
)
from kvpool.core.payload import ShardPayload
from kvpool.core.plane_table import PlaneTable
from kvpool.core.reference import gather_payload_reference, scatter_payload_reference
from tests.unit.core.random_layouts import noise_of, random_layouts, small_grids, small_specs

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


@settings(max_examples=80)
@given(st.data())
def test_replayed_runs_are_the_gather(data: st.DataObject) -> None:
    spec = data.draw(small_specs())
    grid, layout = data.draw(small_grids(spec)), data.draw(random_layouts(spec))
    layout.validate(spec)
    noise = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    memory = FakeMemory(layout, noise)
    table = PlaneTable.of(spec, grid, layout, memory.bases[:-1])
    shards = [*noise.permutation(grid.shard_count).tolist(), 0]
    block_ids = np.stack([some_blocks(layout, spec, noise) for _ in shards])
    runs = runs_of_pages(table, shards, block_ids, [0] * len(shards))
    assert np.array_equal(runs.pages, np.sort(runs.pages))
    for page, shard in enumerate(shards):
        payload = noise.integers(0, 256, ShardPayload.of(spec, grid, shard).payload_bytes, dtype=np.uint8)
        filled = 0
        for address, offset, size_bytes in page_runs(runs, page):
            assert offset == filled  # in order, no byte twice
            assert size_bytes >= run_bytes_of(table, shard)
            payload[offset : offset + size_bytes] = memory.view(address, size_bytes)
            filled += size_bytes
        assert filled == payload.size
        expected = gather_payload_reference(spec, grid, shard, layout, memory.handles, block_ids[page])
        assert np.array_equal(payload, expected)


@settings(max_examples=80)
@given(st.data())
def test_replayed_runs_are_the_scatter_of_any_layers_and_tokens(data: st.DataObject) -> None:
    spec = data.draw(small_specs())
    grid, layout = data.draw(small_grids(spec)), data.draw(random_layouts(spec))
    noise = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    memory = FakeMemory(layout, noise)
    expected = [handle.copy() for handle in memory.handles]
    table = PlaneTable.of(spec, grid, layout, memory.bases[:-1])
    edges = sorted(noise.integers(0, spec.group.layers + 1, 2).tolist())
    layers = range(*edges)
    step = spec.opaque.block_tokens if spec.opaque else 1
    shards = list(range(grid.shard_count))
    block_ids = np.stack([some_blocks(layout, spec, noise) for _ in shards])
    skips = [int(noise.integers(spec.chunk_tokens // step + 1)) * step for _ in shards]
    runs = runs_of_pages(table, shards, block_ids, skips, layers)
    for shard in shards:
        payload = noise.integers(0, 256, ShardPayload.of(spec, grid, shard).payload_bytes, dtype=np.uint8)
        for address, offset, size_bytes in page_runs(runs, shard):
            memory.view(address, size_bytes)[:] = payload[offset : offset + size_bytes]
        scatter_payload_reference(spec, grid, shard, layout, expected, block_ids[shard], payload, skips[shard], layers)
    for handle, wanted in zip(memory.handles, expected, strict=True):
        assert np.array_equal(handle, wanted)


LLAMA = KeyspaceSpec("m", "r", (KvGroup(2, 4, 8),), Dtype.BF16, chunk_tokens=16)
WHOLE, BY_HEAD = ShardGrid(2, 4, 1, 1), ShardGrid(2, 4, 1, 4)
HEADS = range(4)


@pytest.mark.parametrize(
    "layout, grid, run_bytes",
    [
        (vllm_nhd_layout(LLAMA, range(2), HEADS, 8, 4), WHOLE, 8 * 4 * 16),
        (vllm_nhd_layout(LLAMA, range(2), HEADS, 8, 4), BY_HEAD, 16),
        (vllm_hnd_layout(LLAMA, range(2), HEADS, 8, 4), WHOLE, 16),
        (vllm_hnd_layout(LLAMA, range(2), HEADS, 8, 4), BY_HEAD, 8 * 16),
    ],
)
def test_known_run_lengths(layout: EngineLayout, grid: ShardGrid, run_bytes: int) -> None:
    table = PlaneTable.of(LLAMA, grid, layout, [0] * 2)
    assert run_bytes_of(table, 0) == run_bytes
    assert set(runs_of(table, 0, np.array([3, 1])).sizes_bytes.tolist()) == {run_bytes}


def test_neighbours_become_one_run() -> None:
    layout = contiguous_layout(LLAMA, range(2), HEADS, 4, 8)
    table = PlaneTable.of(LLAMA, WHOLE, layout, [1 << 40])
    token = 4 * 16
    runs = runs_of(table, 0, np.array([1, 2, 3, 6]), skip_tokens=5, layers=range(1, 2))
    first = (1 << 40) + 2 * 32 * token  # K of layer 1
    payload = 2 * 16 * token
    assert page_runs(runs, 0) == [
        (first + 9 * token, payload + 5 * token, 7 * token),
        (first + 24 * token, payload + 12 * token, 4 * token),
        (first + 32 * token + 9 * token, payload + 21 * token, 7 * token),
        (first + 32 * token + 24 * token, payload + 28 * token, 4 * token),
    ]
    assert runs_of(table, 0, np.array([1, 2, 3, 6]), skip_tokens=16).sizes_bytes.size == 0


def test_a_whole_cache_is_one_run_but_never_over_the_border_of_a_handle() -> None:
    ids = np.arange(4)
    one = contiguous_layout(LLAMA, range(2), HEADS, 4, 4)
    assert runs_of(PlaneTable.of(LLAMA, WHOLE, one, [64]), 0, ids).sizes_bytes.tolist() == [4 * 16 * 64]
    two = vllm_nhd_layout(LLAMA, range(2), HEADS, 4, 4)
    adjacent = [64, 64 + two.handle_sizes[0]]
    assert runs_of(PlaneTable.of(LLAMA, WHOLE, two, adjacent), 0, ids).sizes_bytes.tolist() == [2 * 16 * 64] * 2


def test_runs_end_with_their_page() -> None:
    """Layer 2 ends the first page's copy where, in payload and cache, layer 1 begins the second page's."""
    spec = KeyspaceSpec("m", "r", (KvGroup.mla(4, 8),), Dtype.BF16, chunk_tokens=16)
    layout = mla_layout(spec, range(4), range(1), 16, 2)
    planes = [
        replace(layer.planes[0], offset_bytes=512 * place)
        for layer, place in zip(layout.layers, (0, 2, 1, 3), strict=True)
    ]
    layout = replace(layout, layers=tuple(LayerLayout((plane,)) for plane in planes))
    layout.validate(spec)
    table = PlaneTable.of(spec, ShardGrid(4, 1, 2, 1), layout, [0])
    runs = runs_of_pages(table, [1, 0], np.array([[1], [0]]), [0, 0], range(1, 3))
    assert (page_runs(runs, 0), page_runs(runs, 1)) == ([(768, 0, 256)], [(1024, 256, 256)])


def test_runs_end_where_the_payload_has_a_gap() -> None:
    """Scales lie right behind the rows of their block, but in the payload behind the rows of all layers."""
    spec = KeyspaceSpec("m", "r", (KvGroup.mla(2, 8),), Dtype.BF16, Codec.FP8_E4M3, chunk_tokens=16)
    table = PlaneTable.of(spec, ShardGrid(2, 1, 1, 1), block_scales_layout(spec, range(2), range(1), 16, 2), [0, 4096])
    runs = page_runs(runs_of(table, 0, np.array([1]), layers=range(1)), 0)
    assert runs == [(192, 0, 128), (192 + 128, 256, 64)]


def test_tokens_at_the_distance_of_a_tokens_bytes_need_not_be_whole() -> None:
    """Heads far apart, with room for a row between two tokens of each."""
    spec = KeyspaceSpec("m", "r", (KvGroup(1, 2, 8),), Dtype.BF16, chunk_tokens=16)
    planes = tuple(RowPlane(0, number * 8192, 4096, 2 * 16, 1024, 16) for number in range(2))
    layout = EngineLayout(16, 2, (LayerLayout(planes),), 0, 0, 2, (16384,))
    layout.validate(spec)
    table = PlaneTable.of(spec, ShardGrid(1, 2, 1, 1), layout, [0])
    assert run_bytes_of(table, 0) == 16
    assert page_runs(runs_of(table, 0, np.array([1])), 0)[:3] == [(4096, 0, 16), (5120, 16, 16), (4128, 32, 16)]


@pytest.mark.parametrize(
    "shards, block_ids, skips, words",
    [
        ([4], [[0, 1]], [0], r"shard 4 is not one of the rank's \[0, 1, 2, 3\]"),
        ([0], [[0]], [0], r"block_ids must be \(1, 2\) int64"),
        ([0], [[0, 4]], [0], r"block_ids must lie in \[0, 4\)"),
        ([0], [[-1, 0]], [0], r"block_ids must lie in \[0, 4\)"),
        ([0], [[0, 1]], [17], "skip_tokens 17"),
        ([0], [[0, 1]], [-1], "skip_tokens -1"),
        ([0], [[0, 1]], [], "skip_tokens must be 1"),
    ],
)
def test_bad_copies_are_refused(shards: list[int], block_ids: list[list[int]], skips: list[int], words: str) -> None:
    table = PlaneTable.of(LLAMA, BY_HEAD, vllm_nhd_layout(LLAMA, range(2), HEADS, 8, 4), [0, 0])
    with pytest.raises(InvalidRequest, match=words):
        runs_of_pages(table, shards, np.array(block_ids, dtype=np.int64), skips)
    with pytest.raises(InvalidRequest, match=r"int64, got .* int32"):
        runs_of(table, 0, np.zeros(2, dtype=np.int32))


def test_a_codec_at_work_leaves_no_runs() -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 4, 8),), Dtype.BF16, Codec.FP8_E4M3, chunk_tokens=16)
    table = PlaneTable.of(spec, WHOLE, contiguous_layout(spec, range(2), HEADS, 8, 4), [0])
    assert run_bytes_of(table, 0) == 0
    with pytest.raises(NotServed, match="FP8_E4M3"):
        runs_of(table, 0, np.array([0, 1]))
