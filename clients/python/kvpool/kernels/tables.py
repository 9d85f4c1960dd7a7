"""The tables that copy kernels read, and the shape of one launch. Imports neither torch nor triton.

Planes lie in many allocations, so tables hold raw addresses: of device memory, or of host memory in the interpreter.
All tables are int64 and C-contiguous. `pages` and `blocks` may lie in pinned host memory: kernels read few rows.

planes [P, 8]         PlaneColumn: where rows of one layer's K, V or scales lie in the engine's cache, and in a page
pages  [N, 8]         PageColumn: one row a page of a burst
blocks [N, B]         block ids of the page's chunk; B = positions / block_rows, rounded up
faults [N, F] int32   what verification found: nonzero in any of a page's own sum blocks means that the page is bad

Row (position, head) of a plane lies in the engine, with position = block index * block_rows + token, at
`ADDRESS + blocks[page, block index] * BLOCK_STRIDE + token * TOKEN_STRIDE + head * HEAD_STRIDE`,
and in a page at `PAYLOAD_ADDRESS + PAYLOAD_OFFSET + (position * heads + head) * row_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import gcd

PLANE_COLUMNS = 8
PAGE_COLUMNS = 8
LARGEST_UNIT_BYTES = 16  # what one thread moves at once
SUM_BLOCK_BYTES = 256 << 10  # payload bytes of one checksum, hence of one entry of `faults`


class PlaneColumn(IntEnum):
    """Columns of `planes`; 6 and 7 are zero."""

    ADDRESS = 0  # of block 0, token 0, first head of the shard
    BLOCK_STRIDE = 1  # bytes, like all strides
    TOKEN_STRIDE = 2
    HEAD_STRIDE = 3
    PAYLOAD_OFFSET = 4  # bytes from the start of a payload to the plane's first row
    SCALE_PAYLOAD_OFFSET = 5  # the same for the scales that a codec writes for the plane, else 0


class PageColumn(IntEnum):
    """Columns of `pages`."""

    PAYLOAD_ADDRESS = 0  # divisible by 16
    FIRST_PLANE = 1  # rows of `planes`
    PLANE_COUNT = 2
    FIRST_SCALE_PLANE = 3  # rows of `planes` with an engine's own scales
    SCALE_PLANE_COUNT = 4  # 0 if there are none
    PAYLOAD_BYTES = 5
    SKIP_TOKENS = 6  # leading positions that scatter leaves untouched
    PRESENT = 7  # 0 leaves the page out


@dataclass(frozen=True, slots=True)
class CopyShape:
    """What is equal for all planes of a launch; kernels are compiled once for each.

    positions:    tokens of a page.
    block_rows:   tokens of an engine's block.
    heads:        rows of a token in one plane.
    row_bytes:    of one head of one token, any number > 0.
    unit_bytes:   1, 2, 4, 8 or 16: divides row_bytes and every address, stride and offset of the planes.
    most_planes:  the largest PLANE_COUNT (or SCALE_PLANE_COUNT) of the launch; the grid has room for that many.
    """

    positions: int
    block_rows: int
    heads: int
    row_bytes: int
    unit_bytes: int
    most_planes: int

    def __post_init__(self) -> None:
        for name in ("positions", "block_rows", "heads", "row_bytes", "unit_bytes", "most_planes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.unit_bytes != widest_unit_bytes(self.unit_bytes) or self.row_bytes % self.unit_bytes:
            raise ValueError(
                f"unit_bytes must be a power of two up to {LARGEST_UNIT_BYTES} that divides row_bytes "
                f"{self.row_bytes}, got {self.unit_bytes}"
            )
        if self.plane_bytes >= 1 << 30:
            raise ValueError(f"one plane of a page must have less than 1 GiB, got {self.plane_bytes} bytes")

    @property
    def token_bytes(self) -> int:
        """Payload bytes of one position in one plane."""
        return self.heads * self.row_bytes

    @property
    def plane_bytes(self) -> int:
        """Payload bytes of one plane."""
        return self.positions * self.token_bytes

    @property
    def blocks(self) -> int:
        """Columns of `blocks`."""
        return -(-self.positions // self.block_rows)


def copy_shape(
    planes: Iterable[Sequence[int]], *, positions: int, block_rows: int, heads: int, row_bytes: int, most_planes: int
) -> CopyShape:
    """The cheapest shape for a lossless copy of these planes (rows of the table, as plain integers).

    Where heads lie side by side in every plane, one row holds them all: the same bytes, less arithmetic, wider units.
    """
    rows = [[int(value) for value in row] for row in planes]
    if all(row[PlaneColumn.HEAD_STRIDE] == row_bytes or heads == 1 for row in rows):
        heads, row_bytes = 1, heads * row_bytes
    strides = [value for row in rows for value in _aligned_values(row, heads)]
    return CopyShape(positions, block_rows, heads, row_bytes, widest_unit_bytes(row_bytes, *strides), most_planes)


def widest_unit_bytes(*values: int) -> int:
    """The widest power of two up to 16 that divides all values; zeros do not count."""
    return gcd(LARGEST_UNIT_BYTES, *values)


def _aligned_values(row: Sequence[int], heads: int) -> Iterable[int]:
    yield from row[PlaneColumn.ADDRESS : PlaneColumn.HEAD_STRIDE]
    yield row[PlaneColumn.PAYLOAD_OFFSET]
    if heads > 1:
        yield row[PlaneColumn.HEAD_STRIDE]
