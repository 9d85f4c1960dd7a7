"""Engine caches as the engines themselves index them: real tensors, which know nothing of planes and strides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from tests.fixtures import layout_presets

Bytes = npt.NDArray[np.uint8]
Preset = Callable[..., EngineLayout]
RowsOf = Callable[[int, int, int, int], Bytes]
"""(local layer, plane, block id, token in the block) -> [heads, row bytes] view."""


@dataclass(frozen=True)
class Sizes:
    """Of a rank's tensors, under the letters of the presets' docstrings, but n layers; d and g are bytes of a row."""

    n: int
    p: int
    b: int
    t: int
    h: int
    d: int
    g: int

    @property
    def s(self) -> int:
        return self.b * self.t


@dataclass(frozen=True)
class Tensor:
    """shape as the engine sees it; order: which of these axes come first in memory (None: as they are)."""

    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None

    def of(self, memory: Bytes) -> Bytes:
        """The tensor in a handle's memory, which it fills."""
        if self.order is None:
            return memory.reshape(self.shape)
        return memory.reshape([self.shape[axis] for axis in self.order]).transpose(np.argsort(self.order))


@dataclass(frozen=True)
class EngineModel:
    """How one engine makes and indexes its cache: `row` and `scale` are views [heads, bytes]."""

    preset: Preset
    tensors: Callable[[Sizes], list[Tensor]]
    row: Callable[[list[Bytes], Sizes, int, int, int, int], Bytes]
    scale: Callable[[list[Bytes], Sizes, int, int, int, int], Bytes] | None = None


def _block_scales(x: list[Bytes], e: Sizes, layer: int, plane: int, block: int) -> tuple[Bytes, Bytes]:
    """Rows and scales of a block, [T, H, .] each."""
    cut = e.t * e.h * e.d
    rows, scales = x[layer][plane, block, :cut], x[layer][plane, block, cut:]
    return rows.reshape(e.t, e.h, e.d), scales.reshape(e.t, e.h, e.g)


MODELS = {
    "contiguous": EngineModel(
        layout_presets.contiguous_layout,
        lambda e: [Tensor((e.n, 2, e.s, e.h, e.d))],
        lambda x, e, n, p, b, t: x[0][n, p, b * e.t + t],
    ),
    "vllm_nhd": EngineModel(
        layout_presets.vllm_nhd_layout,
        lambda e: [Tensor((2, e.b, e.t, e.h, e.d))] * e.n,
        lambda x, e, n, p, b, t: x[n][p, b, t],
    ),
    "vllm_hnd": EngineModel(
        layout_presets.vllm_hnd_layout,
        lambda e: [Tensor((2, e.b, e.t, e.h, e.d), (0, 1, 3, 2, 4))] * e.n,
        lambda x, e, n, p, b, t: x[n][p, b, t],
    ),
    "vllm_blocks_nhd": EngineModel(
        layout_presets.vllm_blocks_nhd_layout,
        lambda e: [Tensor((e.b, 2, e.t, e.h, e.d))] * e.n,
        lambda x, e, n, p, b, t: x[n][b, p, t],
    ),
    "vllm_blocks_hnd": EngineModel(
        layout_presets.vllm_blocks_hnd_layout,
        lambda e: [Tensor((e.b, 2, e.t, e.h, e.d), (0, 1, 3, 2, 4))] * e.n,
        lambda x, e, n, p, b, t: x[n][b, p, t],
    ),
    "vllm_lbnhc": EngineModel(
        layout_presets.vllm_lbnhc_layout,
        lambda e: [Tensor((e.b, e.t, e.h, 2 * e.d))] * e.n,
        lambda x, e, n, p, b, t: x[n][b, t, :, p * e.d : (p + 1) * e.d],
    ),
    "vllm_lbhnc": EngineModel(
        layout_presets.vllm_lbhnc_layout,
        lambda e: [Tensor((e.b, e.t, e.h, 2 * e.d), (0, 2, 1, 3))] * e.n,
        lambda x, e, n, p, b, t: x[n][b, t, :, p * e.d : (p + 1) * e.d],
    ),
    "vllm_blhnc": EngineModel(
        layout_presets.vllm_blhnc_layout,
        lambda e: [Tensor((e.n, e.b, e.t, e.h, 2 * e.d), (1, 0, 3, 2, 4))],
        lambda x, e, n, p, b, t: x[0][n, b, t, :, p * e.d : (p + 1) * e.d],
    ),
    "vllm_bhlnc": EngineModel(
        layout_presets.vllm_bhlnc_layout,
        lambda e: [Tensor((e.n, e.b, e.t, e.h, 2 * e.d), (1, 3, 0, 2, 4))],
        lambda x, e, n, p, b, t: x[0][n, b, t, :, p * e.d : (p + 1) * e.d],
    ),
    "sglang": EngineModel(
        layout_presets.sglang_layout,
        lambda e: [Tensor((e.s, e.h, e.d))] * (2 * e.n),
        lambda x, e, n, p, b, t: (x[: e.n], x[e.n :])[p][n][b * e.t + t],
    ),
    "lightllm": EngineModel(
        layout_presets.lightllm_layout,
        lambda e: [Tensor((e.n, e.s, 2 * e.h, e.d))],
        lambda x, e, n, p, b, t: x[0][n, b * e.t + t, p * e.h : (p + 1) * e.h],
    ),
    "lightllm_quantized": EngineModel(
        layout_presets.lightllm_quantized_layout,
        lambda e: [Tensor((e.n, e.s, 2 * e.h, e.d)), Tensor((e.n, e.s, 2 * e.h, e.g))],
        lambda x, e, n, p, b, t: x[0][n, b * e.t + t, p * e.h : (p + 1) * e.h],
        lambda x, e, n, p, b, t: x[1][n, b * e.t + t, p * e.h : (p + 1) * e.h],
    ),
    "inline_scales": EngineModel(
        layout_presets.inline_scales_layout,
        lambda e: [Tensor((e.n, 2, e.s, e.h, e.d + e.g))],
        lambda x, e, n, p, b, t: x[0][n, p, b * e.t + t, :, : e.d],
        lambda x, e, n, p, b, t: x[0][n, p, b * e.t + t, :, e.d :],
    ),
    "block_scales": EngineModel(
        layout_presets.block_scales_layout,
        lambda e: [Tensor((e.p, e.b, e.t * e.h * (e.d + e.g)))] * e.n,
        lambda x, e, n, p, b, t: _block_scales(x, e, n, p, b)[0][t],
        lambda x, e, n, p, b, t: _block_scales(x, e, n, p, b)[1][t],
    ),
    "mla": EngineModel(
        layout_presets.mla_layout,
        lambda e: [Tensor((e.n, e.s, 1, e.d))],
        lambda x, e, n, p, b, t: x[0][n, b * e.t + t],
    ),
    "sglang_mla": EngineModel(
        layout_presets.mla_per_layer_layout,
        lambda e: [Tensor((e.s, 1, e.d))] * e.n,
        lambda x, e, n, p, b, t: x[n][b * e.t + t],
    ),
    "vllm_mla": EngineModel(
        layout_presets.mla_per_layer_layout,
        lambda e: [Tensor((e.b, e.t, e.d))] * e.n,
        lambda x, e, n, p, b, t: x[n][b, t, np.newaxis],
    ),
    "lightllm_deepseek2_fp8": EngineModel(
        layout_presets.lightllm_deepseek2_fp8_layout,
        lambda e: [Tensor((e.n, e.s, 1, e.d + e.g))],
        lambda x, e, n, p, b, t: x[0][n, b * e.t + t, :, : e.d],
        lambda x, e, n, p, b, t: x[0][n, b * e.t + t, :, e.d :],
    ),
    "vllm_cpu_opaque": EngineModel(
        layout_presets.vllm_cpu_opaque_layout,
        lambda e: [Tensor((e.b, e.h, e.d))] * e.n,
        lambda x, e, n, p, b, t: x[n][b],
    ),
}


@dataclass
class EngineCache:
    layout: EngineLayout
    handles: list[Bytes]
    rows: RowsOf
    scales: RowsOf | None = None


def make_cache(
    preset: str, spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int, fill: Any
) -> EngineCache:
    """A cache full of noise from `fill` (a numpy Generator)."""
    model = MODELS[preset]
    layout = model.preset(spec, layers, heads, block_tokens, block_count)
    layout.validate(spec)
    native = model.scale is not None and spec.scale_row_bytes > 0
    row_bytes = spec.data_row_bytes if native else spec.engine_row_bytes
    scale_bytes = spec.scale_row_bytes if native else 0
    sizes = Sizes(len(layers), spec.planes, block_count, block_tokens, len(heads), row_bytes, scale_bytes)
    tensors = model.tensors(sizes)
    handles = [fill.integers(0, 256, np.prod(tensor.shape), dtype=np.uint8) for tensor in tensors]
    views = [tensor.of(handle) for tensor, handle in zip(tensors, handles, strict=True)]
    scale = model.scale
    return EngineCache(
        layout,
        handles,
        lambda *place: model.row(views, sizes, *place),
        (lambda *place: scale(views, sizes, *place)) if native and scale else None,
    )
