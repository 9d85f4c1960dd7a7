"""Rows of an engine's memory and of a payload seen as equal items, so that numpy moves much in one call and without
the GIL.

numpy lets go of the GIL only for calls of some hundred elements, so all planes that lie at equal distances are moved
together. What lies together on both sides is one item. A long item is a row of bytes; a short one is opaque (dtype
`V<n>`): one memmove, where a row of numbers takes an inner loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core.errors import InvalidRequest
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, RowPlane
from kvpool.core.payload import ShardPayload
from kvpool_gpuagent.ports import BlockIds

Bytes = npt.NDArray[np.uint8]
Items = npt.NDArray[Any]
_LONG_RUN_BLOCKS = 4  # from this mean length on, copying run by run beats indexing block by block
_LARGE_BLOCK_BYTES = 32 << 10  # such blocks are copied one by one: indexing would make a copy in between
_LONG_ITEM_BYTES = 2048


class ShardRows:
    """The rows of one shard that a rank has: in its engine's memory, and as copied, in payload order.

    copied_bytes: of all rows of a page as the cache has them; the payload's if no codec stands in between.
    is_whole:     whether the rank has all heads of the shard, so that it can fill a page.
    """

    def __init__(
        self, spec: KeyspaceSpec, layout: EngineLayout, memory: Sequence[Bytes], payload: ShardPayload
    ) -> None:
        """memory: uint8 of each handle; numpy refuses a view that does not lie inside of it.

        raises: InvalidRequest if the rank has no layer and head of the shard.
        """
        rank = layout.head_range
        heads = range(max(payload.heads.start, rank.start), min(payload.heads.stop, rank.stop))
        first_layer = payload.layers.start - layout.first_layer
        layers = layout.layers[max(0, first_layer) :][: len(payload.layers)]
        if not len(heads) or first_layer < 0 or len(layers) < len(payload.layers):
            raise InvalidRequest(f"the rank has none of layers {payload.layers} and heads {payload.heads}")
        self.is_whole = heads == payload.heads
        self._block_rows = layout.rows_of_block(spec)
        self._chunk_tokens, self._positions = spec.chunk_tokens, spec.positions
        self._parts: list[_PlaneItems] = []
        self.copied_bytes = 0
        for of_layers in ([layer.planes for layer in layers], [layer.scales for layer in layers]):
            if of_layers[0]:
                for run in plane_runs(of_layers):
                    self._parts.append(
                        _PlaneItems(memory, layout, self._block_rows, payload, run, heads, self.copied_bytes)
                    )
                self.copied_bytes += payload.row_count * of_layers[0][0].row_bytes

    def gather(self, block_ids: BlockIds, copied: Bytes) -> None:
        """Fill copied, [copied_bytes] uint8, from the engine's blocks of a chunk.

        raises: InvalidRequest if the rank has only some heads of the shard.
        """
        if not self.is_whole:
            raise InvalidRequest("the rank has some heads of the shard only; it cannot fill a page of it")
        runs = _runs_of(block_ids)
        for part in self._parts:
            part.gather(block_ids, runs, copied)

    def scatter(self, block_ids: BlockIds, copied: Bytes, skip_tokens: int = 0) -> None:
        """Write what the rank has of copied, [copied_bytes] uint8, to the engine's blocks of a chunk.

        skip_tokens: leading tokens that stay untouched; opaque: a multiple of the block.
        """
        first, rest = divmod(skip_tokens * self._positions // self._chunk_tokens, self._block_rows)
        if rest:
            for part in self._parts:
                part.scatter_rest(int(block_ids[first]), copied, first, rest)
            first += 1
        if first < block_ids.size:
            runs = _runs_of(block_ids[first:])
            for part in self._parts:
                part.scatter(block_ids, runs, copied, first)


@dataclass(frozen=True, slots=True)
class PlaneRun:
    """Planes of consecutive layers at equal distances in one handle: [layers, planes] of a shard, from `first` on."""

    first: RowPlane
    first_layer: int
    first_plane: int
    layer_count: int
    plane_count: int
    layer_stride_bytes: int
    plane_stride_bytes: int


def plane_runs(layers: Sequence[Sequence[RowPlane]]) -> list[PlaneRun]:
    """All planes of some layers, in as few runs as that takes."""
    runs: list[PlaneRun] = []
    first = 0
    while first < len(layers):
        last, distance = first + 1, 0
        while last < len(layers):
            step = layers[last][0].offset_bytes - layers[last - 1][0].offset_bytes
            if (distance and step != distance) or not _moved_by(layers[last - 1], layers[last], step):
                break
            last, distance = last + 1, step
        runs += _runs_of_layers(layers[first], first, last - first, distance)
        first = last
    return runs


def _runs_of_layers(planes: Sequence[RowPlane], first_layer: int, count: int, distance: int) -> list[PlaneRun]:
    """Of layers that only lie further on than the first one, which has these planes."""
    apart = planes[-1].offset_bytes - planes[0].offset_bytes
    if len(planes) == 2 and apart > 0 and _moved_by(planes[:1], planes[1:], apart):
        return [PlaneRun(planes[0], first_layer, 0, count, 2, distance, apart)]
    return [PlaneRun(plane, first_layer, number, count, 1, distance, 0) for number, plane in enumerate(planes)]


def _moved_by(planes: Sequence[RowPlane], others: Sequence[RowPlane], distance: int) -> bool:
    """Whether the others lie so many bytes further on, and are the same else. Views go up in memory only."""
    return distance > 0 and all(
        replace(plane, offset_bytes=plane.offset_bytes + distance) == other
        for plane, other in zip(planes, others, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    count: int
    engine_stride: int
    payload_stride: int


class _PlaneItems:
    """The items of a run of planes, of some heads. A block is `units` payload units, or a unit is `shares` blocks."""

    def __init__(
        self,
        memory: Sequence[Bytes],
        layout: EngineLayout,
        block_rows: int,
        payload: ShardPayload,
        run: PlaneRun,
        heads: range,
        begin_bytes: int,
    ) -> None:
        """begin_bytes: where rows of this kind, data or scales, begin in what is copied."""
        plane = run.first
        strides = payload.strides_of_rows(plane.row_bytes)
        self._tokens = min(block_rows, payload.unit_positions)
        self._units = block_rows // self._tokens
        self._shares = payload.unit_positions // self._tokens
        self._row_bytes = plane.row_bytes
        self._axes = (
            _Axis(self._units, self._tokens * plane.token_stride_bytes, strides.unit),
            _Axis(run.layer_count, run.layer_stride_bytes, strides.layer),
            _Axis(len(heads), plane.head_stride_bytes, strides.head),
            _Axis(self._tokens, plane.token_stride_bytes, strides.position),
            _Axis(run.plane_count, run.plane_stride_bytes, strides.plane),
        )
        groups = payload.positions // (block_rows * self._shares)
        self._outer = (
            _Axis(groups, 0, self._units * strides.unit),
            _Axis(self._shares, 0, self._tokens * strides.position),
        )
        self._block = _Axis(layout.block_count, plane.block_stride_bytes, 0)
        self._memory = memory[plane.handle]
        self._engine_offset = plane.offset_bytes + (heads.start - layout.first_head) * plane.head_stride_bytes
        first_head = heads.start - payload.heads.start
        offset = strides.offset(layer=run.first_layer, head=first_head, plane=run.first_plane)
        self._payload_offset = begin_bytes + offset
        self._item_bytes, self._axes_left = _joined(self._axes, self._row_bytes)
        self._engine = self._engine_items(self._axes_left, self._item_bytes)
        self._are_blocks_large = (
            self._row_bytes * int(np.prod([axis.count for axis in self._axes])) >= _LARGE_BLOCK_BYTES
        )

    def gather(self, block_ids: BlockIds, runs: Sequence[tuple[int, int, int]], copied: Bytes) -> None:
        """copied = the engine's blocks. runs: of all block_ids."""
        rows = self._payload_items(copied, self._axes_left, self._item_bytes)
        if self._shares > 1:
            rows[...] = self._engine[block_ids.reshape(-1, self._shares)]
        elif self._are_runs_better(runs, block_ids.size):
            for first, last, block in runs:
                rows[first:last, 0] = self._engine[block : block + last - first]
        else:
            rows[:, 0] = self._engine[block_ids]

    def scatter(
        self, block_ids: BlockIds, runs: Sequence[tuple[int, int, int]], copied: Bytes, first_block: int
    ) -> None:
        """The engine's blocks, from the chunk's first_block on, = copied. runs: of those blocks."""
        rows = self._payload_items(copied, self._axes_left, self._item_bytes)
        if self._shares > 1:
            group, share = divmod(first_block, self._shares)
            if share:
                self._engine[block_ids[first_block : (group + 1) * self._shares]] = rows[group, share:]
                group += 1
            self._engine[block_ids[group * self._shares :].reshape(-1, self._shares)] = rows[group:]
        elif self._are_runs_better(runs, block_ids.size - first_block):
            for first, last, block in runs:
                self._engine[block : block + last - first] = rows[first_block + first : first_block + last, 0]
        else:
            self._engine[block_ids[first_block:]] = rows[first_block:, 0]

    def scatter_rest(self, block: int, copied: Bytes, nth_block: int, first_token: int) -> None:
        """One block of the engine, the chunk's nth one, from a token of it on, = copied."""
        here = self._engine_items(self._axes, self._row_bytes)[block]
        there = self._payload_items(copied, self._axes, self._row_bytes)[divmod(nth_block, self._shares)]
        unit, token = divmod(first_token, self._tokens)
        here[unit, :, :, token:] = there[unit, :, :, token:]
        here[unit + 1 :] = there[unit + 1 :]

    def _are_runs_better(self, runs: Sequence[tuple[int, int, int]], blocks: int) -> bool:
        return self._are_blocks_large or len(runs) * _LONG_RUN_BLOCKS <= blocks

    def _engine_items(self, axes: Sequence[_Axis], item_bytes: int) -> Items:
        """[block_count, *axes] view of the engine's memory."""
        strides = [axis.engine_stride for axis in (self._block, *axes)]
        return _view(self._memory, self._engine_offset, (self._block, *axes), strides, item_bytes)

    def _payload_items(self, copied: Bytes, axes: Sequence[_Axis], item_bytes: int) -> Items:
        """[groups, shares, *axes] view of what is copied."""
        strides = [axis.payload_stride for axis in (*self._outer, *axes)]
        return _view(copied, self._payload_offset, (*self._outer, *axes), strides, item_bytes)


def _joined(axes: Sequence[_Axis], item_bytes: int) -> tuple[int, tuple[_Axis, ...]]:
    """Bytes of what lies together on both sides, and the axes that are left; axes and result outermost first."""
    left = [axis for axis in axes if axis.count > 1]
    while left and left[-1].engine_stride == left[-1].payload_stride == item_bytes:
        item_bytes *= left.pop().count
    return item_bytes, tuple(left)


def _view(memory: Bytes, offset: int, axes: Sequence[_Axis], strides: Sequence[int], item_bytes: int) -> Items:
    """Of items at these strides; long items are rows of bytes, an axis more."""
    is_long = item_bytes >= _LONG_ITEM_BYTES
    return np.ndarray(
        (*(axis.count for axis in axes), *((item_bytes,) if is_long else ())),
        dtype=np.uint8 if is_long else np.dtype((np.void, item_bytes)),
        buffer=memory.data,
        offset=offset,
        strides=(*strides, *((1,) if is_long else ())),
    )


def _runs_of(block_ids: BlockIds) -> list[tuple[int, int, int]]:
    """First and last position, and the block of the first, of blocks that follow each other in the engine."""
    cuts = np.flatnonzero(np.diff(block_ids) != 1) + 1
    edges = [0, *cuts.tolist(), block_ids.size]
    return [(first, last, int(block_ids[first])) for first, last in pairwise(edges)]
