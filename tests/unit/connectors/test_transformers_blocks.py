"""KV travels between a model's cache and its blocks bit for bit, and lies in the blocks where the layout says."""

import pytest
import torch
from transformers import DynamicCache

from kvpool.connectors.transformers_blocks import KvBlocks, block_bytes, block_layout
from kvpool.connectors.transformers_model import shared_model
from tests.unit.connectors.tiny_models import tiny_llama

CHUNK = 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [(1, 2, 3), (3, 0, 2)])
@pytest.mark.parametrize("head_dim", [16, 6])  # 6: rows of bf16 are no whole number of 64-bit words
def test_chunks_come_back_from_any_blocks(dtype: torch.dtype, blocks: tuple[int, ...], head_dim: int) -> None:
    model = tiny_llama(head_dim=head_dim).to(dtype)
    spec = shared_model(model, model_id="tiny", model_revision="1", chunk_tokens=CHUNK).spec
    kv = KvBlocks(spec, 4, memoryview(bytearray(4 * block_bytes(spec))))
    cache = DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(1)
    shape = (1, 2, 5 * CHUNK + 3, head_dim)
    for number in range(2):
        cache.update(*(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2)), number)
    kv.from_cache(cache, 1, blocks)
    waited: list[int] = []

    def wait_layers(layers: int) -> bool:
        waited.append(layers)
        return True

    copy = kv.to_cache(blocks, model, wait_layers)
    assert (copy.get_seq_length(), waited) == (3 * CHUNK, [])
    tail = torch.ones((1, 2, 2, head_dim), dtype=dtype)
    for number in (0, 1):
        for layer, whole in zip(copy.update(tail, -tail, number), (tail, -tail), strict=True):
            assert torch.equal(layer[:, :, 3 * CHUNK :], whole)
        assert torch.equal(
            copy.layers[number].keys[:, :, : 3 * CHUNK], cache.layers[number].keys[:, :, CHUNK : 4 * CHUNK]
        )
        assert torch.equal(
            copy.layers[number].values[:, :, : 3 * CHUNK], cache.layers[number].values[:, :, CHUNK : 4 * CHUNK]
        )
    assert (copy.get_seq_length(), waited) == (3 * CHUNK + 2, [1, 2])
    copy.update(tail, tail, 0)
    assert copy.get_seq_length() == 3 * CHUNK + 4


def test_the_layout_is_what_the_tensor_is() -> None:
    model = tiny_llama()
    spec = shared_model(model, model_id="tiny", model_revision="1", chunk_tokens=CHUNK).spec
    layout = block_layout(spec, 3)
    layout.validate(spec)
    memory = memoryview(bytearray(3 * block_bytes(spec)))
    assert layout.handle_sizes == (len(memory),)
    cache = DynamicCache(config=model.config)
    for number in range(2):
        rows = torch.arange(2 * 2 * CHUNK * 16, dtype=torch.float32).reshape(1, 2, 2 * CHUNK, 16) + number * 10_000
        cache.update(rows, -rows, number)
    KvBlocks(spec, 3, memory).from_cache(cache, 1, [2])
    plane = layout.layers[1].planes[1]
    for token, head in ((0, 0), (5, 1), (15, 0)):
        start = (
            plane.offset_bytes
            + 2 * plane.block_stride_bytes
            + token * plane.token_stride_bytes
            + head * plane.head_stride_bytes
        )
        row = torch.frombuffer(memory[start : start + plane.row_bytes], dtype=torch.float32)
        assert torch.equal(row, cache.layers[1].values[0, head, CHUNK + token])
