"""Keeping a rate."""

from __future__ import annotations


class Pace:
    """Spaces work so that it stays at a rate: no burst is saved up. Time is passed in."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def wait_s(self, size_bytes: int, now_s: float) -> float:
        """Book work of this size; how long to wait before it begins."""
        begins_s = max(now_s, self._free_s)
        self._free_s = begins_s + size_bytes / self._bytes_per_s
        return begins_s - now_s
