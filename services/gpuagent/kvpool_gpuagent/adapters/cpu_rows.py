"""Engine memory and page payloads seen as equal items, so that numpy moves much in one call and without the GIL.

numpy lets go of the GIL only for calls of some hundred elements, so all planes that lie at equal distances are moved
together, and a long item is a row of bytes. A short one is opaque (dtype `V<n>`): one memmove, where a row of numbers
takes an inner loop. Scatter in GB/s, on one thread and on two (2 cores): items of 64 KiB 8.2 and 15; blocks of 4 KiB in
random order 9 and 13, and plane by plane as opaque items 7.8 and 7; interleaved rows of 256 bytes 6.7 and 10.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core.layout import RowPlane
from kvpool_gpuagent.ports import BlockIds

Bytes = npt.NDArray[np.uint8]
Items = npt.NDArray[Any]
_LONG_RUN_BLOCKS = 4  # from this mean length on, copying run by run beats indexing block by block
_LONG_ITEM_BYTES = 2048


@dataclass(frozen=True, slots=True)
class ItemShape:
    """How the rows of one shard's heads in one block are cut into items, on both sides.

    tokens, heads: items along these axes; an axis whose rows follow each other without a gap is part of the item.
    """

    tokens: int
    heads: int
    item_bytes: int

    @classmethod
    def of(cls, plane: RowPlane, tokens: int, heads: int, *, by_token: bool = False) -> ItemShape:
        """tokens: of a block (1 if a cell is a whole block). heads: of the shard. by_token: keep tokens apart."""
        item_bytes = plane.row_bytes
        if heads > 1 and plane.head_stride_bytes != item_bytes:
            return cls(tokens, heads, item_bytes)
        item_bytes *= heads
        if by_token or (tokens > 1 and plane.token_stride_bytes != item_bytes):
            return cls(tokens, 1, item_bytes)
        return cls(1, 1, item_bytes * tokens)

    @property
    def is_long(self) -> bool:
        """Whether items are rows of bytes, an axis more, rather than opaque elements."""
        return self.item_bytes >= _LONG_ITEM_BYTES

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of arrays of items."""
        return np.dtype(np.uint8) if self.is_long else np.dtype((np.void, self.item_bytes))

    @property
    def axes(self) -> tuple[int, ...]:
        """Of one block: tokens, heads, and bytes if items are long."""
        return (self.tokens, self.heads, *((self.item_bytes,) if self.is_long else ()))

    def payload_items(self, payload: Bytes, plane_count: int) -> Items:
        """[planes, blocks, *axes] view of a payload of plane_count planes (of all its layers)."""
        return payload.view(self.dtype).reshape(plane_count, -1, *self.axes)


@dataclass(frozen=True, slots=True)
class PlaneRun:
    """Planes that follow each other in the payload and lie at equal distances in one handle.

    start: number of the first one in the payload. stride_bytes: 0 for one plane.
    """

    first: RowPlane
    start: int
    count: int = 1
    stride_bytes: int = 0

    def joined(self, plane: RowPlane) -> PlaneRun | None:
        """This run and the next plane of the payload; None if that lies elsewhere."""
        distance = plane.offset_bytes - self.first.offset_bytes
        stride = self.stride_bytes if self.count > 1 else distance
        if replace(plane, offset_bytes=self.first.offset_bytes) != self.first or distance != stride * self.count:
            return None
        return PlaneRun(self.first, self.start, self.count + 1, stride)


def plane_runs(planes: Iterable[RowPlane]) -> list[PlaneRun]:
    """All planes of a payload, in order, in as few runs as that takes."""
    runs: list[PlaneRun] = []
    for number, plane in enumerate(planes):
        joined = runs[-1].joined(plane) if runs else None
        if joined is not None:
            runs[-1] = joined
        else:
            runs.append(PlaneRun(plane, number))
    return runs


class PlaneItems:
    """The items of a run of planes, from the first head of a shard on: blocks is a [planes, block_count, *axes] view of
    the engine's memory."""

    __slots__ = ("blocks", "run", "shape")

    def __init__(self, memory: Bytes, run: PlaneRun, first_head: int, block_count: int, shape: ItemShape) -> None:
        """memory: uint8 of the planes' handle; numpy refuses a view that does not lie inside of it."""
        self.run, self.shape = run, shape
        plane = run.first
        strides = (plane.block_stride_bytes, plane.token_stride_bytes, plane.head_stride_bytes)
        self.blocks: Items = np.ndarray(
            (run.count, block_count, *shape.axes),
            dtype=shape.dtype,
            buffer=memory.data,
            offset=plane.offset_bytes + first_head * plane.head_stride_bytes,
            strides=(run.stride_bytes, *strides, *((1,) if shape.is_long else ())),
        )

    def of_payload(self, rows: Items) -> Items:
        """The part of a payload's items, [planes of the payload, ...], that belongs to these planes."""
        return rows[self.run.start : self.run.start + self.run.count]


class BlockWalk:
    """Goes through the blocks of one copy: run by run where ids ascend for long, else by indexing."""

    def __init__(self, block_ids: BlockIds) -> None:
        self._ids = block_ids
        cuts = np.flatnonzero(np.diff(block_ids) != 1) + 1
        self._runs: list[tuple[int, int, int]] | None = None  # first and last position, block of the first
        if block_ids.size == 1 or (cuts.size + 1) * _LONG_RUN_BLOCKS <= block_ids.size:
            edges = [0, *cuts.tolist(), block_ids.size]
            self._runs = [(first, last, int(block_ids[first])) for first, last in pairwise(edges)]

    def gather(self, planes: PlaneItems, rows: Items) -> None:
        """rows [planes, blocks, *axes] = the planes' blocks."""
        if self._runs is not None:
            for first, last, block in self._runs:
                rows[:, first:last] = planes.blocks[:, block : block + last - first]
        elif planes.blocks.flags.c_contiguous:
            # Straight into rows. The ids were checked; any other mode would go through a buffer.
            np.take(planes.blocks, self._ids, axis=1, out=rows, mode="clip")
        else:
            rows[...] = planes.blocks[:, self._ids]

    def scatter(self, planes: PlaneItems, rows: Items) -> None:
        """The planes' blocks = rows [planes, blocks, *axes]."""
        if self._runs is None:
            planes.blocks[:, self._ids] = rows
            return
        for first, last, block in self._runs:
            planes.blocks[:, block : block + last - first] = rows[:, first:last]
