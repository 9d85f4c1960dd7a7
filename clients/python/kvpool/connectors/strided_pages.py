"""Copies between pages of an engine's host memory and payloads, for any layout whose pages are chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvpool.core.errors import InvalidRequest
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, RowPlane
from kvpool.core.payload import ShardPayload

Bytes = npt.NDArray[np.uint8]


def bytes_of(tensor: Any) -> Bytes:
    """A CPU tensor's memory, [bytes] uint8, without a copy. raises: InvalidRequest unless it is contiguous."""
    import torch

    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise InvalidRequest(f"a contiguous tensor in host memory is needed, got one on {tensor.device}")
    found: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


class StridedPages:
    """Host memory as `layout` describes it: one handle whose blocks are chunks. Thread-safe.

    Each copy is one strided copy by numpy (two with scales), which lets go of the GIL.
    """

    def __init__(self, spec: KeyspaceSpec, layout: EngineLayout, memory: Bytes) -> None:
        """memory: [handle_sizes[0]] uint8, contiguous.

        raises: InvalidRequest for memory or a layout of another kind, PartitionRefused for layers and heads that are no
        union of shards.
        """
        if layout.block_tokens != spec.chunk_tokens:
            raise InvalidRequest(f"pages of {layout.block_tokens} tokens are no chunks of {spec.chunk_tokens}")
        if len(layout.handle_sizes) != 1 or memory.shape != layout.handle_sizes or memory.dtype != np.uint8:
            raise InvalidRequest(
                f"the layout has {layout.handle_sizes} bytes, the memory {memory.shape} of {memory.dtype}"
            )
        if not layout.holds_codec_rows(spec):
            raise InvalidRequest(f"the memory holds rows of {spec.dtype.name}, and only bytes are copied here")
        self._spec, self._layout, self._memory = spec, layout, memory
        self._grid = ShardGrid.of(spec)
        self.shards = self._grid.bitmap_for(layout.layer_range, layout.head_range)
        self._data = _RowStrides([layer.planes for layer in layout.layers])
        self._scales = _RowStrides([layer.scales for layer in layout.layers]) if layout.layers[0].scales else None

    @property
    def page_count(self) -> int:
        """Pages of the memory."""
        return self._layout.block_count

    def gather(self, page: int, shard: int, payload: memoryview) -> None:
        """Fill a payload from a page, of one of `shards`. raises: InvalidRequest for a page outside of the memory."""
        heads = self._grid.heads_of(shard)
        if heads.start < self._layout.head_range.start or heads.stop > self._layout.head_range.stop:
            raise InvalidRequest(f"shard {shard} has heads {heads}, the memory {self._layout.head_range}")
        for here, there in self._parts(page, shard, payload):
            np.copyto(there, here)

    def scatter(self, page: int, shard: int, payload: memoryview) -> None:
        """Write what the memory has of a payload to a page; the shard may be of another split. raises: as `gather`."""
        for here, there in self._parts(page, shard, payload):
            np.copyto(here, there)

    def _parts(self, page: int, shard: int, payload: memoryview) -> list[tuple[Bytes, Bytes]]:
        """(rows in the memory, rows in the payload) of data and scales, of equal shapes: of the rank's heads."""
        shape = ShardPayload.of(self._spec, self._grid, shard)
        if not 0 <= page < self._layout.block_count:
            raise InvalidRequest(f"page {page} is not one of the memory's {self._layout.block_count}")
        if payload.nbytes != shape.payload_bytes:
            raise InvalidRequest(f"a payload of {shape.payload_bytes} bytes was given {payload.nbytes}")
        rank = self._layout.head_range
        heads = range(max(shape.heads.start, rank.start), min(shape.heads.stop, rank.stop))
        if not len(heads) or not set(shape.layers) <= set(self._layout.layer_range):
            raise InvalidRequest(f"shard {shard} has no layers and heads of the memory; {self._grid.describe()}")
        flat = np.frombuffer(payload, dtype=np.uint8)
        first_layer = shape.layers.start - self._layout.first_layer
        chosen = slice(heads.start - shape.heads.start, heads.stop - shape.heads.start)
        parts = [(self._data, flat[: shape.data_bytes].reshape(shape.shape)[:, :, chosen])]
        if self._scales is not None:
            parts.append((self._scales, flat[shape.data_bytes :].reshape(shape.scale_shape)[:, :, chosen]))
        first = first_layer, heads.start - rank.start
        return [(rows.rows(self._memory, page, first, there.shape), there) for rows, there in parts]


class _RowStrides:
    """Distances between rows of one kind (data or scales)."""

    def __init__(self, layers: Sequence[Sequence[RowPlane]]) -> None:
        """raises: InvalidRequest unless layers, and K and V, follow each other at equal distances."""
        first = layers[0][0]
        self._first = first
        self._layer = layers[1][0].offset_bytes - first.offset_bytes if len(layers) > 1 else 0
        self._plane = layers[0][1].offset_bytes - first.offset_bytes if len(layers[0]) > 1 else 0
        for layer, planes in enumerate(layers):
            for number, plane in enumerate(planes):
                if plane.offset_bytes != first.offset_bytes + layer * self._layer + number * self._plane:
                    raise InvalidRequest(f"layer {layer} does not lie at the distance of the others")

    def rows(self, memory: Bytes, page: int, first: tuple[int, int], shape: tuple[int, ...]) -> Bytes:
        """[units, layers, heads, tokens of a unit, planes, row_bytes] of a page, from the rank's layer and head `first`
        on."""
        rows = self._first
        begin = rows.offset_bytes + page * rows.block_stride_bytes
        begin += first[0] * self._layer + first[1] * rows.head_stride_bytes
        token = rows.token_stride_bytes
        strides = (shape[3] * token, self._layer, rows.head_stride_bytes, token, self._plane, 1)
        return as_strided(memory[begin:], shape=shape, strides=strides)
