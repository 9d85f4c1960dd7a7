"""The CPU device: engine caches in shared memory, copied by numpy without the GIL.

numpy rather than torch: its strided and indexed copies run at the same speed here and the agent stays 270 MiB smaller.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core import page as page_format
from kvpool.core.errors import InvalidRequest
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, RowPlane
from kvpool.core.payload import payload_bytes, payload_shape
from kvpool_gpuagent.ports import BlockIds, EngineCache, EngineEvent, MappedHandle, PageCopy, StopFlag

Words = npt.NDArray[Any]
_WORD_TYPES = ((8, np.uint64), (4, np.uint32), (2, np.uint16), (1, np.uint8))


@dataclass(frozen=True, slots=True)
class _Plane:
    """[block_count, tokens, heads, words] view of one plane of one layer; tokens is 1 where a cell is a whole block."""

    view: Words


class CpuDevice:
    """Maps engine memory by descriptor and copies rows with numpy."""

    name = "cpu"

    def map_cache(
        self, spec: KeyspaceSpec, grid: ShardGrid, layout: EngineLayout, handles: Sequence[MappedHandle]
    ) -> EngineCache:
        """See ports.Device.map_cache. The descriptors are closed here in any case; the mappings keep the memory."""
        mappings: list[mmap.mmap] = []
        try:
            for index, handle in enumerate(handles):
                mappings.append(_map(index, handle))
        except BaseException:
            _close_all(mappings)
            raise
        finally:
            for handle in handles:
                if handle.descriptor is not None:
                    os.close(handle.descriptor)
        return CpuCache(spec, grid, layout, mappings)

    def register_segment(self, segment: memoryview) -> Callable[[], None]:
        """Shared memory needs no registration on a CPU."""
        return lambda: None

    def close(self) -> None:
        """Nothing is held between caches."""


def _map(index: int, handle: MappedHandle) -> mmap.mmap:
    if handle.descriptor is None:
        raise InvalidRequest(f"handles[{index}] is no shared memory; the CPU device maps only descriptors")
    available = os.fstat(handle.descriptor).st_size
    if handle.file_offset < 0 or handle.file_offset % mmap.ALLOCATIONGRANULARITY:
        raise InvalidRequest(f"handles[{index}].file_offset must be a multiple of {mmap.ALLOCATIONGRANULARITY}")
    # Touching a mapping past the end of its file kills the process, so the file's own size decides.
    if handle.size_bytes <= 0 or handle.file_offset + handle.size_bytes > available:
        raise InvalidRequest(
            f"handles[{index}].size_bytes is {handle.size_bytes} at offset {handle.file_offset}, "
            f"but its file has {available} bytes"
        )
    return mmap.mmap(handle.descriptor, handle.size_bytes, offset=handle.file_offset)


def _close_all(mappings: Sequence[mmap.mmap]) -> None:
    for mapping in mappings:
        mapping.close()


class CpuCache:
    """See ports.EngineCache. Rows are copied as the widest words that every stride, offset and row length allows."""

    def __init__(self, spec: KeyspaceSpec, grid: ShardGrid, layout: EngineLayout, mappings: list[mmap.mmap]) -> None:
        self._spec, self._grid, self._layout = spec, grid, layout
        self._mappings = mappings
        self._word_type = _widest_word(layout)
        self._layers = [tuple(self._plane(plane) for plane in layer.planes) for layer in layout.layers]

    def gather(self, copies: Sequence[PageCopy], after: EngineEvent | None, stop: StopFlag) -> int:
        """See ports.EngineCache.gather; a CPU engine's writes are in place when it asks, so `after` must be None."""
        if after is not None:
            raise InvalidRequest("a CPU cache has no device events; leave the event unset")
        for done, copy in enumerate(copies):
            if stop():
                return done
            rows = self._payload_rows(copy)
            layers = self._grid.layers_of(copy.key.shard)
            for position, layer in enumerate(layers):
                for plane, view in enumerate(self._shard_views(copy.key.shard, layer)):
                    _gather_blocks(view, copy.block_ids, rows[position, plane])
            page_format.seal(copy.page, copy.key, self._spec.codec, self._payload_bytes(copy.key.shard))
        return len(copies)

    def scatter(self, copy: PageCopy, first_layer: int, last_layer: int) -> None:
        """See ports.EngineCache.scatter."""
        rows = self._payload_rows(copy)
        layers = self._grid.layers_of(copy.key.shard)
        for layer in range(max(first_layer, layers.start), min(last_layer, layers.stop)):
            for plane, view in enumerate(self._shard_views(copy.key.shard, layer)):
                _scatter_blocks(view, copy, rows[layer - layers.start, plane], self._layout.block_tokens)

    def close(self) -> None:
        """See ports.EngineCache.close."""
        self._layers = []
        mappings, self._mappings = self._mappings, []
        _close_all(mappings)

    def _payload_bytes(self, shard: int) -> int:
        return payload_bytes(self._spec, self._grid, shard)

    def _payload_rows(self, copy: PageCopy) -> Words:
        """[layers, planes, blocks, tokens of a block, heads, words] view of the page's payload."""
        shard = copy.key.shard
        size_bytes = self._payload_bytes(shard)
        flat = np.frombuffer(copy.page, dtype=np.uint8, count=size_bytes, offset=page_format.HEADER_BYTES)
        layers, planes, tokens, heads, row_bytes = payload_shape(self._spec, self._grid, shard)
        block_count = copy.block_ids.shape[0]
        words = row_bytes // self._word_type.itemsize
        # In an opaque keyspace `tokens` counts blocks, and a block is one cell.
        return flat.view(self._word_type).reshape(layers, planes, block_count, tokens // block_count, heads, words)

    def _shard_views(self, shard: int, layer: int) -> list[Words]:
        heads = self._grid.heads_of(shard)
        first = heads.start - self._layout.first_head
        planes = self._layers[layer - self._layout.first_layer]
        return [plane.view[:, :, first : first + len(heads)] for plane in planes]

    def _plane(self, plane: RowPlane) -> _Plane:
        layout, word_bytes = self._layout, self._word_type.itemsize
        tokens = 1 if self._spec.opaque is not None else layout.block_tokens
        base = np.frombuffer(self._mappings[plane.handle], dtype=np.uint8)[plane.offset_bytes :]
        usable = base.nbytes // word_bytes * word_bytes
        view = np.lib.stride_tricks.as_strided(
            base[:usable].view(self._word_type),
            shape=(layout.block_count, tokens, layout.head_count, plane.row_bytes // word_bytes),
            strides=(plane.block_stride_bytes, plane.token_stride_bytes, plane.head_stride_bytes, word_bytes),
        )
        return _Plane(view)


def _widest_word(layout: EngineLayout) -> np.dtype[Any]:
    quantities = [
        quantity
        for layer in layout.layers
        for plane in layer.planes
        for quantity in (
            plane.offset_bytes,
            plane.block_stride_bytes,
            plane.token_stride_bytes,
            plane.head_stride_bytes,
            plane.row_bytes,
        )
    ]
    for size, word_type in _WORD_TYPES:
        if all(quantity % size == 0 for quantity in quantities):
            return np.dtype(word_type)
    raise AssertionError("one byte divides everything")


def _runs(block_ids: BlockIds) -> list[tuple[int, int]]:
    """[first, last) positions of consecutive ascending block ids."""
    cuts = np.flatnonzero(np.diff(block_ids) != 1) + 1
    edges = [0, *cuts.tolist(), block_ids.shape[0]]
    return list(pairwise(edges))


def _gather_blocks(view: Words, block_ids: BlockIds, rows: Words) -> None:
    """rows [blocks, tokens, heads, words] = view[block_ids]."""
    runs = _runs(block_ids)
    if len(runs) * 4 > block_ids.shape[0]:
        rows[...] = view[block_ids]
        return
    for first, last in runs:
        start = int(block_ids[first])
        rows[first:last] = view[start : start + last - first]


def _scatter_blocks(view: Words, copy: PageCopy, rows: Words, block_tokens: int) -> None:
    """view[block_ids] = rows, leaving the first skip_tokens tokens of the chunk alone."""
    whole, part = divmod(copy.skip_tokens, block_tokens)
    if part:  # never in an opaque keyspace: the request was checked
        view[int(copy.block_ids[whole]), part:] = rows[whole, part:]
        whole += 1
    ids, rest = copy.block_ids[whole:], rows[whole:]
    if not ids.shape[0]:
        return
    runs = _runs(ids)
    if len(runs) * 4 > ids.shape[0]:
        view[ids] = rest
        return
    for first, last in runs:
        start = int(ids[first])
        view[start : start + last - first] = rest[first:last]
