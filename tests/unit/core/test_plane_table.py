from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup
from kvpool.core.layout import EngineLayout
from kvpool.core.payload import ShardPayload
from kvpool.core.plane_table import PlaneTable
from kvpool.core.reference import scatter_payload_reference
from tests.fixtures.layout_presets import contiguous_layout, lightllm_quantized_layout, vllm_nhd_layout
from tests.unit.core.random_layouts import noise_of, random_layouts, small_grids, small_specs
from tests.unit.core.strategies import head_borders, split_at


@settings(max_examples=60)
@given(st.data())
def test_a_kernel_that_follows_the_table_gathers_and_scatters_as_the_reference(data: st.DataObject) -> None:
    """Rows one by one, as the table's columns are defined."""
    spec = data.draw(small_specs())
    grid = data.draw(small_grids(spec))
    layout = rank_of(
        data.draw(random_layouts(spec)), data.draw(st.sampled_from(split_at(data.draw, head_borders(grid))))
    )
    layout.validate(spec)
    noise = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    handles = noise_of(layout, noise)
    expected = [handle.copy() for handle in handles]
    bases = [(number + 1) << 32 for number in range(len(handles))]
    table = PlaneTable.of(spec, grid, layout, bases)
    ids = noise.permutation(layout.block_count)[: spec.chunk_tokens // layout.block_tokens].astype(np.int64)
    written = grid.bitmap_for(layout.layer_range, layout.head_range)
    assert [*table.shards] == list(shards_in(grid.touching(written)))
    assert all(table.of_shard(shard).heads == grid.heads_of(shard) for shard in shards_in(written))
    for shard, planes in table.shards.items():
        payload = noise.integers(0, 256, planes.payload_bytes, dtype=np.uint8)
        scatter_payload_reference(spec, grid, shard, layout, expected, ids, payload)
        gathered = payload.copy()
        for rows, row_bytes, unit in (
            (planes.data_rows, table.row_bytes, table.unit_bytes),
            (planes.scale_rows, table.scale_row_bytes, 1),
        ):
            for address, block_stride, token_stride, head_stride, offset, made, unit_stride, rest in table.planes[
                rows
            ].tolist():
                assert (made, rest) == (0, 0)
                for position in range(spec.positions):
                    for head in range(len(planes.heads)):
                        block, token = divmod(position, table.block_rows)
                        at = address + int(ids[block]) * block_stride + token * token_stride + head * head_stride
                        nth_unit, nth_row = divmod(position, table.unit_rows)
                        begin = offset + nth_unit * unit_stride
                        begin += (head * table.unit_rows + nth_row) * spec.planes * row_bytes
                        assert at % unit == begin % unit == row_bytes % unit == 0
                        row = handles[(at >> 32) - 1][at & 0xFFFFFFFF :][:row_bytes]
                        row[:] = payload[begin : begin + row_bytes]
                        gathered[begin : begin + row_bytes] = 0
        assert all(np.array_equal(handle, wanted) for handle, wanted in zip(handles, expected, strict=True))
        if planes.heads == grid.heads_of(shard):
            assert not gathered.any()  # no byte of the payload is left out


def rank_of(layout: EngineLayout, heads: range) -> EngineLayout:
    """The cache of a rank that has some of the heads, in the memory that has room for all."""
    return replace(layout, first_head=heads.start, head_count=len(heads))


def test_a_rank_has_all_shards_that_it_writes_or_reads() -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(4, 4, 8),), Dtype.BF16, chunk_tokens=32)
    layout = vllm_nhd_layout(spec, range(2, 4), range(2, 4), 8, 10)
    table = PlaneTable.of(spec, ShardGrid(4, 4, 2, (1, 2, 4)), layout, [1 << 30, 1 << 31])
    assert [
        (shard, planes.heads, planes.first_plane, planes.plane_count) for shard, planes in table.shards.items()
    ] == [
        (7, range(2, 4), 0, 4),  # all heads
        (9, range(2, 4), 4, 4),  # its own
        (12, range(2, 3), 8, 4),
        (13, range(3, 4), 12, 4),
    ]
    # V of layer 3, heads 2 and 3 in a page of all heads: a layer of the payload has 4 heads of 16 tokens of K and V.
    engine = ((1 << 31) + 10 * 8 * 32, 8 * 32, 32)
    head = 16 * 2 * 16
    assert table.planes[3].tolist() == [*engine, 16, 6 * head + 16, 0, 8 * head, 0]
    # The same for head 3 alone, one head further on. A head stride is not needed.
    assert table.planes[15].tolist() == [engine[0] + 16, *engine[1:], 0, head + 16, 0, 2 * head, 0]
    assert table.handles.tolist() == [0, 0, 1, 1] * 4
    with pytest.raises(InvalidRequest, match="shard 0 has no layer and head of the rank"):
        table.of_shard(0)
    with pytest.raises(PartitionRefused):
        PlaneTable.of(spec, ShardGrid(4, 4, 1, (1, 2, 4)), layout, [0, 0])


def test_a_codec_at_work_gets_the_place_of_its_scales() -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 2, 24),), Dtype.BF16, Codec.FP8_E4M3, chunk_tokens=16)
    grid = ShardGrid(2, 2, 1, (2,))
    table = PlaneTable.of(spec, grid, contiguous_layout(spec, range(2), range(2), 8, 4), [1 << 20])
    payload = ShardPayload.of(spec, grid, 1)
    assert (table.cache_row_bytes, table.row_bytes, table.scale_row_bytes) == (48, 24, 4)
    planes = table.of_shard(1)
    assert (planes.plane_count, planes.scale_plane_count) == (4, 0)
    rows = table.planes[planes.data_rows]
    assert rows[:, 4].tolist() == [layer * 32 * 24 + plane * 24 for layer in range(2) for plane in range(2)]
    assert rows[:, 5].tolist() == [
        payload.data_bytes + layer * 32 * 4 + plane * 4 for layer in range(2) for plane in range(2)
    ]
    assert set(rows[:, 6].tolist()) == {2 * 32 * 24}
    assert table.unit_bytes == 8


def test_scales_of_the_engine_are_planes_of_their_own() -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 2, 16),), Dtype.BF16, Codec.INT8_GROUP8, chunk_tokens=16)
    layout = lightllm_quantized_layout(spec, range(2), range(2), 8, 4)
    table = PlaneTable.of(spec, ShardGrid(2, 2, 1, (2,)), layout, [1 << 20, 1 << 21])
    planes = table.of_shard(1)
    assert (planes.first_plane, planes.plane_count) == (8, 4)
    assert (planes.first_scale_plane, planes.scale_plane_count) == (12, 4)
    assert table.planes[planes.first_plane].tolist() == [(1 << 20) + 16, 8 * 64, 64, 0, 0, 0, 2 * 32 * 16, 0]
    # V heads come after K heads in the scales too
    assert table.planes[13].tolist() == [(1 << 21) + 3 * 4, 8 * 16, 16, 0, 64 * 16 + 4, 0, 2 * 32 * 4, 0]
    assert table.unit_bytes == 16


@pytest.mark.parametrize("head_dim, base, unit", [(64, 1 << 20, 16), (64, (1 << 20) + 4, 4), (20, 1 << 20, 8)])
def test_units(head_dim: int, base: int, unit: int) -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(1, 2, head_dim),), Dtype.BF16, chunk_tokens=16)
    layout = contiguous_layout(spec, range(1), range(2), 8, 4)
    assert PlaneTable.of(spec, ShardGrid(1, 2, 1, (1,)), layout, [base]).unit_bytes == unit


@pytest.mark.parametrize(
    "addresses, words",
    [
        ([0], "handle_addresses must be 2 for as many handles, got 1"),
        ([0, -2], r"handle_addresses\[1\]"),
        ([1 << 62, 0], r"handle_addresses\[0\]"),
        ([2, 4097], r"handle_addresses\[1\] must be a multiple of 2, got 0x1001"),
    ],
)
def test_bad_addresses_are_refused(addresses: list[int], words: str) -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 1, 8),), Dtype.BF16, chunk_tokens=16)
    layout = vllm_nhd_layout(spec, range(2), range(1), 8, 4)
    with pytest.raises(InvalidRequest, match=words):
        PlaneTable.of(spec, ShardGrid.of(spec), layout, addresses)
