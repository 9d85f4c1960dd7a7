import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.payload import RowStrides, ShardPayload, chunk_bytes, payload_bytes
from tests.unit.core.strategies import specs

LLAMA = KeyspaceSpec("m", "r", (KvGroup(32, 8, 128),), Dtype.BF16)


def test_a_known_payload() -> None:
    grid = ShardGrid.of(LLAMA)
    shard = grid.shard(1, 2, 1)
    shape = ShardPayload.of(LLAMA, grid, shard)
    assert (shape.layers, shape.heads) == (range(8, 16), range(4, 8))
    assert shape.shape == (16, 8, 4, 16, 2, 256)
    assert shape.strides_of_rows(256) == RowStrides(256 << 10, 32 << 10, 8 << 10, 512, 256)
    assert shape.strides_of_rows(256).offset(layer=1, head=2, plane=1) == (48 << 10) + 256
    assert shape.payload_bytes == payload_bytes(LLAMA, grid, shard) == 4 << 20
    assert shape.slot_bytes == (4 << 20) + 4096  # not the next power of two
    assert chunk_bytes(LLAMA, grid, grid.all_shards) == 32 << 20
    assert chunk_bytes(LLAMA, grid, 0b11) == (8 << 20) + (4 << 20)


@pytest.mark.parametrize(
    "codec, row_bytes, scale_row_bytes",
    [(Codec.RAW, 256, 0), (Codec.INT8_GROUP8, 128, 32), (Codec.FP8_E4M3, 128, 4), (Codec.INT4_GROUP8, 64, 32)],
)
def test_scales_follow_the_data(codec: Codec, row_bytes: int, scale_row_bytes: int) -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 1, 128),), Dtype.BF16, codec, chunk_tokens=32)
    shape = ShardPayload.of(spec, ShardGrid(2, 1, 1, (1,)), 0)
    assert shape.shape == (2, 2, 1, 16, 2, row_bytes)
    assert shape.scale_shape == (2, 2, 1, 16, 2, scale_row_bytes)
    assert shape.data_bytes == 128 * row_bytes and shape.scale_bytes == 128 * scale_row_bytes
    assert shape.payload_bytes == shape.data_bytes + shape.scale_bytes


def test_latents_have_one_plane() -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup.mla(2, 576),), Dtype.BF16)
    assert ShardPayload.of(spec, ShardGrid(2, 1, 1, (1,)), 0).shape == (16, 2, 1, 16, 1, 1152)


def test_opaque_payloads_count_blocks() -> None:
    opaque = OpaqueLayout("vllm-cpu", "amx", "x86_64", 128, 1000)
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 2, 64),), Dtype.BF16, payload=PayloadKind.OPAQUE, opaque=opaque)
    assert ShardPayload.of(spec, ShardGrid(2, 2, 1, (1,)), 0).shape == (2, 2, 2, 1, 1, 1000)


@given(specs(), st.data())
def test_rows_tile_the_payload(spec: KeyspaceSpec, data: st.DataObject) -> None:
    grid = ShardGrid.of(spec)
    shape = ShardPayload.of(spec, grid, data.draw(st.integers(0, grid.shard_count - 1)))
    assert int(np.prod(shape.shape)) == shape.data_bytes
    assert int(np.prod(shape.scale_shape)) == shape.scale_bytes
    strides = shape.strides_of_rows(shape.row_bytes)
    of_axes = (strides.unit, strides.layer, strides.head, strides.position, strides.plane)
    for axis, stride in enumerate(of_axes):
        assert stride == int(np.prod(shape.shape[axis + 1 :]))
    assert shape.slot_bytes % 4096 == 0 and 0 <= shape.slot_bytes - shape.payload_bytes - 64 < 4096
