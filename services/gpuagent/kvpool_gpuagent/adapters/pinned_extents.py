"""Which host memory of this process is pinned."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort

import numpy as np
import numpy.typing as npt


class PinnedExtents:
    """Pinned ranges of addresses. Thread-safe: segments come and go while copies are being enqueued."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._extents: tuple[tuple[int, int], ...] = ()  # (start, end), ascending; replaced as a whole

    def add(self, start: int, size_bytes: int) -> None:
        """A range is pinned now."""
        with self._lock:
            extents = list(self._extents)
            insort(extents, (start, start + size_bytes))
            self._extents = tuple(extents)

    def remove(self, start: int) -> None:
        """The range that starts there is going to be unpinned; none: nothing happens."""
        with self._lock:
            self._extents = tuple(extent for extent in self._extents if extent[0] != start)

    def has_all(self, addresses: npt.NDArray[np.int64]) -> bool:
        """Whether each of [N > 0] addresses lies in a pinned range."""
        extents = self._extents  # once: another thread may replace it meanwhile

        def end_beyond(address: int) -> int:
            at = bisect_right(extents, (address, 1 << 63)) - 1
            return extents[at][1] if at >= 0 else 0

        low, high = int(addresses.min()), int(addresses.max())
        if end_beyond(low) > high:  # the usual case: all in one segment
            return True
        return all(end_beyond(address) > address for address in addresses.tolist())
