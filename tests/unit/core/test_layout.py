from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from tests.fixtures.layout_presets import (
    contiguous_layout,
    lightllm_layout,
    lightllm_quantized_layout,
    mla_layout,
    vllm_cpu_opaque_layout,
    vllm_hnd_layout,
    vllm_nhd_layout,
)

SPEC = KeyspaceSpec("m", "r", (KvGroup(4, 4, 8),), Dtype.BF16, chunk_tokens=16)
QUANTIZED = KeyspaceSpec("m", "r", (KvGroup(4, 4, 8),), Dtype.BF16, Codec.INT8_GROUP8, chunk_tokens=16)
OPAQUE = KeyspaceSpec(
    "m", "r", (KvGroup(4, 4, 8),), Dtype.BF16, chunk_tokens=16,
    payload=PayloadKind.OPAQUE, opaque=OpaqueLayout("e", "l", "", 8, 77),
)  # fmt: skip
LAYOUT = vllm_nhd_layout(SPEC, range(1, 3), range(2, 4), 8, 10)


def with_plane(layout: EngineLayout, layer: int, plane: int, **changes: Any) -> EngineLayout:
    layers = list(layout.layers)
    planes = list(layers[layer].planes)
    planes[plane] = replace(planes[plane], **changes)
    layers[layer] = replace(layers[layer], planes=tuple(planes))
    return replace(layout, layers=tuple(layers))


def test_a_layout_names_its_part_of_the_model() -> None:
    LAYOUT.validate(SPEC)
    assert (LAYOUT.layer_range, LAYOUT.head_range) == (range(1, 3), range(2, 4))
    assert LAYOUT.layers[0].planes[1] == RowPlane(0, 10 * 8 * 2 * 16, 8 * 2 * 16, 2 * 16, 16, 16)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"block_tokens": 0}, "block_tokens must be"),
        ({"block_tokens": 3}, "block_tokens 3 does not divide chunk_tokens 16"),
        ({"block_tokens": 32}, "block_tokens 32"),
        ({"block_count": 0}, "block_count"),
        ({"block_count": 11}, r"layers\[0\].planes\[1\] ends at byte"),
        ({"layers": ()}, "layers"),
        ({"first_layer": 3}, r"layers \[3, 5\) are not within the model's 4"),
        ({"first_layer": -1}, "first_layer"),
        ({"first_head": 3}, r"heads \[3, 5\) are not within the model's 4"),
        ({"head_count": 0}, "head_count"),
        ({"handle_sizes": (5120,)}, r"layers\[1\].planes\[0\].handle 1 does not exist"),
        ({"handle_sizes": (5120, 5119)}, r"layers\[1\].planes\[1\] ends at byte 5120, but handle 1 has 5119"),
        ({"handle_sizes": (5120, 0)}, r"handle_sizes\[1\]"),
        ({"layers": (LayerLayout(()),)}, r"layers\[0\].planes must be 2, got 0"),
        ({"layers": (LayerLayout(LAYOUT.layers[0].planes, LAYOUT.layers[0].planes),)}, r"layers\[0\].scales must be 0"),
    ],
)
def test_bad_layouts_are_refused_naming_the_argument(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        replace(LAYOUT, **changes).validate(SPEC)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"row_bytes": 8}, "row_bytes must be 16, got 8"),
        ({"offset_bytes": -16}, "offset_bytes must be"),
        ({"offset_bytes": 1}, "offset_bytes must be a multiple of 2"),
        ({"offset_bytes": 2576}, "ends at byte"),
        ({"token_stride_bytes": 33}, "token_stride_bytes must be a multiple of 2"),
        ({"token_stride_bytes": 0}, "token_stride_bytes must be > 0"),
        ({"head_stride_bytes": 0}, "head_stride_bytes must be > 0"),
        ({"block_stride_bytes": -256}, "block_stride_bytes must be"),
        ({"handle": 2}, "handle 2 does not exist"),
        ({"head_stride_bytes": 14}, r"layers\[1\].planes\[1\] and layers\[1\].planes\[1\] overlap"),
        ({"token_stride_bytes": 16}, "overlap"),
        ({"offset_bytes": 0}, r"layers\[1\].planes\[0\] and layers\[1\].planes\[1\] overlap"),
        ({"handle": 0}, r"layers\[0\].planes\[1\] and layers\[1\].planes\[1\] overlap"),
    ],
)
def test_bad_planes_are_refused_naming_the_argument(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        with_plane(LAYOUT, 1, 1, **changes).validate(SPEC)


def test_interleaved_rows_are_no_overlap_unless_they_touch() -> None:
    layout = lightllm_layout(SPEC, range(4), range(2), 4, 8)
    layout.validate(SPEC)
    with pytest.raises(InvalidRequest, match="overlap"):
        with_plane(layout, 2, 1, offset_bytes=layout.layers[2].planes[1].offset_bytes - 2).validate(SPEC)


def test_layers_inside_of_blocks_are_no_overlap() -> None:
    """One tensor [block][layer][k, v][token][head][dim], as engines have it whose cache is allocated across layers."""
    token, plane = 4 * 16, 8 * 4 * 16
    layers = tuple(
        LayerLayout(tuple(RowPlane(0, (2 * n + p) * plane, 8 * plane, token, 16, 16) for p in range(2)))
        for n in range(4)
    )
    layout = EngineLayout(8, 5, layers, 0, 0, 4, (5 * 8 * plane,))
    layout.validate(SPEC)
    with pytest.raises(InvalidRequest, match=r"layers\[2\].planes\[1\] and layers\[3\].planes\[0\] overlap"):
        with_plane(layout, 3, 0, offset_bytes=6 * plane - 2).validate(SPEC)


def test_scales_come_for_every_plane_or_not_at_all() -> None:
    layout = lightllm_quantized_layout(QUANTIZED, range(4), range(4), 8, 4)
    layout.validate(QUANTIZED)
    assert layout.holds_codec_rows(QUANTIZED)
    first = layout.layers[0]
    for layers, words in (
        ((first, *(replace(layer, scales=()) for layer in layout.layers[1:])), "either all layers have scales or none"),
        ((replace(first, scales=first.scales[:1]), *layout.layers[1:]), r"layers\[0\].scales must be 2, got 1"),
        (tuple(replace(layer, scales=()) for layer in layout.layers), "row_bytes must be 16, got 8"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            replace(layout, layers=layers).validate(QUANTIZED)
    unquantized = vllm_hnd_layout(QUANTIZED, range(4), range(4), 8, 4)
    unquantized.validate(QUANTIZED)
    assert not unquantized.holds_codec_rows(QUANTIZED)


def test_opaque_cells_need_no_token_stride() -> None:
    layout = vllm_cpu_opaque_layout(OPAQUE, range(4), range(4), 8, 3)
    layout.validate(OPAQUE)
    assert (layout.rows_of_block(OPAQUE), LAYOUT.rows_of_block(SPEC)) == (1, 8)
    with pytest.raises(InvalidRequest, match=r"block_tokens 16 is not opaque.block_tokens 8"):
        replace(layout, block_tokens=16).validate(OPAQUE)


def test_a_latent_cache_has_one_plane() -> None:
    spec = KeyspaceSpec("m", "r", (KvGroup.mla(3, 10),), Dtype.BF16, chunk_tokens=16)
    layout = mla_layout(spec, range(3), range(1), 16, 2)
    layout.validate(spec)
    assert [len(layer.planes) for layer in layout.layers] == [1, 1, 1]
    assert layout.layers[1].planes[0] == RowPlane(0, 640, 320, 20, 20, 20)
    with pytest.raises(InvalidRequest, match="planes must be 1, got 2"):
        replace(contiguous_layout(SPEC, range(3), range(1), 16, 2)).validate(spec)


def test_a_stride_along_one_item_does_not_matter() -> None:
    layout = contiguous_layout(SPEC, range(1), range(1), 1, 4)
    with_plane(layout, 0, 0, token_stride_bytes=0, head_stride_bytes=0).validate(SPEC)
