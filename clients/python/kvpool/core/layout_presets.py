"""Layouts of known engines: each is data, and its function gives what a rank of that engine would register.

All take (spec, layers, heads, block_tokens, block_count): layers and heads of the model that the rank owns (see
`partition`), and the size of its cache. What they return is not validated yet: `EngineLayout.validate` refuses.

Shapes: L layers, B blocks, T tokens of a block, S = B * T token slots (T is 1 where an engine places each token on its
own), H heads of the rank, D row elements (MLA: 512 + 64 = 576, one head), G scales of a row. B counts blocks that the
engine keeps for padding. Rows are of the model's dtype unless the text says that they are quantized: then as the
keyspace's codec has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvpool.core.cache_axes import CacheAxes
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout

_CONTIGUOUS = CacheAxes(axes=("layer", "plane", "block", "token", "head"))
_PER_LAYER = CacheAxes(tensors_per=("layer",), axes=("plane", "block", "token", "head"))
_VLLM_HND = CacheAxes(tensors_per=("layer",), axes=("plane", "block", "head", "token"))
_VLLM_BLOCKS_NHD = CacheAxes(tensors_per=("layer",), axes=("block", "plane", "token", "head"))
_VLLM_BLOCKS_HND = CacheAxes(tensors_per=("layer",), axes=("block", "plane", "head", "token"))
_VLLM_LBNHC = CacheAxes(tensors_per=("layer",), axes=("block", "token", "head", "plane"))
_VLLM_LBHNC = CacheAxes(tensors_per=("layer",), axes=("block", "head", "token", "plane"))
_VLLM_BLHNC = CacheAxes(axes=("block", "layer", "head", "token", "plane"))
_VLLM_BHLNC = CacheAxes(axes=("block", "head", "layer", "token", "plane"))
_VLLM_CPU = CacheAxes(tensors_per=("layer",), axes=("block", "head"))
_SGLANG = CacheAxes(tensors_per=("plane", "layer"), axes=("block", "token", "head"))
_LIGHTLLM = CacheAxes(axes=("layer", "block", "token", "plane", "head"))
_LIGHTLLM_QUANTIZED = CacheAxes(axes=("layer", "block", "token", "plane", "head"), scales_apart=True)
_ROWS_WITH_SCALES = CacheAxes(axes=("layer", "plane", "block", "token", "head"), scales_behind="head")
_BLOCKS_WITH_SCALES = CacheAxes(tensors_per=("layer",), axes=("plane", "block", "token", "head"), scales_behind="block")

LAYOUTS: Mapping[str, CacheAxes] = MappingProxyType(
    {
        "contiguous": _CONTIGUOUS,
        "vllm": _PER_LAYER,
        "vllm_hnd": _VLLM_HND,
        "vllm_blocks_nhd": _VLLM_BLOCKS_NHD,
        "vllm_blocks_hnd": _VLLM_BLOCKS_HND,
        "vllm_lbnhc": _VLLM_LBNHC,
        "vllm_lbhnc": _VLLM_LBHNC,
        "vllm_blhnc": _VLLM_BLHNC,
        "vllm_bhlnc": _VLLM_BHLNC,
        "sglang": _SGLANG,
        "mla": _PER_LAYER,
    }
)
"""By the names that PagedCache takes; the function beside each says what its tensors look like."""


def contiguous_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """One tensor [L, 2, S, H, D]; MLA [L, S, D]. What a plain dense cache looks like."""
    return _CONTIGUOUS.layout(spec, layers, heads, block_tokens, block_count)


def vllm_nhd_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM (FlashAttention), NHD: a tensor [2, B, T, H, D] for each layer."""
    return _PER_LAYER.layout(spec, layers, heads, block_tokens, block_count)


def vllm_hnd_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM (FlashAttention), HND: a tensor [2, B, T, H, D] for each layer, in memory [2, B, H, T, D]."""
    return _VLLM_HND.layout(spec, layers, heads, block_tokens, block_count)


def vllm_blocks_nhd_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM (FlashInfer, Triton), NHD: a tensor [B, 2, T, H, D] for each layer."""
    return _VLLM_BLOCKS_NHD.layout(spec, layers, heads, block_tokens, block_count)


def vllm_blocks_hnd_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM (FlashInfer, Triton), HND: a tensor [B, 2, T, H, D] for each layer, in memory [B, 2, H, T, D]."""
    return _VLLM_BLOCKS_HND.layout(spec, layers, heads, block_tokens, block_count)


def vllm_lbnhc_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM 0.32, LBNHC: a tensor [B, T, H, 2 D] for each layer, K and V of a token and head side by side."""
    return _VLLM_LBNHC.layout(spec, layers, heads, block_tokens, block_count)


def vllm_lbhnc_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM 0.32, LBHNC: a tensor for each layer, in memory [B, H, T, 2 D]."""
    return _VLLM_LBHNC.layout(spec, layers, heads, block_tokens, block_count)


def vllm_blhnc_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM 0.32, BLHNC: one allocation, in memory [B, L, H, T, 2 D]. At equal TP a page is one run a block."""
    return _VLLM_BLHNC.layout(spec, layers, heads, block_tokens, block_count)


def vllm_bhlnc_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM 0.32, BHLNC: one allocation, in memory [B, H, L, T, 2 D]."""
    return _VLLM_BHLNC.layout(spec, layers, heads, block_tokens, block_count)


def vllm_cpu_opaque_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """vLLM's CPU kernels: a tensor [B, H, T, 2 D] for each layer, whose cells [T, 2 D] hold tiles of K and then V and
    cannot be taken apart."""
    return _VLLM_CPU.layout(spec, layers, heads, block_tokens, block_count)


def sglang_layout(spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int) -> EngineLayout:
    """SGLang: tensors [S, H, D], one for K and one for V of each layer, all K registered first."""
    return _SGLANG.layout(spec, layers, heads, block_tokens, block_count)


def lightllm_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """LightLLM: one tensor [L, S, 2 H, D], K heads before V heads in each token. T is 1 there."""
    return _LIGHTLLM.layout(spec, layers, heads, block_tokens, block_count)


def lightllm_quantized_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """LightLLM with a quantized cache, the scales in a second tensor [L, S, 2 H, G] of the model's dtype.

    PPL int8 (codec INT8_GROUP8): [L, S, 2 H, D] int8, G = D / 8.
    PPL int4 (codec INT4_GROUP8): [L, S, 2 H, D / 2], two elements in a byte, G = D / 8.
    Only bytes are copied. Give such keyspaces a salt that names the engine's kernels unless they round exactly as
    `codecs` says.
    """
    return _LIGHTLLM_QUANTIZED.layout(spec, layers, heads, block_tokens, block_count)


def mla_layout(spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int) -> EngineLayout:
    """MLA in one tensor [L, S, 1, D] (LightLLM)."""
    return _CONTIGUOUS.layout(spec, layers, heads, block_tokens, block_count)


def mla_per_layer_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """MLA, a tensor for each layer: [S, 1, D] (SGLang), [B, T, D] (vLLM), which is the same memory."""
    return _PER_LAYER.layout(spec, layers, heads, block_tokens, block_count)


def lightllm_deepseek2_fp8_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """LightLLM, Deepseek2 fp8: one quantized tensor [L, S, 1, D + scale bytes], each row followed by its scale.

    A row has 578 bytes, 576 in fp8 and one scale of 2. As long as no codec has such a scale the keyspace
    is RAW with rows of 578 elements of FP8_E4M3 (`KvGroup.mla(layers, 578)`), copied whole.
    """
    return _ROWS_WITH_SCALES.layout(spec, layers, heads, block_tokens, block_count)


def inline_scales_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """One quantized tensor [L, 2, S, H, D + scale bytes]: each row of a token and head is followed by its scales."""
    return _ROWS_WITH_SCALES.layout(spec, layers, heads, block_tokens, block_count)


def block_scales_layout(
    spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
) -> EngineLayout:
    """A quantized tensor [2, B, T * H * D + T * H * G] for each layer: the rows of a block, then all their scales."""
    return _BLOCKS_WITH_SCALES.layout(spec, layers, heads, block_tokens, block_count)
