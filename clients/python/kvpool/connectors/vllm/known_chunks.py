"""Chunks that the pool had recently, so that they are not offered to it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

_LIMIT = 100_000  # some 10 MB


class KnownChunks:
    """LRU set of chunk hashes. A wrong entry costs a chunk that is not stored again, a missing one a needless offer."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def add(self, hashes: Iterable[bytes]) -> None:
        """The pool has these chunks."""
        for chunk_hash in hashes:
            self._hashes[chunk_hash] = None
            self._hashes.move_to_end(chunk_hash)
        while len(self._hashes) > self._limit:
            self._hashes.popitem(last=False)

    def drop(self, hashes: Iterable[bytes]) -> None:
        """The pool lacks these chunks."""
        for chunk_hash in hashes:
            self._hashes.pop(chunk_hash, None)

    def leading(self, hashes: Sequence[bytes], first: int) -> int:
        """Return the index of the first chunk from `first` on that the pool is not known to have."""
        while first < len(hashes) and hashes[first] in self._hashes:
            first += 1
        return first
