"""Engine caches as the engines themselves index them: a view that knows nothing of planes and strides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core import layout_presets
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout

Bytes = npt.NDArray[np.uint8]
RowsOf = Callable[[int, int, int, int], Bytes]
"""(local layer, plane, block id, token in the block) -> [heads, row bytes] view."""

PRESETS: dict[str, Callable[..., EngineLayout]] = {
    "contiguous": layout_presets.contiguous_layout,
    "vllm_nhd": layout_presets.vllm_nhd_layout,
    "vllm_hnd": layout_presets.vllm_hnd_layout,
    "sglang": layout_presets.sglang_layout,
    "lightllm": layout_presets.lightllm_layout,
    "mla": layout_presets.mla_layout,
    "vllm_cpu_opaque": layout_presets.vllm_cpu_opaque_layout,
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
    layout = PRESETS[preset](spec, layers, heads, block_tokens, block_count)
    layout.validate(spec)
    handles = [fill.integers(0, 256, size, dtype=np.uint8) for size in layout.handle_sizes]
    native = preset == "lightllm" and spec.scale_row_bytes > 0
    row_bytes = spec.data_row_bytes if native else spec.engine_row_bytes
    rows = _indexing(preset, handles, len(layers), len(heads), block_tokens, block_count, row_bytes)
    if not native:
        return EngineCache(layout, handles, rows)
    scales = _indexing(preset, handles[1:], len(layers), len(heads), block_tokens, block_count, spec.scale_row_bytes)
    return EngineCache(layout, handles, rows, scales)


def _indexing(preset: str, handles: list[Bytes], n_layers: int, h: int, t: int, b: int, d: int) -> RowsOf:
    """The engine's own indexing of its tensors, which `handles` are."""
    if preset == "contiguous":
        dense = handles[0].reshape(n_layers, 2, b * t, h, d)
        return lambda layer, plane, block, token: dense[layer, plane, block * t + token]
    if preset == "vllm_nhd":
        nhd = [handle.reshape(2, b, t, h, d) for handle in handles]
        return lambda layer, plane, block, token: nhd[layer][plane, block, token]
    if preset == "vllm_hnd":
        hnd = [handle.reshape(2, b, h, t, d) for handle in handles]
        return lambda layer, plane, block, token: hnd[layer][plane, block, :, token]
    if preset == "sglang":
        apart = [handle.reshape(b * t, h, d) for handle in handles]
        return lambda layer, plane, block, token: apart[plane * n_layers + layer][block * t + token]
    if preset == "lightllm":
        fused = handles[0].reshape(n_layers, b * t, 2 * h, d)
        return lambda layer, plane, block, token: fused[layer, block * t + token, plane * h : (plane + 1) * h]
    if preset == "mla":
        latent = handles[0].reshape(n_layers, b * t, 1, d)
        return lambda layer, plane, block, token: latent[layer, block * t + token]
    cells = [handle.reshape(b, h, d) for handle in handles]
    return lambda layer, plane, block, token: cells[layer][block]
