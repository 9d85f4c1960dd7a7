"""Layouts of known engines, as data. Each function returns what an engine of that kind would register.

Common arguments: `layers` and `heads` of the model that the rank owns; `block_tokens` and `block_count` of its cache.
L, B, S, T, H, D below: layers, blocks, token slots (B * T), tokens of a block, heads of the rank, row elements. What a
preset returns is not validated yet: `EngineLayout.validate` refuses.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane


def _engine_layout(
    layers: range,
    heads: range,
    block_tokens: int,
    block_count: int,
    layer_layouts: Iterable[LayerLayout],
    handle_sizes: Iterable[int],
) -> EngineLayout:
    return EngineLayout(
        block_tokens=block_tokens,
        block_count=block_count,
        layers=tuple(layer_layouts),
        first_layer=layers.start,
        first_head=heads.start,
        head_count=len(heads),
        handle_sizes=tuple(handle_sizes),
    )


def _token_major(handle: int, offset: int, token_bytes: int, row_bytes: int, block_tokens: int) -> RowPlane:
    """[S, H, D] inside of tokens of token_bytes."""
    return RowPlane(handle, offset, block_tokens * token_bytes, token_bytes, row_bytes, row_bytes)


def contiguous_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """One tensor [L][k, v][S][H][D]; MLA [L][S][latent]. What a plain dense cache looks like."""
    row_bytes = spec.engine_row_bytes
    token_bytes = len(heads) * row_bytes
    plane_bytes = block_count * block_tokens * token_bytes
    layouts = (
        LayerLayout(
            tuple(
                _token_major(0, (layer * spec.planes + plane) * plane_bytes, token_bytes, row_bytes, block_tokens)
                for plane in range(spec.planes)
            )
        )
        for layer in range(len(layers))
    )
    return _engine_layout(layers, heads, block_tokens, block_count, layouts, [len(layers) * spec.planes * plane_bytes])


def vllm_nhd_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM, NHD: one tensor [k, v][B][T][H][D] a layer."""
    row_bytes = spec.engine_row_bytes
    token_bytes = len(heads) * row_bytes
    plane_bytes = block_count * block_tokens * token_bytes
    layouts = (
        LayerLayout(
            tuple(_token_major(layer, plane * plane_bytes, token_bytes, row_bytes, block_tokens) for plane in range(2))
        )
        for layer in range(len(layers))
    )
    return _engine_layout(layers, heads, block_tokens, block_count, layouts, [2 * plane_bytes] * len(layers))


def vllm_hnd_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM, HND: one tensor [k, v][B][H][T][D] a layer."""
    row_bytes = spec.engine_row_bytes
    head_bytes = block_tokens * row_bytes
    block_bytes = len(heads) * head_bytes
    layouts = (
        LayerLayout(
            tuple(
                RowPlane(layer, plane * block_count * block_bytes, block_bytes, row_bytes, head_bytes, row_bytes)
                for plane in range(2)
            )
        )
        for layer in range(len(layers))
    )
    sizes = [2 * block_count * block_bytes] * len(layers)
    return _engine_layout(layers, heads, block_tokens, block_count, layouts, sizes)


def sglang_layout(spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int) -> EngineLayout:
    """SGLang: separate K and V tensors [S][H][D], one of each a layer (all K first)."""
    row_bytes = spec.engine_row_bytes
    token_bytes = len(heads) * row_bytes
    layouts = (
        LayerLayout(
            tuple(
                _token_major(plane * len(layers) + layer, 0, token_bytes, row_bytes, block_tokens) for plane in range(2)
            )
        )
        for layer in range(len(layers))
    )
    sizes = [block_count * block_tokens * token_bytes] * (2 * len(layers))
    return _engine_layout(layers, heads, block_tokens, block_count, layouts, sizes)


def lightllm_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """LightLLM: one tensor [L][S][2H][D], K heads before V heads in each token.

    With a codec that has scales the cache is quantized itself: rows as in the payload, and scales in a second tensor
    [L][S][2H][scale groups].
    """
    native = spec.scale_row_bytes > 0
    data = _interleaved(
        0, spec.data_row_bytes if native else spec.engine_row_bytes, layers, heads, block_tokens, block_count
    )
    scales: list[tuple[RowPlane, ...]] = [()] * len(layers)
    token_slots = block_count * block_tokens
    sizes = [len(layers) * token_slots * 2 * len(heads) * data[0][0].row_bytes]
    if native:
        scales = _interleaved(1, spec.scale_row_bytes, layers, heads, block_tokens, block_count)
        sizes.append(len(layers) * token_slots * 2 * len(heads) * spec.scale_row_bytes)
    layouts = (LayerLayout(planes, layer_scales) for planes, layer_scales in zip(data, scales, strict=True))
    return _engine_layout(layers, heads, block_tokens, block_count, layouts, sizes)


def _interleaved(
    handle: int, row_bytes: int, layers: range, heads: range, block_tokens: int, block_count: int
) -> list[tuple[RowPlane, ...]]:
    """Planes of [L][S][2H][row] in one handle."""
    token_bytes = 2 * len(heads) * row_bytes
    layer_bytes = block_count * block_tokens * token_bytes
    return [
        tuple(
            _token_major(
                handle, layer * layer_bytes + plane * len(heads) * row_bytes, token_bytes, row_bytes, block_tokens
            )
            for plane in range(2)
        )
        for layer in range(len(layers))
    ]


def mla_layout(spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int) -> EngineLayout:
    """MLA: one tensor [L][S][1][latent]."""
    return contiguous_layout(spec, layers, heads, block_tokens, block_count)


def vllm_cpu_opaque_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM's CPU kernels: one tensor [B][H][cell] a layer, cells that tile K and cannot be taken apart."""
    cell_bytes = spec.engine_row_bytes
    block_bytes = len(heads) * cell_bytes
    layouts = (
        LayerLayout((RowPlane(layer, 0, block_bytes, 0, cell_bytes, cell_bytes),)) for layer in range(len(layers))
    )
    return _engine_layout(layers, heads, block_tokens, block_count, layouts, [block_count * block_bytes] * len(layers))
