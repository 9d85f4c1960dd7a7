import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup
from kvpool.core.layout_presets import contiguous_layout, lightllm_quantized_layout, vllm_nhd_layout
from kvpool.core.payload import ShardPayload
from kvpool.core.plane_table import PlaneTable
from kvpool.core.reference import gather_payload_reference
from tests.unit.core.random_layouts import noise_of, random_layouts, small_grids, small_specs


@settings(max_examples=60)
@given(st.data())
def test_a_kernel_that_follows_the_table_gathers_as_the_reference(data: st.DataObject) -> None:
    """Rows one by one, as the table's columns are defined."""
    spec = data.draw(small_specs())
    grid, layout = data.draw(small_grids(spec)), data.draw(random_layouts(spec))
    noise = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    handles = noise_of(layout, noise)
    bases = [(number + 1) << 32 for number in range(len(handles))]
    table = PlaneTable.of(spec, grid, layout, bases)
    ids = noise.permutation(layout.block_count)[: spec.chunk_tokens // layout.block_tokens].astype(np.int64)
    assert [*table.shards] == list(range(grid.shard_count))
    for shard, planes in table.shards.items():
        payload = np.zeros(planes.payload_bytes, dtype=np.uint8)
        data_rows, scale_rows = planes.of_layers(planes.layers)
        for rows, row_bytes, unit in (
            (data_rows, table.row_bytes, table.unit_bytes),
            (scale_rows, table.scale_row_bytes, table.scale_unit_bytes),
        ):
            for address, block_stride, token_stride, head_stride, offset, *rest in table.planes[[*rows]].tolist():
                assert rest == [0, 0, 0]
                for row in range(spec.positions * len(planes.heads)):
                    position, head = divmod(row, len(planes.heads))
                    block, token = divmod(position, table.block_rows)
                    at = address + int(ids[block]) * block_stride + token * token_stride + head * head_stride
                    begin = offset + row * row_bytes
                    assert at % unit == begin % unit == row_bytes % unit == 0
                    memory = handles[(at >> 32) - 1]
                    payload[begin : begin + row_bytes] = memory[at & 0xFFFFFFFF :][:row_bytes]
        assert np.array_equal(payload, gather_payload_reference(spec, grid, shard, layout, handles, ids))


def test_a_rank_has_its_own_shards_one_after_another() -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(4, 4, 8),), Dtype.BF16, chunk_tokens=16)
    layout = vllm_nhd_layout(spec, range(2, 4), range(2, 4), 8, 10)
    table = PlaneTable.of(spec, ShardGrid(4, 4, 2, 4), layout, [1 << 30, 1 << 31])
    assert [*table.shards] == [6, 7]
    assert [(planes.first_plane, planes.plane_count) for planes in table.shards.values()] == [(0, 4), (4, 4)]
    assert [(planes.layers, planes.heads) for planes in table.shards.values()] == [
        (range(2, 4), range(2, 3)),
        (range(2, 4), range(3, 4)),
    ]
    # V of layer 3, head 3: one plane of [10][8][2][8] bf16 further on, and one head. A head stride is not needed.
    assert table.planes[7].tolist() == [(1 << 31) + 10 * 8 * 32 + 16, 8 * 32, 32, 0, 3 * 16 * 16, 0, 0, 0]
    assert table.handles.tolist() == [0, 0, 1, 1] * 2
    assert table.of_shard(7).of_layers(range(3, 4)) == (range(6, 8), range(8, 8))
    assert table.of_shard(7).of_layers(range(3, 3)) == (range(6, 6), range(8, 8))
    for layers in (range(1, 3), range(3, 5)):
        with pytest.raises(InvalidRequest, match=r"are not in the shard's \[2, 4\)"):
            table.of_shard(7).of_layers(layers)
    with pytest.raises(InvalidRequest, match="shard 0"):
        table.of_shard(0)
    with pytest.raises(PartitionRefused):
        PlaneTable.of(spec, ShardGrid(4, 4, 1, 4), layout, [0, 0])


def test_a_codec_at_work_is_told_where_its_scales_go() -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 2, 24),), Dtype.BF16, Codec.FP8_E4M3, chunk_tokens=16)
    grid = ShardGrid(2, 2, 1, 2)
    table = PlaneTable.of(spec, grid, contiguous_layout(spec, range(2), range(2), 8, 4), [1 << 20])
    payload = ShardPayload.of(spec, grid, 1)
    assert (table.cache_row_bytes, table.row_bytes, table.scale_row_bytes) == (48, 24, 4)
    planes = table.of_shard(1)
    assert (planes.plane_count, planes.scale_plane_count) == (4, 0)
    rows = table.planes[planes.first_plane :][: planes.plane_count]
    assert rows[:, 4].tolist() == [plane * 16 * 24 for plane in range(4)]
    assert rows[:, 5].tolist() == [payload.data_bytes + plane * 16 * 4 for plane in range(4)]
    assert (table.unit_bytes, table.scale_unit_bytes) == (8, 4)


def test_scales_of_the_engine_are_planes_of_their_own() -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 2, 16),), Dtype.BF16, Codec.INT8_GROUP8, chunk_tokens=16)
    layout = lightllm_quantized_layout(spec, range(2), range(2), 8, 4)
    table = PlaneTable.of(spec, ShardGrid(2, 2, 1, 2), layout, [1 << 20, 1 << 21])
    planes = table.of_shard(1)
    assert (planes.first_plane, planes.plane_count) == (8, 4)
    assert (planes.first_scale_plane, planes.scale_plane_count) == (12, 4)
    assert table.planes[planes.first_plane].tolist() == [(1 << 20) + 16, 8 * 64, 64, 0, 0, 0, 0, 0]
    # V heads come after K heads in the scales too
    assert table.planes[13].tolist() == [(1 << 21) + 3 * 4, 8 * 16, 16, 0, 4 * 16 * 16 + 16 * 4, 0, 0, 0]
    assert (table.unit_bytes, table.scale_unit_bytes) == (16, 4)
    assert planes.of_layers(range(1, 2)) == (range(10, 12), range(14, 16))


@pytest.mark.parametrize("head_dim, base, unit", [(64, 1 << 20, 16), (64, (1 << 20) + 4, 4), (20, 1 << 20, 8)])
def test_units(head_dim: int, base: int, unit: int) -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(1, 2, head_dim),), Dtype.BF16, chunk_tokens=16)
    layout = contiguous_layout(spec, range(1), range(2), 8, 4)
    assert PlaneTable.of(spec, ShardGrid(1, 2, 1, 1), layout, [base]).unit_bytes == unit


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
