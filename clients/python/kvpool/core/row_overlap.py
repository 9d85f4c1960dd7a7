"""Whether strided sets of rows share a byte: a layout that lets them would corrupt an engine's cache on load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows of row_bytes at offset_bytes plus every sum of steps along the axes.

    axes: (stride in bytes > 0, count > 1) of each axis the set extends along, the largest stride first.
    """

    name: str
    handle: int
    offset_bytes: int
    row_bytes: int
    axes: tuple[tuple[int, int], ...]

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.row_bytes + sum(stride * (count - 1) for stride, count in self.axes)

    @property
    def is_nested(self) -> bool:
        """Whether each stride is at least the extent of the axes inside of it; then the set's own rows are apart."""
        inner_bytes = self.row_bytes
        for stride, count in reversed(self.axes):
            if stride < inner_bytes:
                return False
            inner_bytes += stride * (count - 1)
        return True

    def filled_inside(self, axis_count: int) -> RowSet:
        """The set with all bytes between the rows that the outer axis_count axes do not tell apart."""
        inner_bytes = sum(stride * (count - 1) for stride, count in self.axes[axis_count:])
        return replace(self, row_bytes=self.row_bytes + inner_bytes, axes=self.axes[:axis_count])


def first_overlap(sets: Iterable[RowSet]) -> tuple[str, str] | None:
    """Names of two sets (or twice the same) whose rows share a byte, else None.

    Exact for sets of nested axes that are alike. Of sets that share only outer axes (rows of a block, then its scales),
    everything inside of those counts as one row without gaps. A set whose axes are not nested counts as overlapping
    itself: better refused than corrupted.
    """
    open_sets: list[tuple[int, RowSet]] = []
    handle = -1
    for right in sorted(sets, key=lambda rows: (rows.handle, rows.offset_bytes)):
        if not right.is_nested:
            return right.name, right.name
        if right.handle != handle:
            handle, open_sets = right.handle, []
        open_sets = [(end, left) for end, left in open_sets if end > right.offset_bytes]
        for _, left in open_sets:
            if _interleaved_meet(left, right):
                return left.name, right.name
        open_sets.append((right.end_bytes, right))
    return None


def _interleaved_meet(left: RowSet, right: RowSet) -> bool:
    if left.axes != right.axes:
        shared = 0
        while left.axes[: shared + 1] == right.axes[: shared + 1]:
            shared += 1
        left, right = left.filled_inside(shared), right.filled_inside(shared)
    return _meet(left, right, right.offset_bytes - left.offset_bytes, 0)


def _meet(left: RowSet, right: RowSet, distance: int, axis: int) -> bool:
    """Whether a row of `left` meets one of `right` that is `distance` bytes further on before steps along axes[axis:].

    The difference of two positions on an axis is any whole number of strides in (-count, count). Rows meet if what the
    steps leave of the distance is in (-right.row_bytes, left.row_bytes); with nested axes only the two multiples of a
    stride next to the distance can leave so little.
    """
    if axis == len(left.axes):
        return -right.row_bytes < distance < left.row_bytes
    stride, count = left.axes[axis]
    below = distance // stride
    return any(
        _meet(left, right, distance - steps * stride, axis + 1)
        for steps in (below, below + 1)
        if -count < steps < count
    )
