"""Chunk hashes in small buckets that each remember their digest, so that only what changed is computed again."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import xor
from struct import Struct

from kvpool.core.location_digest import PART_COUNT, part_of

_HASH_BYTES = 16
_FIRST_WORDS = Struct(f"<I{_HASH_BYTES - 4}x")
_HASHES = Struct(f"{_HASH_BYTES}s")
_BUCKET_CHUNKS = 64  # on average, before another bucket is added: a third of a millisecond to look them all up
_REFILLED_SHARE = 8  # a table to which at least one part in this many is added is built again


class ChunkTable:
    """Hashes of one keyspace's chunks in one digest range, or in one chain group: 16 bytes each and a little.

    A linear hash table on the first four bytes of a hash, least significant first: it grows by one bucket at a time,
    and from PART_COUNT buckets on each of them lies within one part of a group.
    """

    __slots__ = ("_buckets", "_digests", "_stale", "chunk_count", "digest")

    def __init__(self, bucket_count: int = 1) -> None:
        self._buckets = [b""] * bucket_count
        self._digests: list[int | None] = [0] * bucket_count  # None: stale
        self._stale: list[int] = []
        self.chunk_count = 0
        self.digest = 0  # exclusive or of the buckets that are not stale

    @property
    def stale_count(self) -> int:
        """Buckets that changed since their digests were computed."""
        return len(self._stale)

    def add(self, chunk_hash: bytes) -> bool:
        """Remember a chunk, and that its bucket changed. False if it was there."""
        at = self._bucket_at(chunk_hash)
        self.mark(at)
        bucket = self._buckets[at]
        found = bucket.find(chunk_hash)
        if found >= 0 and found % _HASH_BYTES == 0:  # a match across two hashes comes never, and costs 16 bytes
            return False
        self._buckets[at] = bucket + chunk_hash
        self.chunk_count += 1
        if self.chunk_count > _BUCKET_CHUNKS * len(self._buckets):
            self._grow()
        return True

    def extend(self, hashes: bytes) -> None:
        """Remember chunks. One that was there takes its bytes twice until its bucket is refreshed."""
        count = len(hashes) // _HASH_BYTES
        self.chunk_count += count
        if count * _REFILLED_SHARE >= self.chunk_count:
            self._refill(b"".join(self._buckets) + hashes)
            return
        for start in range(0, len(hashes), _HASH_BYTES):
            chunk_hash = hashes[start : start + _HASH_BYTES]
            at = self._bucket_at(chunk_hash)
            self.mark(at)
            self._buckets[at] += chunk_hash
        while self.chunk_count > _BUCKET_CHUNKS * len(self._buckets):
            self._grow()

    def mark_changed(self, chunk_hash: bytes) -> None:
        """What is held of a chunk changed."""
        self.mark(self._bucket_at(chunk_hash))

    def mark(self, at: int) -> None:
        """A bucket is to be looked through again."""
        digest = self._digests[at]
        if digest is not None:
            self.digest ^= digest
            self._digests[at] = None
            self._stale.append(at)

    def mark_every(self, first: int, step: int) -> None:
        """Mark every `step`-th bucket, from `first` on."""
        for at in range(first, len(self._buckets), step):
            self.mark(at)

    def begin_refresh(self) -> tuple[int, set[bytes]]:
        """The bucket that is stale longest, and its chunks. A change before `end_refresh` makes it stale again."""
        at = self._stale.pop(0)
        self._digests[at] = 0
        return at, _hashes(self._buckets[at])

    def end_refresh(self, at: int, kept: Iterable[bytes], digest: int) -> None:
        """What is left of a bucket, and its digest; ignored if the bucket changed meanwhile."""
        if self._digests[at] is None:
            return
        before = len(self._buckets[at])
        self._buckets[at] = b"".join(kept)
        self.chunk_count += (len(self._buckets[at]) - before) // _HASH_BYTES
        self._digests[at] = digest
        self.digest ^= digest

    def hashes(self) -> set[bytes]:
        """All chunks."""
        return _hashes(b"".join(self._buckets))

    def part_hashes(self, part: int) -> set[bytes]:
        """The chunks of one part."""
        buckets = self._buckets
        if len(buckets) < PART_COUNT:
            return {chunk_hash for chunk_hash in self.hashes() if part_of(chunk_hash) == part}
        return _hashes(b"".join(buckets[part::PART_COUNT]))

    def part_digests(self) -> list[int]:
        """Of each part, where it is not stale. For a table of at least PART_COUNT buckets."""
        digests = [digest or 0 for digest in self._digests]
        return [reduce(xor, digests[part::PART_COUNT]) for part in range(PART_COUNT)]

    def _bucket_at(self, chunk_hash: bytes) -> int:
        count = len(self._buckets)
        if count == 1:
            return 0
        mask = (1 << count.bit_length()) - 1
        at = int.from_bytes(chunk_hash[:4], "little") & mask
        return at if at < count else at & (mask >> 1)

    def _refill(self, hashes: bytes) -> None:
        """Have these chunks in as many buckets as they need, all stale."""
        count = max(len(self._buckets), -(-self.chunk_count // _BUCKET_CHUNKS))
        low, high = (1 << (count.bit_length() - 1)) - 1, (1 << count.bit_length()) - 1
        parts: list[list[bytes]] = [[] for _ in range(count)]
        for (number,), (chunk_hash,) in zip(_FIRST_WORDS.iter_unpack(hashes), _HASHES.iter_unpack(hashes), strict=True):
            at = number & high
            parts[at if at < count else at & low].append(chunk_hash)
        self._buckets = list(map(b"".join, parts))
        self._digests = [None] * count
        self._stale = list(range(count))
        self.digest = 0

    def _grow(self) -> None:
        """Add a bucket and move there what belongs into it from the one bucket that had it."""
        added = len(self._buckets)
        divided = added - (1 << (added.bit_length() - 1))
        self.mark(divided)
        self._buckets.append(b"")
        self._digests.append(None)
        self._stale.append(added)
        parts: dict[int, list[bytes]] = {divided: [], added: []}
        hashes = _hashes(self._buckets[divided])
        self.chunk_count -= len(self._buckets[divided]) // _HASH_BYTES - len(hashes)  # named twice, see `extend`
        for chunk_hash in hashes:
            parts[self._bucket_at(chunk_hash)].append(chunk_hash)
        for at, moved in parts.items():
            self._buckets[at] = b"".join(moved)


def _hashes(packed: bytes) -> set[bytes]:
    return {packed[at : at + _HASH_BYTES] for at in range(0, len(packed), _HASH_BYTES)}
