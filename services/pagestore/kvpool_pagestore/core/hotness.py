"""Which chunks are used so often that one node should not serve them alone."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import islice

_HALF_LIFE_S = 60.0
# Of uses at a steady rate r, halving every minute, the sum settles at r * 60 / ln 2: so many minutes' worth.
_MINUTES = 1.4427
_LOOKED_AT = 4096  # chunks used last: what is used most is among them, and looking takes 2 ms


class HotChunks:
    """Uses of chunks, of which old ones count less and less. Time is passed in.

    uses_per_minute: from which rate on a chunk is hot; 0: none is. capacity: chunks counted; the longest unused go.
    """

    def __init__(self, *, uses_per_minute: int, capacity: int) -> None:
        self._threshold = uses_per_minute * _MINUTES / 2  # reached within a minute of the rate
        self._capacity = capacity
        self._uses: OrderedDict[bytes, tuple[float, float, bool]] = OrderedDict()  # count, as of when, was told

    @property
    def enabled(self) -> bool:
        return self._threshold > 0

    def used(self, chunk: bytes, now_s: float) -> bool:
        """Count one use. True when the chunk has just become hot; again only after it cooled to half of that."""
        count, at_s, told = self._uses.pop(chunk, (0.0, now_s, False))
        count = count * 0.5 ** ((now_s - at_s) / _HALF_LIFE_S) + 1.0
        if count < self._threshold / 2:
            told = False
        hot = count >= self._threshold and not told
        self._uses[chunk] = (count, now_s, told or hot)
        if len(self._uses) > self._capacity:
            self._uses.popitem(last=False)
        return hot

    def most_used(self, count: int, now_s: float) -> list[tuple[bytes, float]]:
        """Chunks used most now, of those used last, with their uses a minute; the most used first."""
        rates = (
            (uses * 0.5 ** ((now_s - at_s) / _HALF_LIFE_S) / _MINUTES, chunk)
            for chunk, (uses, at_s, _) in islice(reversed(self._uses.items()), _LOOKED_AT)
        )
        return [(chunk, rate) for rate, chunk in heapq.nlargest(count, rates)]
