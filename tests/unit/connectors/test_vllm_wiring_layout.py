"""The layout that vLLM granted, read off the strides of the cache."""

from __future__ import annotations

import pytest

from kvpool.connectors.vllm.wiring import detect_layout
from kvpool.core.geometry import KvGroup
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Dtype, KeyspaceSpec
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from kvpool.core.partition import rank_part

LAYERS, HEADS, HEAD_DIM, BLOCK, BLOCKS = 32, 8, 128, 16, 10
CELL = 2 * HEAD_DIM * 2  # K and V of a token and head in bf16
SPEC = KeyspaceSpec(
    model_id="m", model_revision="1", groups=(KvGroup(LAYERS, HEADS, HEAD_DIM),), dtype=Dtype.BF16, chunk_tokens=128
)


def a_cache(order: str, heads: int = HEADS, *, apart: bool = False) -> EngineLayout:
    """One allocation with its dimensions in that order, from the outermost."""
    extents = {"L": LAYERS, "B": BLOCKS, "H": heads, "N": BLOCK}
    strides, stride = {}, CELL
    for dimension in reversed(order):
        strides[dimension], stride = stride, stride * extents[dimension]
    layers = tuple(
        LayerLayout(
            tuple(
                RowPlane(
                    handle=layer if apart else 0,
                    offset_bytes=(0 if apart else layer * strides["L"]) + plane * CELL // 2,
                    block_stride_bytes=strides["B"],
                    token_stride_bytes=strides["N"],
                    head_stride_bytes=strides["H"],
                    row_bytes=CELL // 2,
                )
                for plane in range(2)
            )
        )
        for layer in range(LAYERS)
    )
    return EngineLayout(
        block_tokens=BLOCK,
        block_count=BLOCKS,
        layers=layers,
        first_layer=0,
        first_head=0,
        head_count=heads,
        handle_sizes=(stride,) * (LAYERS if apart else 1),
    )


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("order", "whole_layers", "way"),
    [("BLHN", True, "the copy engine"), ("BHLN", False, "kernels"), ("LBHN", False, ""), ("LBNH", False, "kernels")],
)
def test_the_granted_layout_is_named_with_its_runs(order: str, whole_layers: bool, way: str, tp_size: int) -> None:
    heads = HEADS // tp_size
    detected = detect_layout(a_cache(order, heads), SPEC, rank_part(SPEC.group, tp_rank=0, tp_size=tp_size))
    assert detected.name == order + "C"
    in_a_layer = {"BLHN": heads * BLOCK, "BHLN": BLOCK, "LBHN": heads * BLOCK, "LBNH": 1}[order] * CELL
    group_layers = len(ShardGrid.of(SPEC).layers_of_group(0))
    assert detected.run_bytes == in_a_layer * (group_layers if whole_layers else 1)
    assert detected.copy_path == (way or "the copy engine")


def test_a_tensor_of_its_own_for_each_layer_is_outermost() -> None:
    detected = detect_layout(a_cache("LBHN", apart=True), SPEC, rank_part(SPEC.group, tp_rank=0, tp_size=1))
    assert (detected.name, detected.run_bytes) == ("LBHNC", HEADS * BLOCK * CELL)
