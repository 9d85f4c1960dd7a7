"""dequantize_launch writes what kvpool.core.codecs decodes, where it is wanted, and nothing else."""

import numpy as np
import pytest
import torch

from kvpool.core import codecs
from kvpool.core.elements import Codec
from kvpool_gpuagent.kernels.codec_shapes import CodecShape, RowCodec
from kvpool_gpuagent.kernels.dequantize import dequantize_launch, dequantize_rows_reference
from kvpool_gpuagent.kernels.scatter import scatter_pages_reference
from kvpool_gpuagent.kernels.tables import CopyShape, PageColumn
from tests.kernels.paged_caches import pick_blocks, random_bytes, start
from tests.kernels.quantized_pages import DTYPES, QuantizedPages, float_cache
from tests.kernels.test_quantize_pages import BF16, CASES, FP16, FP32, codec_cases

# The interpreter says what a GPU does not: noise among scales makes products that are clamped.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def filled(quantized: QuantizedPages) -> QuantizedPages:
    """Pages as an encoder writes them, then some noise: bytes and scales that none writes."""
    quantized.pages.payloads[:] = quantized.encoded()
    noise = random_bytes(tuple(quantized.pages.payloads.shape), str(quantized.blocks.device), seed=7)
    quantized.pages.payloads[:, ::37] = noise[:, ::37]
    return quantized


def check(quantized: QuantizedPages, skips: list[int]) -> None:
    """The whole of the cache's memory is as if the reference had written the decoded rows."""
    cache = quantized.cache
    decoded = quantized.decoded()
    before = [buffer.clone() for buffer in cache.buffers]
    scatter_pages_reference(cache.views, quantized.blocks, decoded, torch.tensor(skips))
    expected = [buffer.clone() for buffer in cache.buffers]
    for buffer, old in zip(cache.buffers, before, strict=True):
        buffer.copy_(old)
    start(dequantize_launch(quantized.shape), quantized.page_table, quantized.blocks, quantized.planes, programs=5)
    for buffer, wanted in zip(cache.buffers, expected, strict=True):
        assert torch.equal(buffer, wanted)


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
    chosen = pick_blocks(2, positions, block_rows, blocks, device)
    quantized = filled(QuantizedPages.of(cache, codec, dtype, chosen, positions))
    quantized.pages.table[1, PageColumn.SKIP_TOKENS] = positions // 2 + 1
    check(quantized, [0, positions // 2 + 1])


@codec_cases
def test_absent_pages_leave_the_cache_as_it_is(codec: RowCodec, device: str) -> None:
    cache = float_cache("hnd", BF16, device, row_elements=64, layers=1, blocks=64, block_rows=4, heads=2)
    quantized = filled(QuantizedPages.of(cache, codec, BF16, pick_blocks(4, 32, 4, 64, device), 32))
    quantized.pages.table[1, PageColumn.HEADS] = 0
    check(quantized, [0, 32, 0, 0])


@codec_cases
@pytest.mark.parametrize("skip", [31, 32])
def test_the_last_token_alone_and_none(codec: RowCodec, skip: int, device: str) -> None:
    cache = float_cache("nhd", FP32, device, row_elements=80, layers=1, blocks=40, block_rows=1, heads=1)
    quantized = filled(QuantizedPages.of(cache, codec, FP32, pick_blocks(1, 32, 1, 40, device), 32))
    quantized.pages.table[:, PageColumn.SKIP_TOKENS] = skip
    check(quantized, [skip])


@codec_cases
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_reference_with_native_casts_equals_the_codec(codec: RowCodec, dtype: torch.dtype) -> None:
    shape = CodecShape(CopyShape(8, 8, 1, 64 * dtype.itemsize, 16, 1, 1, 16), codec, dtype)
    data = random_bytes((64, shape.data_row_bytes), "cpu", seed=3)
    scale_row_bytes = Codec(codec.value).format.scale_row_bytes(shape.row_elements, DTYPES[dtype])
    scales = random_bytes((64, scale_row_bytes), "cpu", seed=4)
    expected = codecs.decode_rows(Codec(codec.value), DTYPES[dtype], data.numpy(), scales.numpy())
    scale_dtype = FP32 if codec is RowCodec.FP8_E4M3 else dtype
    ours = dequantize_rows_reference(data, scales.view(scale_dtype), codec, dtype, shape.group_elements)
    theirs = torch.from_numpy(np.asarray(expected)).view(dtype)
    assert torch.equal(ours.isnan(), theirs.isnan())
    same = ours.view(torch.uint8).view(64, -1, dtype.itemsize) == torch.from_numpy(expected).view(
        64, -1, dtype.itemsize
    )
    assert bool((same.all(-1) | theirs.isnan()).all())


def test_no_pages_is_no_launch(device: str) -> None:
    shape = CodecShape(CopyShape(16, 16, 1, 256, 16, 2, 2, 16), RowCodec.INT8_GROUP8, BF16)
    tables = [torch.empty((0, columns), dtype=torch.int64, device=device) for columns in (8, 1, 8)]
    start(dequantize_launch(shape), tables[0], tables[1], tables[2])
