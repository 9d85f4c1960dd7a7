"""Free byte ranges of one region: first fit, neighbours merged."""

from __future__ import annotations


class Extents:
    """Hands out ranges of [0, size_bytes). Few are out at a time, so a list is enough."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free: list[tuple[int, int]] = [(0, size_bytes)] if size_bytes else []  # (start, end), ascending

    @property
    def largest_bytes(self) -> int:
        """The longest range that `take` would give."""
        return max((end - start for start, end in self._free), default=0)

    def take(self, size_bytes: int) -> int | None:
        """Start of a range of exactly so many bytes; None if there is none."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= size_bytes:
                left = [(start + size_bytes, end)] if end - start > size_bytes else []
                self._free[index : index + 1] = left
                return start
        return None

    def give(self, start: int, size_bytes: int) -> None:
        """Return a range that `take` gave."""
        ranges = sorted([*self._free, (start, start + size_bytes)])
        merged: list[tuple[int, int]] = []
        for begin, end in ranges:
            if merged and begin < merged[-1][1]:
                raise AssertionError(f"range [{begin}, {end}) was given back twice")
            if merged and begin == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._free = merged
