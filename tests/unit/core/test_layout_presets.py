import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.core.cache_axes import CacheAxes
from kvpool.core.errors import InvalidRequest
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.layout import EngineLayout, RowPlane
from kvpool.core.plane_table import PlaneTable
from kvpool.core.reference import gather_payload_reference, scatter_payload_reference
from tests.fixtures.layout_presets import (
    block_scales_layout,
    inline_scales_layout,
    lightllm_layout,
    lightllm_quantized_layout,
    vllm_bhlnc_layout,
)
from tests.unit.core.engine_caches import MODELS, RowsOf, make_cache

Bytes = npt.NDArray[np.uint8]
HEADS, LATENT = KvGroup(6, 8, 16), KvGroup.mla(6, 576)
PLAIN = (
    "contiguous",
    "lightllm",
    "sglang",
    *(name for name in MODELS if name.startswith("vllm_") and "cpu" not in name),
)
MULTI_HEAD = tuple(name for name in PLAIN if "mla" not in name)
SCALED = ("lightllm_quantized", "inline_scales", "block_scales")
SCALED_CODECS = (Codec.INT8_GROUP8, Codec.INT4_GROUP8, Codec.FP8_E4M3)
MLA = ("mla", "sglang_mla", "vllm_mla", "lightllm_deepseek2_fp8")


def spec_of(group: KvGroup, dtype: Dtype, codec: Codec = Codec.RAW) -> KeyspaceSpec:
    return KeyspaceSpec("m", "r", (group,), dtype, codec, chunk_tokens=16)


OPAQUE = KeyspaceSpec(
    "m", "r", (HEADS,), Dtype.FP32, chunk_tokens=16,
    payload=PayloadKind.OPAQUE, opaque=OpaqueLayout("vllm", "cpu", "", 4, 4 * 2 * 16 * 4),
)  # fmt: skip
DEEPSEEK2_FP8 = spec_of(KvGroup.mla(6, 578), Dtype.FP8_E4M3)
CASES = [
    *((preset, spec_of(HEADS, Dtype.BF16)) for preset in MULTI_HEAD),
    *((preset, spec_of(HEADS, Dtype.FP8_E4M3)) for preset in MULTI_HEAD),  # static scales
    *((preset, spec_of(LATENT, Dtype.FP16)) for preset in MLA),
    *((preset, DEEPSEEK2_FP8) for preset in ("lightllm_deepseek2_fp8", "mla")),
    *((preset, spec_of(LATENT, Dtype.BF16, Codec.FP8_E4M3)) for preset in ("lightllm_deepseek2_fp8", "block_scales")),
    *((preset, spec_of(HEADS, Dtype.FP16, codec)) for codec in SCALED_CODECS for preset in SCALED),
    ("vllm_cpu_opaque", OPAQUE),
]


def place(row: Bytes, memory: Bytes) -> int:
    """Where a view begins in the memory that it is one of."""
    return int(row.__array_interface__["data"][0] - memory.__array_interface__["data"][0])


def check_rows(
    layout: EngineLayout,
    planes_of: Callable[[int], tuple[RowPlane, ...]],
    rows_of_block: int,
    rows: RowsOf,
    handles: list[Bytes],
) -> int:
    """Every row of the layout is the one that the engine's own indexing finds; returns how many."""
    count = 0
    for layer in range(len(layout.layers)):
        for number, plane in enumerate(planes_of(layer)):
            for block in range(layout.block_count):
                for token in range(rows_of_block):
                    for head, row in enumerate(rows(layer, number, block, token)):
                        at = plane.offset_bytes + block * plane.block_stride_bytes
                        at += token * plane.token_stride_bytes + head * plane.head_stride_bytes
                        assert row.nbytes == plane.row_bytes
                        assert place(row, handles[plane.handle]) == at
                        count += 1
    return count


@pytest.mark.parametrize("preset, spec", CASES)
@pytest.mark.parametrize("block_tokens", [1, 4])
def test_each_row_lies_where_the_engine_has_it(preset: str, spec: KeyspaceSpec, block_tokens: int) -> None:
    if spec.opaque and block_tokens == 1:
        block_tokens = spec.opaque.block_tokens
    heads = range(1) if spec.group.latent_dim else range(2, 4)
    cache = make_cache(preset, spec, range(2, 4), heads, block_tokens, 3, np.random.default_rng(1))
    layout = cache.layout
    rows_of_block = 1 if spec.opaque else block_tokens
    count = 2 * spec.planes * 3 * rows_of_block * len(heads)
    assert check_rows(layout, lambda n: layout.layers[n].planes, rows_of_block, cache.rows, cache.handles) == count
    assert [handle.size for handle in cache.handles] == list(layout.handle_sizes)
    if cache.scales is None:
        assert not any(layer.scales for layer in layout.layers)
    else:
        assert (
            check_rows(layout, lambda n: layout.layers[n].scales, rows_of_block, cache.scales, cache.handles) == count
        )


def test_every_preset_is_tested() -> None:
    assert {preset for preset, _ in CASES} == set(MODELS)


@pytest.mark.parametrize("preset, spec", CASES)
def test_what_one_engine_writes_another_reads(preset: str, spec: KeyspaceSpec) -> None:
    """Through pages, into the next preset of the table that can hold the same rows."""
    fitting = [other for other, its in CASES if its == spec]
    other = fitting[(fitting.index(preset) + 1) % len(fitting)]
    assert other != preset or spec.opaque
    noise = np.random.default_rng(2)
    heads = spec.group.kv_heads
    grid = ShardGrid(6, heads, 2, (min(heads, 4),))
    block_tokens = spec.opaque.block_tokens if spec.opaque else 8
    there = spec.opaque.block_tokens if spec.opaque else 2
    writer = make_cache(preset, spec, range(6), range(heads), block_tokens, 5, noise)
    reader = make_cache(other, spec, range(6), range(heads), there, 19, noise)
    ids = noise.permutation(5)[: 16 // block_tokens].astype(np.int64)
    new_ids = noise.permutation(19)[: 16 // there].astype(np.int64)
    for shard in range(grid.shard_count):
        payload = gather_payload_reference(spec, grid, shard, writer.layout, writer.handles, ids)
        scatter_payload_reference(spec, grid, shard, reader.layout, reader.handles, new_ids, payload)
    assert (writer.scales is None) == (reader.scales is None)
    for layer in range(6):
        for plane in range(spec.planes):
            for position in range(spec.positions):
                old = divmod(position, 1 if spec.opaque else block_tokens)
                new = divmod(position, 1 if spec.opaque else there)
                for mine, its in ((writer.rows, reader.rows), (writer.scales, reader.scales)):
                    if mine and its:
                        row = mine(layer, plane, int(ids[old[0]]), old[1])
                        assert np.array_equal(row, its(layer, plane, int(new_ids[new[0]]), new[1]))


def test_a_cache_that_is_not_quantized_leaves_a_codec_to_the_device() -> None:
    spec = spec_of(HEADS, Dtype.BF16, Codec.INT8_GROUP8)
    layout = lightllm_layout(spec, range(6), range(8), 1, 20)
    layout.validate(spec)
    assert not layout.holds_codec_rows(spec)
    assert lightllm_quantized_layout(spec, range(6), range(8), 1, 20).holds_codec_rows(spec)


def test_a_new_layout_is_new_data() -> None:
    """TensorRT-LLM's pool [B, L, 2, H, T, D], and one where a token's heads come before its scales."""
    spec = spec_of(HEADS, Dtype.BF16)
    CacheAxes(axes=("block", "layer", "plane", "head", "token")).layout(spec, range(6), range(8), 4, 5).validate(spec)
    scaled = spec_of(HEADS, Dtype.BF16, Codec.FP8_E4M3)
    axes = CacheAxes(tensors_per=("layer", "plane"), axes=("block", "token", "head"), scales_behind="token")
    layout = axes.layout(scaled, range(6), range(8), 4, 5)
    layout.validate(scaled)
    token = 8 * (16 + 4)
    assert layout.layers[1].planes[1] == RowPlane(3, 0, 4 * token, token, 16, 16)
    assert layout.layers[1].scales[1] == RowPlane(3, 8 * 16, 4 * token, token, 4, 4)


@pytest.mark.parametrize("preset", [inline_scales_layout, block_scales_layout])
def test_scales_that_touch_their_rows_are_refused(preset: Callable[..., EngineLayout]) -> None:
    spec = spec_of(HEADS, Dtype.BF16, Codec.FP8_E4M3)
    layout = preset(spec, range(6), range(8), 4, 5)
    layout.validate(spec)
    last = layout.layers[5]
    moved = replace(last.scales[0], offset_bytes=last.scales[0].offset_bytes - 4)
    layers = (*layout.layers[:5], replace(last, scales=(moved, last.scales[1])))
    with pytest.raises(InvalidRequest, match=r"layers\[5\].planes\[0\] and layers\[5\].scales\[0\] overlap"):
        replace(layout, layers=layers).validate(spec)
    misaligned = replace(last.scales[0], offset_bytes=last.scales[0].offset_bytes - 2)
    layers = (*layout.layers[:5], replace(last, scales=(misaligned, last.scales[1])))
    with pytest.raises(InvalidRequest, match=r"layers\[5\].scales\[0\].offset_bytes must be a multiple of 4"):
        replace(layout, layers=layers).validate(spec)


@pytest.mark.parametrize(
    "preset, codec",
    [(vllm_bhlnc_layout, Codec.RAW), (inline_scales_layout, Codec.FP8_E4M3), (lightllm_layout, Codec.RAW)],
)
def test_many_layers_are_checked_quickly(preset: Callable[..., EngineLayout], codec: Codec) -> None:
    """Also where the rows of all planes interleave, and every pair of planes has to be looked at."""
    spec = spec_of(KvGroup(128, 8, 128), Dtype.BF16, codec)
    layout = preset(spec, range(128), range(8), 16, 50_000)
    began = time.process_time()
    layout.validate(spec)
    PlaneTable.of(spec, ShardGrid.of(spec), layout, [1 << 40] * len(layout.handle_sizes))
    assert time.process_time() - began < 1.0  # seconds; takes a tenth
