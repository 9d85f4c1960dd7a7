"""An engine's tensors as the pool shares them: any order of axes by name, and none that only has as many bytes."""

from __future__ import annotations

import pytest
import torch

import kvpool

MODEL = kvpool.Model("tiny", "1", layers=3, kv_heads=2, head_dim=16, dtype="fp16", chunk_tokens=16)
BLOCKS, TOKENS = 5, 8
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "contiguous": [(3, 2, BLOCKS, TOKENS, 2, 16)],
    "vllm": [(2, BLOCKS, TOKENS, 2, 16)] * 3,
    "vllm_blocks_hnd": [(BLOCKS, 2, 2, TOKENS, 16)] * 3,
    "sglang": [(BLOCKS * TOKENS, 2, 16)] * 6,
}


@pytest.mark.parametrize("layout", SHAPES)
def test_rows_lie_where_the_layout_says(layout: str) -> None:
    tensors = [torch.zeros(shape, dtype=torch.float16) for shape in SHAPES[layout]]
    cache = kvpool.PagedCache(tensors, MODEL, layout=layout, block_size=TOKENS)
    assert cache.layout.block_count == BLOCKS
    plane = cache.layout.layers[1].planes[1]
    at = plane.offset_bytes + 4 * plane.block_stride_bytes + 3 * plane.token_stride_bytes + plane.head_stride_bytes
    cache.buffers[plane.handle][at : at + 2] = torch.tensor([1.0], dtype=torch.float16).numpy().tobytes()
    assert sum(float(tensor.sum()) for tensor in tensors) == 1.0, "they share their memory"
    assert cache.record_event() is None and not cache.on_gpu
    cache.close()


def test_views_of_one_storage_are_one_region() -> None:
    whole = torch.zeros(3, 2, BLOCKS, TOKENS, 2, 16, dtype=torch.float16)
    cache = kvpool.PagedCache(list(whole.unbind(0)), MODEL, layout="vllm", block_size=TOKENS)
    assert len(cache.regions) == 1
    assert len({layer.planes[0].offset_bytes for layer in cache.layout.layers}) == 3


def test_a_rank_has_its_layers_and_heads() -> None:
    tensors = [torch.zeros(2, BLOCKS, TOKENS, 1, 16, dtype=torch.float16) for _ in range(2)]
    cache = kvpool.PagedCache(tensors, MODEL, layout="vllm", block_size=TOKENS, layers=range(1, 3), heads=range(1, 2))
    assert (cache.layout.layer_range, cache.layout.head_range) == (range(1, 3), range(1, 2))


@pytest.mark.parametrize(
    ("shapes", "layout", "named"),
    [
        ([(BLOCKS, 2, TOKENS, 2, 16)] * 3, "vllm", r"tensors\[0\] is \(5, 2, 8, 2, 16\)"),
        ([(2, BLOCKS, 2, TOKENS, 16)] * 3, "vllm", "block, token, head"),
        ([(2, BLOCKS, TOKENS, 2, 16)] * 2, "vllm", "whole blocks"),
        ([(2, 3 * BLOCKS, TOKENS, 2, 16)], "vllm", "3 tensors, got 1"),
        ([(2, BLOCKS, TOKENS, 2, 16)] * 3, "unheard-of", "layout must be"),
        ([], "vllm", "at least one"),
    ],
)
def test_tensors_that_are_not_of_the_layout_are_refused(shapes: list[tuple[int, ...]], layout: str, named: str) -> None:
    with pytest.raises(kvpool.errors.InvalidRequest, match=named):
        tensors = [torch.zeros(shape, dtype=torch.float16) for shape in shapes]
        kvpool.PagedCache(tensors, MODEL, layout=layout, block_size=TOKENS)
