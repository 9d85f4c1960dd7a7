"""Copies by numpy against the slow reference: any layout and split, any heads of a rank, partial first chunks."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.errors import InvalidRequest
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup
from kvpool.core.layout import EngineLayout
from kvpool.core.payload import ShardPayload
from kvpool.core.payload_codec import decode_payload, encode_payload
from kvpool.core.reference import gather_payload_reference, scatter_payload_reference
from kvpool_gpuagent.adapters.cpu.rows import ShardRows, plane_runs
from tests.fixtures.layout_presets import (
    contiguous_layout,
    sglang_layout,
    vllm_blhnc_layout,
    vllm_lbhnc_layout,
    vllm_nhd_layout,
)
from tests.unit.core.random_layouts import noise_of, random_layouts, small_grids, small_specs
from tests.unit.core.strategies import head_borders, split_at
from tests.unit.core.test_plane_table import rank_of


@settings(max_examples=150)
@given(st.data())
@pytest.mark.slow
def test_copies_equal_the_reference(data: st.DataObject) -> None:
    spec = data.draw(small_specs())
    grid = data.draw(small_grids(spec))
    heads = data.draw(st.sampled_from(split_at(data.draw, head_borders(grid))))
    layout = rank_of(data.draw(random_layouts(spec, native=data.draw(st.booleans()))), heads)
    noise = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    memory = noise_of(layout, noise)
    count = spec.chunk_tokens // layout.block_tokens
    step = spec.opaque.block_tokens if spec.opaque else 1
    skip_tokens = data.draw(st.integers(0, spec.chunk_tokens // step)) * step
    is_sorted = data.draw(st.booleans())
    for shard in shards_in(grid.touching(grid.bitmap_for(layout.layer_range, layout.head_range))):
        shape = ShardPayload.of(spec, grid, shard)
        rows = ShardRows(spec, layout, memory, shape)
        ids = noise.permutation(layout.block_count)[:count].astype(np.int64)
        ids = np.sort(ids) if is_sorted else ids
        copied = noise.integers(0, 256, rows.copied_bytes, dtype=np.uint8)
        payload = copied
        if not layout.holds_codec_rows(spec):
            payload = noise.integers(0, 256, shape.payload_bytes, dtype=np.uint8)
            with np.errstate(over="ignore"):
                copied = decode_payload(spec, shape, payload)
        expected = [handle.copy() for handle in memory]
        scatter_payload_reference(spec, grid, shard, layout, expected, ids, payload, skip_tokens)
        rows.scatter(ids, copied, skip_tokens)
        assert all(np.array_equal(ours, its) for ours, its in zip(memory, expected, strict=True))

        gathered = np.empty(rows.copied_bytes, dtype=np.uint8)
        if not rows.is_whole:
            with pytest.raises(InvalidRequest, match="some heads"):
                rows.gather(ids, gathered)
            continue
        rows.gather(ids, gathered)
        if not layout.holds_codec_rows(spec):
            gathered, engine_rows = np.empty(shape.payload_bytes, dtype=np.uint8), gathered
            encode_payload(spec, shape, engine_rows, gathered)
        assert np.array_equal(gathered, gather_payload_reference(spec, grid, shard, layout, memory, ids))


SPEC = KeyspaceSpec("m", "r", (KvGroup(4, 4, 64),), Dtype.BF16, chunk_tokens=64)


@pytest.mark.parametrize(
    "preset, runs",
    [
        (contiguous_layout, 1),
        (vllm_blhnc_layout, 1),
        (vllm_lbhnc_layout, 4),  # a tensor for each layer
        (vllm_nhd_layout, 4),
        (sglang_layout, 8),  # a tensor for each layer and plane
    ],
)
@pytest.mark.parametrize("block_tokens", [4, 16, 32])
def test_planes_at_equal_distances_are_moved_together(
    preset: Callable[..., EngineLayout], runs: int, block_tokens: int
) -> None:
    layout = preset(SPEC, range(4), range(4), block_tokens, 80)
    assert len(plane_runs([layer.planes for layer in layout.layers])) == runs
    noise = np.random.default_rng(1)
    memory = noise_of(layout, noise)
    grid = ShardGrid(4, 4, 1, (1,))
    shape = ShardPayload.of(SPEC, grid, 0)
    rows = ShardRows(SPEC, layout, memory, shape)
    for ids in (np.arange(3, 3 + 64 // block_tokens), noise.permutation(80)[: 64 // block_tokens]):
        payload = np.empty(shape.payload_bytes, dtype=np.uint8)
        rows.gather(ids, payload)
        assert np.array_equal(payload, gather_payload_reference(SPEC, grid, 0, layout, memory, ids))
        expected = [handle.copy() for handle in memory]
        payload = noise.integers(0, 256, shape.payload_bytes, dtype=np.uint8)
        scatter_payload_reference(SPEC, grid, 0, layout, expected, ids, payload, 21)
        rows.scatter(ids, payload, 21)
        assert all(np.array_equal(ours, its) for ours, its in zip(memory, expected, strict=True))


def test_a_shard_of_other_ranks_is_refused() -> None:
    grid = ShardGrid(4, 4, 2, (1, 2))
    layout = contiguous_layout(SPEC, range(2, 4), range(2, 4), 16, 8)
    memory = noise_of(layout, np.random.default_rng(1))
    for shard in (grid.shard(0, 1, 0), grid.shard(1, 2, 0)):
        with pytest.raises(InvalidRequest, match="the rank has none of layers"):
            ShardRows(SPEC, layout, memory, ShardPayload.of(SPEC, grid, shard))


def test_rows_of_a_codec_are_those_of_the_cache() -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(4, 4, 64),), Dtype.BF16, Codec.INT8_GROUP8, chunk_tokens=64)
    layout = contiguous_layout(spec, range(4), range(4), 16, 8)
    shape = ShardPayload.of(spec, ShardGrid(4, 4, 1, (1,)), 0)
    rows = ShardRows(spec, layout, noise_of(layout, np.random.default_rng(1)), shape)
    assert rows.copied_bytes == 4 * 4 * 64 * 2 * 128 != shape.payload_bytes
