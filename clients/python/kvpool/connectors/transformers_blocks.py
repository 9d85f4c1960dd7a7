"""The engine's own KV blocks, in memory that a gpuagent can map, and their way into and out of transformers' caches.

One tensor [blocks][layers][k, v][heads][chunk tokens][head dim]: a block is one chunk. Everything of a chunk lies
together, and the rows of a head are contiguous both here and in a page of that head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.connectors.transformers_caches import growing_cache
from kvpool.connectors.transformers_model import torch_dtypes
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane

if TYPE_CHECKING:
    import torch
    from transformers import Cache, DynamicCache, PreTrainedModel


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


class PrefixLost(Exception):
    """A chunk did not come, when layers before had been used already: what was computed since is of no use."""


class KvBlocks:
    """Blocks over writable memory, which is exported as long as this object lives.

    On a GPU every copy is enqueued on the caller's current stream and nothing waits for it, so callers follow one
    another on one stream, or say so: `take_turn` before the first copy, `end_turn` after the last.
    """

    def __init__(self, spec: KeyspaceSpec, block_count: int, memory: memoryview | torch.Tensor) -> None:
        """memory: a tensor of bytes (uint8) if it is not the CPU's; at least block_count * block_bytes(spec) bytes."""
        import torch

        group = spec.group
        dtype = torch_dtypes()[spec.dtype]
        given = memory if isinstance(memory, torch.Tensor) else torch.frombuffer(memory, dtype=torch.uint8)
        elements = given[: block_count * block_bytes(spec)].view(dtype)
        shape = (block_count, group.layers, spec.planes, group.kv_heads, spec.chunk_tokens, group.head_dim)
        self._dtype = dtype
        self._shape = (group.layers, spec.planes, group.kv_heads, group.head_dim)
        self._blocks = _words(elements.view(shape))  # [blocks, layers, planes, heads, chunk tokens, words of a row]
        self._chunk_tokens = spec.chunk_tokens
        self._last_turn: torch.cuda.Event | None = None

    def close(self) -> None:
        """Let go of the memory; the blocks are gone."""
        import torch

        self._blocks = torch.empty(0)

    def take_turn(self) -> None:
        """The current stream comes after what was enqueued up to the last `end_turn`. Does nothing on the CPU."""
        import torch

        if self._last_turn is not None:
            torch.cuda.current_stream(self._blocks.device).wait_event(self._last_turn)

    def end_turn(self) -> None:
        """What the current stream has now is what the next turn comes after."""
        import torch

        if self._blocks.is_cuda:
            self._last_turn = self._last_turn or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._last_turn.record(torch.cuda.current_stream(self._blocks.device))

    def to_cache(
        self, blocks: Sequence[int], model: PreTrainedModel, wait_layers: Callable[[int], bool] = lambda layers: True
    ) -> DynamicCache:
        """A cache of the model that begins with the chunks in `blocks`; it shares no memory with them.

        Each layer is copied when the model first comes to it: until all were, the blocks keep their bytes. Before,
        wait_layers(so many leading layers) says whether they are in; PrefixLost comes out of the model if they are not.
        """
        cache = growing_cache(model)
        if not blocks:
            return cache
        prefix = _Prefix(self, self._chosen(blocks), len(blocks) * self._chunk_tokens, wait_layers)
        for number in range(len(cache.layers)):
            cache.layers[number] = block_layer_class()(prefix, number, self._dtype, model.device)
        return cache

    def joined(self, chosen: slice | torch.Tensor, number: int, plane: int, new: torch.Tensor) -> torch.Tensor:
        """[1, heads, tokens of the chosen blocks + new ones, head dim]: one layer's keys or values (plane 0, 1)."""
        import torch

        rows = self._blocks[:, number, plane]  # [blocks, heads, chunk tokens, words]
        rows = rows[chosen] if isinstance(chosen, slice) else rows.index_select(0, chosen)
        token_count = rows.shape[0] * self._chunk_tokens
        shape = (1, new.shape[1], token_count + new.shape[2], new.shape[3])
        whole = torch.empty(shape, dtype=self._dtype, device=new.device)
        rows = rows.transpose(0, 1)
        _words(whole)[0, :, :token_count].view(rows.shape).copy_(rows)
        whole[:, :, token_count:] = new
        return whole

    def empty_layers(self, row_count: int, token_count: int, device: torch.device) -> list[torch.Tensor]:
        """Of each layer [k and v, rows, heads, tokens, head dim], all zeros: also what is masked must be numbers."""
        import torch

        layer_count, planes, heads, head_dim = self._shape
        shape = (planes, row_count, heads, token_count, head_dim)
        return [torch.zeros(shape, dtype=self._dtype, device=device) for _ in range(layer_count)]

    def copy_out(self, blocks: Sequence[int], token_count: int, layers: Sequence[torch.Tensor]) -> None:
        """Copy the first tokens of the chunks in `blocks` to where layers [k and v, heads, tokens, head dim] begin."""
        blocks = blocks[: -(-token_count // self._chunk_tokens)]
        chosen = self._chosen(blocks)
        for number, layer in enumerate(layers):
            for plane, target in enumerate(layer):
                rows = self._blocks[:, number, plane]  # [blocks, heads, chunk tokens, words]
                rows = rows[chosen] if isinstance(chosen, slice) else rows.index_select(0, chosen)
                whole = rows.transpose(0, 1).flatten(1, 2)[:, :token_count]
                target[:, :token_count].copy_(whole.view(self._dtype))

    def from_cache(
        self, cache: Cache, first_chunk: int, blocks: Sequence[int], *, row: int = 0, padding: int = 0
    ) -> None:
        """Copy chunks of one row of the cache, from first_chunk on, into blocks. padding: columns before its tokens."""
        chosen = self._chosen(blocks)
        first = padding + first_chunk * self._chunk_tokens
        tokens = slice(first, first + len(blocks) * self._chunk_tokens)
        for number, layer in enumerate(cache.layers):
            for plane, rows in enumerate((layer.keys, layer.values)):
                # Bytes are copied from here on, so they have to be of the blocks' type and close together.
                words = _words(rows.to(self._dtype).contiguous())[row, :, tokens]
                chunks = words.view(-1, len(blocks), self._chunk_tokens, words.shape[-1]).transpose(0, 1)
                if isinstance(chosen, slice):
                    self._blocks[chosen, number, plane] = chunks
                else:
                    self._blocks[:, number, plane].index_copy_(0, chosen, chunks.to(self._blocks.device))

    def _chosen(self, blocks: Sequence[int]) -> slice | torch.Tensor:
        """An index along the first dimension: neighbours are copied as they are, others by number."""
        import torch

        if list(blocks) == list(range(blocks[0], blocks[0] + len(blocks))):
            return slice(blocks[0], blocks[0] + len(blocks))
        numbers = torch.tensor(list(blocks), dtype=torch.long)
        if not self._blocks.is_cuda:
            return numbers
        # From pageable memory the copy would wait for all that the stream has to do.
        return numbers.pin_memory().to(self._blocks.device, non_blocking=True)


class _Prefix:
    """Chunks in blocks as the layers of one cache need them."""

    def __init__(
        self, blocks: KvBlocks, chosen: slice | torch.Tensor, token_count: int, wait_layers: Callable[[int], bool]
    ) -> None:
        self.token_count = token_count
        self._blocks, self._chosen, self._wait_layers = blocks, chosen, wait_layers

    def joined(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer with new ones behind. Raises PrefixLost."""
        if not self._wait_layers(number + 1):
            raise PrefixLost
        return self._blocks.joined(self._chosen, number, 0, keys), self._blocks.joined(self._chosen, number, 1, values)


@functools.cache
def block_layer_class() -> type[Any]:
    """A layer of a DynamicCache that begins with chunks in blocks, made when transformers is there."""
    from transformers.cache_utils import DynamicLayer

    class BlockLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not read
        """Takes its prefix from the blocks with the first update, which has to copy what it keeps anyway."""

        def __init__(self, prefix: _Prefix, number: int, dtype: torch.dtype, device: torch.device) -> None:
            super().__init__()
            self._prefix: _Prefix | None = prefix
            self._number = number
            self.dtype, self.device, self.is_initialized = dtype, device, True

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if self._prefix is None:
                result: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
                return result
            self.keys, self.values = self._prefix.joined(self._number, key_states, value_states)
            self._prefix = None
            return self.keys, self.values

        def get_seq_length(self, *args: Any) -> int:
            return self._prefix.token_count if self._prefix is not None else int(super().get_seq_length(*args))

    return BlockLayer


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Rows (contiguous) as 64-bit words along the last dimension if they divide: copies then take fewer steps."""
    import torch

    return rows if rows.shape[-1] * rows.element_size() % 8 else rows.view(torch.int64)
