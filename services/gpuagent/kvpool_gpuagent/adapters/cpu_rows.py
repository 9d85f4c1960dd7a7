"""Engine memory and page payloads seen as equal items, so that numpy moves the longest runs that a layout allows.

An item is opaque to numpy (dtype `V<n>`): each is one memmove. Scatter of 256-byte rows into 16-token blocks in random
order, GB/s on one busy core: 6.2 by items, 3.9 as rows of 64-bit words, 4.5 through a flat index of items, 4.0 block by
block; a memcpy of the same pages made 9.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core.layout import RowPlane
from kvpool_gpuagent.ports import BlockIds

Bytes = npt.NDArray[np.uint8]
Items = npt.NDArray[Any]
_LONG_RUN_BLOCKS = 4  # from this mean length on, copying run by run beats indexing block by block


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

    def payload_items(self, payload: Bytes, plane_count: int) -> Items:
        """[planes, blocks, tokens, heads] view of a payload of plane_count planes (of all its layers)."""
        items = payload.view(np.dtype((np.void, self.item_bytes)))
        return items.reshape(plane_count, -1, self.tokens, self.heads)


class PlaneItems:
    """The items of one plane of one layer, from the first head of a shard on: blocks is a [block_count, tokens, heads]
    view of the engine's memory."""

    __slots__ = ("blocks", "shape")

    def __init__(self, memory: Bytes, plane: RowPlane, first_head: int, block_count: int, shape: ItemShape) -> None:
        """memory: uint8 of the plane's handle; numpy refuses a view that does not lie inside of it."""
        self.shape = shape
        self.blocks: Items = np.ndarray(
            (block_count, shape.tokens, shape.heads),
            dtype=np.dtype((np.void, shape.item_bytes)),
            buffer=memory.data,
            offset=plane.offset_bytes + first_head * plane.head_stride_bytes,
            strides=(plane.block_stride_bytes, plane.token_stride_bytes, plane.head_stride_bytes),
        )


class BlockWalk:
    """Goes through the blocks of one copy: run by run where ids ascend for long, else by indexing."""

    def __init__(self, block_ids: BlockIds) -> None:
        self._ids = block_ids
        cuts = np.flatnonzero(np.diff(block_ids) != 1) + 1
        self._runs: list[tuple[int, int, int]] | None = None  # first and last position, block of the first
        if block_ids.size == 1 or (cuts.size + 1) * _LONG_RUN_BLOCKS <= block_ids.size:
            edges = [0, *cuts.tolist(), block_ids.size]
            self._runs = [(first, last, int(block_ids[first])) for first, last in pairwise(edges)]

    def gather(self, plane: PlaneItems, rows: Items) -> None:
        """rows [blocks, tokens, heads] = the plane's blocks."""
        if self._runs is None:
            rows[...] = plane.blocks[self._ids]
            return
        for first, last, block in self._runs:
            rows[first:last] = plane.blocks[block : block + last - first]

    def scatter(self, plane: PlaneItems, rows: Items) -> None:
        """The plane's blocks = rows [blocks, tokens, heads]."""
        if self._runs is None:
            plane.blocks[self._ids] = rows
            return
        for first, last, block in self._runs:
            plane.blocks[block : block + last - first] = rows[first:last]
