"""The tables that copy kernels read, and the shape of one launch. Imports neither torch nor triton.

Planes lie in many allocations, so tables hold raw addresses: of device memory, or of host memory in the interpreter.
All tables are int64 and C-contiguous. `pages` and `blocks` may lie in pinned host memory: kernels read few rows.

planes [P, 8]         PlaneColumn: where rows of one layer's K, V or scales lie in the engine's cache, and in a page
pages  [N, 8]         PageColumn: one row a page of a burst
blocks [N, B]         block ids of the page's chunk; B = positions / block_rows, rounded up

Row (position, head) of a plane lies in the engine, with position = block index * block_rows + token, at
`ADDRESS + blocks[page, block index] * BLOCK_STRIDE + token * TOKEN_STRIDE + head * HEAD_STRIDE`,
and in a page, with position = unit * unit_rows + row, at
`PAYLOAD_ADDRESS + PAYLOAD_OFFSET + unit * PAYLOAD_UNIT_STRIDE + (head * unit_rows + row) * row_planes * row_bytes`.
Heads count from the first one that the rank has; a page may have others before and behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from math import gcd

PLANE_COLUMNS = 8
PAGE_COLUMNS = 8
LARGEST_UNIT_BYTES = 16  # what one thread moves at once


class PlaneColumn(IntEnum):
    """Columns of `planes`; 7 is zero."""

    ADDRESS = 0  # of block 0, token 0, first of the shard's heads that the rank has
    BLOCK_STRIDE = 1  # bytes, like all strides
    TOKEN_STRIDE = 2
    HEAD_STRIDE = 3
    PAYLOAD_OFFSET = 4  # bytes from the start of a payload to the plane's first row
    SCALE_PAYLOAD_OFFSET = 5  # the same for the scales that a codec writes for the plane, else 0
    PAYLOAD_UNIT_STRIDE = 6  # bytes of data from a unit of the payload to the next


_COPY_COLUMNS = (
    PlaneColumn.ADDRESS,
    PlaneColumn.BLOCK_STRIDE,
    PlaneColumn.TOKEN_STRIDE,
    PlaneColumn.HEAD_STRIDE,
    PlaneColumn.PAYLOAD_OFFSET,
    PlaneColumn.PAYLOAD_UNIT_STRIDE,
)


class PageColumn(IntEnum):
    """Columns of `pages`; 7 is zero."""

    PAYLOAD_ADDRESS = 0  # divisible by 16
    FIRST_PLANE = 1  # rows of `planes`
    PLANE_COUNT = 2
    FIRST_SCALE_PLANE = 3  # rows of `planes` with an engine's own scales
    SCALE_PLANE_COUNT = 4  # 0 if there are none
    SKIP_TOKENS = 5  # leading positions that scatter leaves untouched
    HEADS = 6  # of the shard, as far as the rank has them; 0 leaves the page out


@dataclass(frozen=True, slots=True)
class CopyShape:
    """What is equal for all planes of a launch; kernels are compiled once for each.

    positions:    tokens of a page.
    block_rows:   tokens of an engine's block.
    most_heads:   the largest HEADS of the launch; the grid has room for that many.
    row_bytes:    of one head of one token, any number > 0.
    unit_bytes:   1, 2, 4, 8 or 16: divides row_bytes and every address, stride and offset of the planes.
    most_planes:  the largest PLANE_COUNT (or SCALE_PLANE_COUNT) of the launch, as most_heads.
    row_planes:   planes of a layer, whose rows of a token and head lie side by side in a payload.
    unit_rows:    tokens of a payload's unit.
    """

    positions: int
    block_rows: int
    most_heads: int
    row_bytes: int
    unit_bytes: int
    most_planes: int
    row_planes: int
    unit_rows: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} must be > 0, got {getattr(self, field.name)}")
        if self.unit_bytes != widest_unit_bytes(self.unit_bytes) or self.row_bytes % self.unit_bytes:
            raise ValueError(
                f"unit_bytes must be a power of two up to {LARGEST_UNIT_BYTES} that divides row_bytes "
                f"{self.row_bytes}, got {self.unit_bytes}"
            )
        if self.head_bytes >= 1 << 30:
            raise ValueError(f"one head of a plane must have less than 1 GiB in a page, got {self.head_bytes} bytes")

    @property
    def head_bytes(self) -> int:
        """Payload bytes of one plane and head."""
        return self.positions * self.row_bytes

    @property
    def blocks(self) -> int:
        """Columns of `blocks`."""
        return -(-self.positions // self.block_rows)


def copy_shape(
    planes: Iterable[Sequence[int]],
    *,
    positions: int,
    block_rows: int,
    most_heads: int,
    row_bytes: int,
    most_planes: int,
    row_planes: int,
    unit_rows: int,
) -> CopyShape:
    """The shape with the widest units for a lossless copy of these planes (rows of the table, as plain integers)."""
    unit_bytes = widest_unit_bytes(row_bytes, *(int(row[column]) for row in planes for column in _COPY_COLUMNS))
    return CopyShape(positions, block_rows, most_heads, row_bytes, unit_bytes, most_planes, row_planes, unit_rows)


def widest_unit_bytes(*values: int) -> int:
    """The widest power of two up to 16 that divides all values; zeros do not count."""
    return gcd(LARGEST_UNIT_BYTES, *values)
