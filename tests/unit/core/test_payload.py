from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.errors import InvalidRequest
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.page import SUM_BLOCK_BYTES
from kvpool.core.payload import ShardPayload, chunk_bytes, payload_bytes, payload_shape
from tests.unit.core.strategies import specs

LLAMA = KeyspaceSpec("m", "r", (KvGroup(32, 8, 128),), Dtype.BF16)


def test_a_known_payload() -> None:
    grid = ShardGrid.of(LLAMA)
    shape = ShardPayload.of(LLAMA, grid, 9)
    assert (shape.layers, shape.heads) == (range(16, 32), range(1, 2))
    assert shape.shape == payload_shape(LLAMA, grid, 9) == (16, 2, 256, 1, 256)
    assert shape.payload_bytes == payload_bytes(LLAMA, grid, 9) == 2 << 20
    assert shape.slot_bytes == (2 << 20) + 4096  # not the next power of two
    assert shape.layer_offset(17) == 128 << 10
    assert [(part.offset_bytes, part.end_bytes) for part in shape.layer_ranges(range(18, 20))] == [
        (256 << 10, 512 << 10)
    ]
    assert chunk_bytes(LLAMA, grid, grid.all_shards) == 32 << 20
    assert chunk_bytes(LLAMA, grid, 0b11) == 4 << 20


@pytest.mark.parametrize(
    "codec, row_bytes, scale_row_bytes",
    [(Codec.RAW, 256, 0), (Codec.INT8_GROUP8, 128, 32), (Codec.FP8_E4M3, 128, 4), (Codec.INT4_GROUP8, 64, 32)],
)
def test_scales_follow_the_data(codec: Codec, row_bytes: int, scale_row_bytes: int) -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 1, 128),), Dtype.BF16, codec, chunk_tokens=16)
    shape = ShardPayload.of(spec, ShardGrid(2, 1, 1, 1), 0)
    assert shape.shape == (2, 2, 16, 1, row_bytes)
    assert shape.scale_shape == (2, 2, 16, 1, scale_row_bytes)
    assert shape.data_bytes == 64 * row_bytes and shape.scale_bytes == 64 * scale_row_bytes
    ranges = [(part.offset_bytes, part.size_bytes) for part in shape.layer_ranges(range(1, 2))]
    data = (32 * row_bytes, 32 * row_bytes)
    scales = (64 * row_bytes + 32 * scale_row_bytes, 32 * scale_row_bytes)
    assert ranges == ([data, scales] if scale_row_bytes else [data])


def test_opaque_payloads_count_blocks() -> None:
    opaque = OpaqueLayout("vllm-cpu", "amx", "x86_64", 128, 1000)
    spec = KeyspaceSpec("m", "r", (KvGroup(2, 2, 64),), Dtype.BF16, payload=PayloadKind.OPAQUE, opaque=opaque)
    assert ShardPayload.of(spec, ShardGrid(2, 2, 1, 1), 0).shape == (2, 1, 2, 2, 1000)


@given(specs(), st.data())
def test_layer_ranges_tile_the_payload(spec: KeyspaceSpec, data: st.DataObject) -> None:
    grid = ShardGrid.of(spec)
    shape = ShardPayload.of(spec, grid, data.draw(st.integers(0, grid.shard_count - 1)))
    ranges = [part for layer in shape.layers for part in shape.layer_ranges(range(layer, layer + 1))]
    ordered = sorted((part.offset_bytes, part.end_bytes) for part in ranges)
    assert ordered[0][0] == 0 and ordered[-1][1] == shape.payload_bytes
    assert all(end == start for (_, end), (start, _) in pairwise(ordered))
    assert sum(part.size_bytes for part in shape.layer_ranges(shape.layers)) == shape.payload_bytes
    sums_bytes = 8 * -(-shape.payload_bytes // SUM_BLOCK_BYTES)  # grows with the payload: 32 KiB for a page of 1 GiB
    assert shape.slot_bytes % 4096 == 0 and 0 <= shape.slot_bytes - shape.payload_bytes - sums_bytes - 64 < 4096


def test_layers_of_other_shards_are_refused() -> None:
    shape = ShardPayload.of(LLAMA, ShardGrid.of(LLAMA), 0)
    assert shape.layer_ranges(range(0)) == ()
    for layers in (range(16, 17), range(15, 17)):
        with pytest.raises(InvalidRequest, match=r"layer 16 is not in the shard's \[0, 16\)"):
            shape.layer_ranges(layers)
