"""GPU memory that pages pass through, within a hard budget shared by both directions."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from kvpool_gpuagent.adapters.gpu.runtime import GpuRuntime, OutOfDeviceMemory

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

ALIGNMENT_BYTES = 512  # of every range, as of CUDA's own allocations; kernels move 16 bytes at once
SMALLEST_BYTES = 4 << 20  # below it bursts of kernels gain nothing; runs are copied one by one then


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


class Scratch:
    """One allocation, made when first needed; less of it where the GPU has no room. Thread-safe.

    changed: notified, with its lock held, whenever a range comes back; transfer queues wait on it for that and for
    work.
    """

    def __init__(self, runtime: GpuRuntime, size_bytes: int) -> None:
        self.changed = threading.Condition()
        self._runtime, self.wanted_bytes = runtime, size_bytes
        self._memory: torch.Tensor | None = None
        self._extents: Extents | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that the GPU gave; 0 if it had none. Allocates when first asked; the thread is attached."""
        with self.changed:
            return self._allocated().size_bytes

    def take(self, largest_bytes: int, smallest_bytes: int) -> tuple[int, int] | None:
        """(address, bytes) of a free range of at most largest_bytes, both multiples of ALIGNMENT_BYTES, or None if
        there is none of smallest_bytes now.

        The caller holds `changed`.
        """
        extents = self._allocated()
        size_bytes = min(largest_bytes, extents.largest_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if size_bytes < smallest_bytes:
            return None
        start = extents.take(size_bytes)
        assert start is not None and self._memory is not None
        return self._memory.data_ptr() + start, size_bytes

    def give(self, address: int, size_bytes: int) -> None:
        """Return what `take` gave; no work may use it any more."""
        with self.changed:
            assert self._extents is not None and self._memory is not None
            self._extents.give(address - self._memory.data_ptr(), size_bytes)
            self.changed.notify_all()

    def _allocated(self) -> Extents:
        if self._extents is None:
            size_bytes = self.wanted_bytes
            while size_bytes >= SMALLEST_BYTES:
                try:
                    self._memory = self._runtime.device_bytes(size_bytes)
                    break
                except OutOfDeviceMemory:
                    size_bytes //= 2
            else:
                size_bytes = 0
            if size_bytes < self.wanted_bytes:
                _log.warning(
                    "the GPU has no room for %d bytes of scratch, got %d: transfers go on, slower; leave the agent "
                    "more memory (vLLM: gpu_memory_utilization) or lower scratch_bytes",
                    self.wanted_bytes,
                    size_bytes,
                )
            self._extents = Extents(size_bytes)
        return self._extents
