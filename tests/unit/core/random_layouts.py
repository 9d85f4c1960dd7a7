"""Caches with axes in any order, gaps anywhere, and planes in one tensor or in many: more than any engine has."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from tests.unit.core.strategies import splits_of

Bytes = npt.NDArray[np.uint8]
SCALED = (Codec.INT8_GROUP8, Codec.INT4_GROUP8, Codec.FP8_E4M3)


@st.composite
def small_specs(draw: st.DrawFn) -> KeyspaceSpec:
    """Of few and small rows: multi-head, latent, quantized or opaque."""
    kind = draw(st.sampled_from(["heads", "latent", "scaled", "scaled latent", "opaque"]))
    layers, elements = draw(st.integers(1, 3)), 8 * draw(st.integers(1, 2))
    group = KvGroup.mla(layers, elements) if "latent" in kind else KvGroup(layers, draw(st.integers(1, 4)), elements)
    dtype = draw(st.sampled_from([Dtype.BF16, Dtype.FP8_E4M3, Dtype.FP32]))
    if kind == "opaque":
        opaque = OpaqueLayout("e", "l", "", draw(st.sampled_from([2, 8, 16])), draw(st.integers(1, 20)))
        return KeyspaceSpec("m", "r", (group,), dtype, chunk_tokens=16, payload=PayloadKind.OPAQUE, opaque=opaque)
    codec = Codec.RAW
    if "scaled" in kind:
        codec, dtype = draw(st.sampled_from(SCALED)), draw(st.sampled_from([Dtype.BF16, Dtype.FP32]))
    return KeyspaceSpec("m", "r", (group,), dtype, codec, chunk_tokens=16)


@st.composite
def small_grids(draw: st.DrawFn, spec: KeyspaceSpec) -> ShardGrid:
    heads = spec.group.kv_heads
    return ShardGrid(spec.group.layers, heads, draw(st.integers(1, spec.group.layers)), draw(splits_of(heads)))


@dataclass
class _Places:
    """offset and handle of each (layer, plane), strides of (block, token, head)."""

    handles: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    strides: tuple[int, int, int]
    handle_sizes: list[int]

    def plane(self, layer: int, plane: int, row_bytes: int, offset: int = 0, handle: int = 0) -> RowPlane:
        place = layer, plane
        return RowPlane(int(self.handles[place]) + handle, int(self.offsets[place]) + offset, *self.strides, row_bytes)


def _places(draw: Any, counts: dict[str, int], cell_bytes: int, unit: int) -> _Places:
    """Nest the axes in any order, with or without gaps; layers and planes may have handles of their own."""
    apart = draw(st.sets(st.sampled_from(["layer", "plane"])))
    inner = [name for name in draw(st.permutations(list(counts))) if name not in apart]
    strides, extent = dict.fromkeys(counts, 0), cell_bytes
    for name in inner:
        extent += unit * draw(st.sampled_from([0, 0, 0, 1, 5]))
        strides[name] = extent
        extent *= counts[name]
    first = unit * draw(st.integers(0, 2))
    layer, plane = np.indices((counts["layer"], counts["plane"]))
    handles = np.zeros_like(layer)
    if "layer" in apart:
        handles += layer * (counts["plane"] if "plane" in apart else 1)
    if "plane" in apart:
        handles += plane
    return _Places(
        handles=handles,
        offsets=first + layer * strides["layer"] + plane * strides["plane"],
        strides=(strides["block"], strides["token"], strides["head"]),
        handle_sizes=[first + extent] * (int(handles.max()) + 1),
    )


@st.composite
def random_layouts(draw: st.DrawFn, spec: KeyspaceSpec, *, native: bool = True) -> EngineLayout:
    """A whole model's cache. native: if the codec has scales, the cache holds them too: apart, or behind each row."""
    block_tokens = spec.opaque.block_tokens if spec.opaque else draw(st.sampled_from([1, 2, 8, 16]))
    counts = {
        "layer": spec.group.layers,
        "plane": spec.planes,
        "block": 2 * spec.chunk_tokens // block_tokens + draw(st.integers(0, 2)),
        "token": 1 if spec.opaque else block_tokens,
        "head": spec.group.kv_heads,
    }
    scaled = native and spec.scale_row_bytes > 0
    data_bytes, scale_bytes = (spec.data_row_bytes if scaled else spec.engine_row_bytes), spec.scale_row_bytes
    inline = scaled and draw(st.booleans())
    scale_at = -(-data_bytes // 4) * 4 if inline else 0
    data = _places(draw, counts, -(-(scale_at + scale_bytes) // 4) * 4 if inline else data_bytes, 4)
    scales = data if inline or not scaled else _places(draw, counts, scale_bytes, 4)
    first_scale_handle = 0 if inline else len(data.handle_sizes)
    layers = tuple(
        LayerLayout(
            tuple(data.plane(layer, plane, data_bytes) for plane in range(spec.planes)),
            tuple(
                scales.plane(layer, plane, scale_bytes, scale_at, first_scale_handle)
                for plane in range(spec.planes if scaled else 0)
            ),
        )
        for layer in range(spec.group.layers)
    )
    sizes = data.handle_sizes + ([] if scales is data else scales.handle_sizes)
    return EngineLayout(block_tokens, counts["block"], layers, 0, 0, spec.group.kv_heads, tuple(sizes))


def noise_of(layout: EngineLayout, noise: np.random.Generator) -> list[Bytes]:
    """Memory of each handle, full of noise."""
    return [noise.integers(0, 256, size, dtype=np.uint8) for size in layout.handle_sizes]
