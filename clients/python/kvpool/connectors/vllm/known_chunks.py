"""Chunks that the pool had recently: they need not be looked up, and not be offered, again."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import inf

_LIMIT = 100_000  # some 10 MB


class KnownChunks:
    """LRU set of chunk hashes that forgets what was seen longer than `known_s` ago.

    A wrong entry costs a load that is a miss, or a chunk that is not stored; a missing one a needless offer.
    """

    def __init__(
        self, *, known_s: float = inf, limit: int = _LIMIT, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._known_s, self._limit, self._now_s = known_s, limit, now_s
        self._seen_s: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, chunk_hash: bytes) -> bool:
        seen_s = self._seen_s.get(chunk_hash)
        return seen_s is not None and self._now_s() - seen_s <= self._known_s

    def add(self, hashes: Iterable[bytes]) -> None:
        """The pool has these chunks now."""
        now_s = self._now_s()
        for chunk_hash in hashes:
            self._seen_s[chunk_hash] = now_s
            self._seen_s.move_to_end(chunk_hash)
        while len(self._seen_s) > self._limit:
            self._seen_s.popitem(last=False)

    def drop(self, hashes: Iterable[bytes]) -> None:
        """The pool lacks these chunks."""
        for chunk_hash in hashes:
            self._seen_s.pop(chunk_hash, None)

    def clear(self) -> None:
        """Forget all chunks."""
        self._seen_s.clear()

    def leading(self, hashes: Sequence[bytes], first: int) -> int:
        """Return the index of the first chunk from `first` on that the pool is not known to have."""
        oldest_s = self._now_s() - self._known_s
        while first < len(hashes) and (seen_s := self._seen_s.get(hashes[first])) is not None and seen_s >= oldest_s:
            first += 1
        return first
