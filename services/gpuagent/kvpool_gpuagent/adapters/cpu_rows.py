"""Rows of an engine's memory and of a page's payload as numpy views of one shape, so that a block is one assignment.

numpy joins axes whose items follow each other, so a block of a block-major cache is one copy and rows apart are one
inner loop; it lets go of the GIL for all but tiny ones. All layers at equal distances in one handle are moved together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core.layout import EngineLayout, RowPlane
from kvpool.core.payload import ShardPayload

Bytes = npt.NDArray[np.uint8]
Items = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """Planes with rows of one kind, all of a shard's or the scales of them.

    planes:      [layers of the shard][planes], of the engine.
    row_bytes:   of one row, on both sides.
    begin_bytes: of the part in what is copied.
    """

    planes: Sequence[Sequence[RowPlane]]
    row_bytes: int
    begin_bytes: int


class ShardRows:
    """The rows of one part of a shard in an engine's memory, of the heads that the engine has."""

    def __init__(
        self, layout: EngineLayout, block_rows: int, payload: ShardPayload, part: RowPart, memory: Sequence[Bytes]
    ) -> None:
        """block_rows: rows along a block's token axis. memory: uint8 of each handle; numpy refuses a view that does not
        lie inside of it."""
        self._payload, self._part, self._block_rows = payload, part, block_rows
        first_head = max(payload.heads.start, layout.first_head)
        self._heads = range(first_head, min(payload.heads.stop, layout.head_range.stop))
        # Both are powers of two: a block is whole units, or a unit whole blocks.
        self._step = min(block_rows, payload.unit_positions)
        whole_units = block_rows >= payload.unit_positions
        self._group_blocks = (payload.positions if whole_units else payload.unit_positions) // block_rows
        self._runs = [
            (run, self._view(run, memory, layout.block_count, first_head - layout.first_head))
            for run in _layer_runs(part.planes, part.row_bytes)
        ]

    def gather(self, copied: Bytes, block_ids: npt.NDArray[np.int64]) -> None:
        """Fill the part of what is copied from the engine's blocks."""
        for run, blocks in self._runs:
            target = self._of_payload(copied, run)
            for first, last, block in self._pieces(block_ids, 0):
                target[self._place(first, last)] = blocks[block : block + last - first]

    def scatter(self, copied: Bytes, block_ids: npt.NDArray[np.int64], skip_rows: int = 0) -> None:
        """Write the part into the engine's blocks, but for the first skip_rows positions of the chunk."""
        whole, rest = divmod(skip_rows, self._block_rows)
        for run, blocks in self._runs:
            source = self._of_payload(copied, run)
            for row in range(rest, self._block_rows) if rest else ():
                place = divmod(row, self._step)
                blocks[int(block_ids[whole])][place] = source[self._place(whole, whole + 1)][0][place]
            for first, last, block in self._pieces(block_ids, whole + bool(rest)):
                blocks[block : block + last - first] = source[self._place(first, last)]

    def _pieces(self, block_ids: npt.NDArray[np.int64], begin: int) -> list[tuple[int, int, int]]:
        """(first, last position, first block) of consecutive blocks from position `begin` on, each in one group."""
        if begin >= block_ids.size:
            return []
        breaks = np.diff(block_ids) != 1
        breaks[self._group_blocks - 1 :: self._group_blocks] = True
        edges = [begin, *(cut for cut in (np.flatnonzero(breaks) + 1).tolist() if cut > begin), int(block_ids.size)]
        return [(first, last, int(block_ids[first])) for first, last in pairwise(edges)]

    def _place(self, first: int, last: int) -> tuple[int, slice]:
        """Where blocks of a piece lie in `_of_payload`."""
        group, start = divmod(first, self._group_blocks)
        return group, slice(start, start + last - first)

    def _view(self, run: _PlaneRun, memory: Sequence[Bytes], block_count: int, first_head: int) -> Items:
        """[block, step of the block, row of the step, layer, head, item] of an engine's memory."""
        plane, unit = run.plane, run.item.itemsize
        shape = (block_count, self._block_rows // self._step, self._step, run.layers, len(self._heads))
        strides = (
            plane.block_stride_bytes,
            self._step * plane.token_stride_bytes,
            plane.token_stride_bytes,
            run.layer_stride_bytes,
            plane.head_stride_bytes,
        )
        return np.ndarray(
            (*shape, run.row_bytes // unit),
            dtype=run.item,
            buffer=memory[plane.handle].data,
            offset=plane.offset_bytes + first_head * plane.head_stride_bytes,
            strides=(*strides, unit),
        )

    def _of_payload(self, copied: Bytes, run: _PlaneRun) -> Items:
        """[group of blocks, block, step of the block, row of the step, layer, head, item] of what is copied."""
        payload = self._payload
        strides = payload.strides_of_rows(self._part.row_bytes)
        steps, groups = self._block_rows // self._step, payload.positions // self._block_rows // self._group_blocks
        if self._block_rows >= payload.unit_positions:  # blocks of whole units, all in one group
            block_bytes, group_bytes = steps * strides.unit, 0
        else:  # a group is the blocks of one unit
            block_bytes, group_bytes = self._block_rows * strides.position, strides.unit
        begin = self._part.begin_bytes + strides.offset(
            layer=run.first_layer, head=self._heads.start - payload.heads.start, plane=run.first_plane
        )
        return np.ndarray(
            (
                groups,
                self._group_blocks,
                steps,
                self._step,
                run.layers,
                len(self._heads),
                run.row_bytes // run.item.itemsize,
            ),
            dtype=run.item,
            buffer=copied.data,
            offset=begin,
            strides=(
                group_bytes,
                block_bytes,
                strides.unit,
                strides.position,
                strides.layer,
                strides.head,
                run.item.itemsize,
            ),
        )


@dataclass(frozen=True, slots=True)
class _PlaneRun:
    """Planes of consecutive layers at equal distances in one handle; K and V together where V follows K."""

    plane: RowPlane
    first_layer: int  # of the shard's
    layers: int
    layer_stride_bytes: int
    first_plane: int
    row_bytes: int

    @property
    def item(self) -> np.dtype[Any]:
        """What rows are copied as: the widest that divides them and where they lie."""
        plane = self.plane
        places = gcd(plane.offset_bytes, plane.block_stride_bytes, plane.token_stride_bytes, plane.head_stride_bytes)
        width = gcd(places, self.layer_stride_bytes, self.row_bytes, 8)
        return np.dtype(f"u{width & -width}")


def _layer_runs(planes: Sequence[Sequence[RowPlane]], row_bytes: int) -> list[_PlaneRun]:
    joined = all(
        len(of_layer) == 2
        and of_layer[1]
        == RowPlane(
            of_layer[0].handle,
            of_layer[0].offset_bytes + row_bytes,
            of_layer[0].block_stride_bytes,
            of_layer[0].token_stride_bytes,
            of_layer[0].head_stride_bytes,
            row_bytes,
        )
        for of_layer in planes
    )
    runs: list[_PlaneRun] = []
    for number in range(1 if joined else len(planes[0])):
        bytes_of_row = 2 * row_bytes if joined else row_bytes
        start = 0
        column = [of_layer[number] for of_layer in planes]
        for end in range(1, len(column) + 1):
            if end < len(column) and _follows(column, start, end):
                continue
            stride = column[start + 1].offset_bytes - column[start].offset_bytes if end - start > 1 else 0
            runs.append(_PlaneRun(column[start], start, end - start, stride, number, bytes_of_row))
            start = end
    return runs


def _follows(column: Sequence[RowPlane], start: int, end: int) -> bool:
    """Whether plane `end` lies where the run that begins at `start` goes on."""
    first, last = column[start], column[end]
    stride = column[start + 1].offset_bytes - first.offset_bytes
    expected = RowPlane(
        first.handle,
        first.offset_bytes + stride * (end - start),
        first.block_stride_bytes,
        first.token_stride_bytes,
        first.head_stride_bytes,
        first.row_bytes,
    )
    return stride > 0 and last == expected
