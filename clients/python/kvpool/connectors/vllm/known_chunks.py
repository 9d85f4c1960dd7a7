"""Chunks that the pool had a moment ago, so that they are not offered to it again and again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

_LIMIT = 100_000  # some 10 MB


class KnownChunks:
    """The least recently seen are forgotten first. Being wrong costs a chunk not stored again, or one offered twice."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def add(self, hashes: Iterable[bytes]) -> None:
        """The pool has them."""
        for chunk_hash in hashes:
            self._hashes[chunk_hash] = None
            self._hashes.move_to_end(chunk_hash)
        while len(self._hashes) > self._limit:
            self._hashes.popitem(last=False)

    def drop(self, hashes: Iterable[bytes]) -> None:
        """The pool does not have them after all."""
        for chunk_hash in hashes:
            self._hashes.pop(chunk_hash, None)

    def leading(self, hashes: Sequence[bytes], first: int) -> int:
        """Index of the first chunk from `first` on that the pool is not known to have."""
        while first < len(hashes) and hashes[first] in self._hashes:
            first += 1
        return first
