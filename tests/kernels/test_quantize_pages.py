"""quantize_launch writes the bytes of kvpool.core.codecs, and nothing else."""

import numpy as np
import pytest
import torch

from kvpool.core import codecs
from kvpool.core.elements import Codec
from kvpool_gpuagent.kernels.codec_shapes import CodecShape, RowCodec
from kvpool_gpuagent.kernels.quantize import quantize_launch, quantize_rows_reference
from kvpool_gpuagent.kernels.tables import CopyShape, PageColumn
from tests.kernels.paged_caches import pick_blocks, start
from tests.kernels.quantized_pages import DTYPES, QuantizedPages, float_cache

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# layout, elements, tokens of a block, heads, row elements, positions
CASES = [
    pytest.param("nhd", BF16, 16, 3, 128, 64, id="nhd, 128 x bf16"),
    pytest.param("hnd", FP16, 16, 2, 64, 32, id="hnd, 64 x fp16"),
    pytest.param("interleaved", BF16, 1, 2, 80, 32, id="interleaved, 80 x bf16"),
    pytest.param("separate", FP32, 1, 2, 192, 32, id="separate, 192 x fp32"),
    pytest.param("padded", BF16, 16, 1, 576, 32, id="mla, 576 x bf16"),
    pytest.param("nhd", FP16, 24, 3, 64, 63, id="last block in part, 63 tokens"),
    pytest.param("separate", BF16, 64, 1, 128, 128, id="several tiles"),
]
codec_cases = pytest.mark.parametrize("codec", RowCodec)


@codec_cases
@pytest.mark.parametrize(("layout", "dtype", "block_rows", "heads", "row_elements", "positions"), CASES)
def test_equals_the_codec(
    layout: str,
    dtype: torch.dtype,
    block_rows: int,
    heads: int,
    row_elements: int,
    positions: int,
    codec: RowCodec,
    device: str,
) -> None:
    blocks = 2 * positions // block_rows + 6
    cache = float_cache(
        layout, dtype, device, row_elements=row_elements, layers=1, blocks=blocks, block_rows=block_rows, heads=heads,
        first_head=1,
    )  # fmt: skip
    quantized = QuantizedPages.of(cache, codec, dtype, pick_blocks(2, positions, block_rows, blocks, device), positions)
    start(quantize_launch(quantized.shape), quantized.page_table, quantized.blocks, quantized.planes)
    assert torch.equal(quantized.pages.slots, quantized.expected_slots(present=torch.arange(2)))


@codec_cases
def test_rows_that_lie_on_no_wide_unit(codec: RowCodec, device: str) -> None:
    cache = float_cache("padded", BF16, device, row_elements=72, layers=1, blocks=10, block_rows=4, heads=2)
    shifted = torch.empty(cache.buffers[0].numel() + 6, dtype=torch.uint8, device=device)[6:]
    view = shifted.view(cache.buffers[0].shape)[..., :144]
    view.copy_(cache.views[0])
    moved = type(cache)((view,), (shifted,), 1)
    quantized = QuantizedPages.of(moved, codec, BF16, pick_blocks(2, 16, 4, 10, device), 16)
    assert quantized.shape.rows.unit_bytes == 2
    start(quantize_launch(quantized.shape), quantized.page_table, quantized.blocks, quantized.planes)
    assert torch.equal(quantized.pages.slots, quantized.expected_slots(present=torch.arange(2)))


@codec_cases
def test_absent_pages_planes_of_others_and_few_programs(codec: RowCodec, device: str) -> None:
    cache = float_cache("separate", FP16, device, row_elements=64, layers=2, blocks=64, block_rows=4, heads=2)
    quantized = QuantizedPages.of(cache, codec, FP16, pick_blocks(3, 32, 4, 64, device), 32)
    quantized.pages.table[1, PageColumn.HEADS] = 0
    start(quantize_launch(quantized.shape), quantized.page_table, quantized.blocks, quantized.planes, programs=3)
    assert torch.equal(quantized.pages.slots, quantized.expected_slots(present=torch.tensor([0, 2])))

    quantized.pages.slots[:] = 0xA5
    quantized.pages.table[:, PageColumn.HEADS] = 2
    quantized.pages.table[:, PageColumn.PLANE_COUNT] = 1
    expected = torch.full_like(quantized.pages.payloads, 0xA5)
    rows = codecs.encode_rows(*quantized.codec, quantized.rows())
    for part, places in zip(rows, (quantized.data, quantized.scales), strict=True):
        others = places.rows_of(expected)
        others[:, :1] = torch.from_numpy(part).to(device)[:, :1]
        places.put(expected, others)
    start(quantize_launch(quantized.shape), quantized.page_table, quantized.blocks, quantized.planes)
    assert torch.equal(quantized.pages.payloads, expected)


@codec_cases
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_reference_with_native_casts_equals_the_codec(codec: RowCodec, dtype: torch.dtype) -> None:
    cache = float_cache("nhd", dtype, "cpu", row_elements=64, layers=2, blocks=8, block_rows=8, heads=2)
    for view in cache.views:
        rows = view.contiguous()
        expected = codecs.encode_rows(Codec(codec.value), DTYPES[dtype], rows.numpy())
        groups = CodecShape(CopyShape(8, 8, 1, 64 * dtype.itemsize, 16, 1, 1, 16), codec, dtype).group_elements
        data, scales = quantize_rows_reference(rows.view(dtype), codec, groups)
        assert np.array_equal(data.numpy(), expected[0])
        stored = torch.from_numpy(expected[1]).view(scales.dtype)
        assert torch.equal(scales.isnan(), stored.isnan())
        assert torch.equal(scales.nan_to_num(0), stored.nan_to_num(0))


def test_no_pages_is_no_launch(device: str) -> None:
    shape = CodecShape(CopyShape(16, 16, 1, 256, 16, 2, 2, 16), RowCodec.INT8_GROUP8, BF16)
    tables = [torch.empty((0, columns), dtype=torch.int64, device=device) for columns in (8, 1, 8)]
    start(quantize_launch(shape), tables[0], tables[1], tables[2])


def test_shapes_that_no_codec_takes_are_refused() -> None:
    rows = CopyShape(16, 16, 1, 40, 8, 2, 2, 16)
    with pytest.raises(ValueError, match="rows of 20 elements"):
        CodecShape(rows, RowCodec.INT4_GROUP8, BF16)
    with pytest.raises(ValueError, match="dtype must be bfloat16"):
        CodecShape(rows, RowCodec.FP8_E4M3, torch.int8)
