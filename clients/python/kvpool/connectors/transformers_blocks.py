"""The engine's own KV blocks, in memory that a gpuagent can map, and their way into and out of transformers' caches.

One tensor [blocks][layers][k, v][heads][chunk tokens][head dim]: a block is one chunk. Everything of a chunk lies
together, and the rows of a head are contiguous both here and in a page of that head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpool.connectors.transformers_model import torch_dtypes
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel


def block_bytes(spec: KeyspaceSpec) -> int:
    """Bytes of one block."""
    return spec.group.layers * spec.group.kv_heads * spec.head_bytes


def block_layout(spec: KeyspaceSpec, block_count: int) -> EngineLayout:
    """The layout that the engine registers."""
    group, row_bytes = spec.group, spec.engine_row_bytes
    head_bytes = spec.chunk_tokens * row_bytes
    plane_bytes = group.kv_heads * head_bytes
    size_bytes = block_bytes(spec)
    layers = tuple(
        LayerLayout(
            tuple(
                RowPlane(0, (layer * spec.planes + plane) * plane_bytes, size_bytes, row_bytes, head_bytes, row_bytes)
                for plane in range(spec.planes)
            )
        )
        for layer in range(group.layers)
    )
    return EngineLayout(
        block_tokens=spec.chunk_tokens,
        block_count=block_count,
        layers=layers,
        first_layer=0,
        first_head=0,
        head_count=group.kv_heads,
        handle_sizes=(block_count * size_bytes,),
    )


class KvBlocks:
    """Blocks over a writable buffer, which is exported as long as this object lives."""

    def __init__(self, spec: KeyspaceSpec, block_count: int, memory: memoryview) -> None:
        import torch

        group = spec.group
        shape = (block_count, group.layers, spec.planes, group.kv_heads, spec.chunk_tokens, group.head_dim)
        elements = torch.frombuffer(memory, dtype=torch_dtypes()[spec.dtype], count=torch.Size(shape).numel())
        self._blocks: torch.Tensor = elements.view(shape)
        self._chunk_tokens = spec.chunk_tokens

    def close(self) -> None:
        """Let go of the memory; the blocks are gone."""
        import torch

        self._blocks = torch.empty(0)

    def to_cache(self, blocks: Sequence[int], model: PreTrainedModel) -> DynamicCache:
        """A cache of the model that begins with the chunks in `blocks`; it shares no memory with them."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        for number, layer in enumerate(cache.layers if blocks else ()):
            # [1, heads, tokens, head dim]: one copy each, token ranges side by side.
            keys, values = (
                torch.cat([self._blocks[block, number, plane] for block in blocks], dim=1).unsqueeze(0)
                for plane in range(2)
            )
            keys, values = keys.to(model.device), values.to(model.device)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values  # `update` would copy them once more
        return cache

    def from_cache(self, cache: DynamicCache, chunk_index: int, block: int) -> None:
        """Copy one chunk of the cache's first sequence into a block."""
        tokens = slice(chunk_index * self._chunk_tokens, (chunk_index + 1) * self._chunk_tokens)
        for number, layer in enumerate(cache.layers):
            self._blocks[block, number, 0].copy_(layer.keys[0, :, tokens])
            self._blocks[block, number, 1].copy_(layer.values[0, :, tokens])
