"""Pages with a codec are the same whichever device wrote them: kernels over a plane table, and the slow reference that
the CPU device equals."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvpool.core.elements import Codec, Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.plane_table import PlaneTable
from kvpool.core.reference import gather_payload_reference, scatter_payload_reference
from kvpool_gpuagent.kernels.codec_shapes import CodecShape, RowCodec
from kvpool_gpuagent.kernels.dequantize import dequantize_launch
from kvpool_gpuagent.kernels.quantize import quantize_launch
from kvpool_gpuagent.kernels.tables import CopyShape, PageColumn
from tests.fixtures import layout_presets
from tests.kernels.paged_caches import make_pages, random_bytes, start

TORCH = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}
CHUNK, BLOCK, BLOCKS = 32, 8, 11
CASES = [
    pytest.param(KvGroup(2, 4, 64), Dtype.BF16, Codec.INT8_GROUP8, layout_presets.vllm_hnd_layout, id="hnd int8"),
    pytest.param(KvGroup(2, 4, 40), Dtype.FP16, Codec.INT4_GROUP8, layout_presets.contiguous_layout, id="dense int4"),
    pytest.param(KvGroup.mla(3, 72), Dtype.BF16, Codec.FP8_E4M3, layout_presets.mla_layout, id="mla fp8"),
    pytest.param(KvGroup(2, 4, 5), Dtype.FP32, Codec.FP8_E4M3, layout_presets.sglang_layout, id="odd rows fp8"),
]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("group", "dtype", "codec", "preset"), CASES)
def test_kernels_and_the_reference_write_the_same_pages(
    group: KvGroup, dtype: Dtype, codec: Codec, preset: Callable[..., EngineLayout], tp: int, device: str
) -> None:
    """Also pages of heads that the rank has in part, which it reads only."""
    spec = KeyspaceSpec("m", "r", (group,), dtype, codec, chunk_tokens=CHUNK)
    grid = ShardGrid(group.layers, group.kv_heads, 1, (1, 2) if group.kv_heads > 1 else (1,))
    heads = range(group.kv_heads // 2, group.kv_heads) if tp == 2 and group.kv_heads > 1 else range(group.kv_heads)
    layout = preset(spec, range(group.layers), heads, BLOCK, BLOCKS)
    layout.validate(spec)
    memory = [random_bytes((size,), device, seed) for seed, size in enumerate(layout.handle_sizes)]
    table = PlaneTable.of(spec, grid, layout, [part.data_ptr() for part in memory])
    planes = torch.from_numpy(table.planes.copy()).to(device)
    block_ids = np.array([7, 0, 3, 10])
    blocks = torch.from_numpy(block_ids)[None].to(device)
    handles = [part.cpu().numpy().copy() for part in memory]
    for shard, own in table.shards.items():
        rows = CopyShape(
            CHUNK, BLOCK, len(heads), table.cache_row_bytes, table.unit_bytes, own.plane_count, spec.planes, 16
        )
        shape = CodecShape(rows, RowCodec(codec.value), TORCH[dtype])
        pages = make_pages(1, own.payload_bytes, own.plane_count, len(own.heads), device)
        pages.table[0, PageColumn.FIRST_PLANE] = own.first_plane
        if own.heads == grid.heads_of(shard):
            start(quantize_launch(shape), pages.table.to(device), blocks, planes)
            expected = gather_payload_reference(spec, grid, shard, layout, handles, block_ids)
            assert np.array_equal(pages.payloads[0].cpu().numpy(), expected)
        else:
            pages.payloads[:] = random_bytes(tuple(pages.payloads.shape), device, 9)
        payload = pages.payloads[0].cpu().numpy()

        pages.table[0, PageColumn.SKIP_TOKENS] = 13
        start(dequantize_launch(shape), pages.table.to(device), blocks, planes)
        scatter_payload_reference(spec, grid, shard, layout, handles, block_ids, payload, 13)
        for ours, wanted in zip(memory, handles, strict=True):
            assert np.array_equal(ours.cpu().numpy(), wanted)
