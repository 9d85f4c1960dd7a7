"""Numbers for keys, so that what is known of a key lies in columns: a large disk has ten million chunks."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from itertools import chain
from struct import iter_unpack
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

K = TypeVar("K", bound=Hashable)

NO_ROW = -1
_FIRST_BUCKETS = 1024  # a power of two


class KeyRows(Protocol[K]):
    """Numbers of keys: dense, and used again."""

    def find(self, key: K) -> int:
        """NO_ROW if it has none."""
        ...

    def add(self, key: K) -> int:
        """A number for a key that has none."""
        ...

    def remove(self, row: int) -> None:
        """The number is free."""
        ...

    def key(self, row: int) -> K:
        """The key of a number that is not free."""
        ...


class DictRows(Generic[K]):
    """Of any keys, fast."""

    def __init__(self) -> None:
        self._row_of: dict[K, int] = {}
        self._keys: list[K | None] = []
        self._free: list[int] = []

    def find(self, key: K) -> int:
        return self._row_of.get(key, NO_ROW)

    def add(self, key: K) -> int:
        if not self._free:
            self._free.append(len(self._keys))
            self._keys.append(None)
        row = self._row_of[key] = self._free.pop()
        self._keys[row] = key
        return row

    def remove(self, row: int) -> None:
        del self._row_of[self.key(row)]
        self._keys[row] = None
        self._free.append(row)

    def key(self, row: int) -> K:
        key = self._keys[row]
        assert key is not None
        return key


class PackedRows:
    """Of keys of one length: some 10 bytes each beside the key itself.

    A hash table with chains that grows by one bucket at a time (linear hashing), so that no step takes long.
    """

    def __init__(self, key_bytes: int) -> None:
        self._key_bytes = key_bytes
        self._keys = bytearray()
        self._next = array("i")  # the next row of the bucket, or of the free ones
        self._first = array("i", [NO_ROW]) * _FIRST_BUCKETS
        self._mask = _FIRST_BUCKETS - 1  # of the round of splitting that goes on
        self._free = NO_ROW
        self._count = 0

    def __len__(self) -> int:
        """One more than the highest number that was ever given."""
        return len(self._next)

    def find(self, key: bytes) -> int:
        row = self._first[self._bucket(key)]
        keys, width = self._keys, self._key_bytes
        while row >= 0 and not keys.startswith(key, row * width, row * width + width):
            row = self._next[row]
        return row

    def find_all(self, keys: bytes) -> npt.NDArray[np.int32]:
        """The row of each of some keys, which lie one after the other; NO_ROW for those that have none."""
        rows = np.frombuffer(self._first, np.int32)[self._buckets(keys)]
        following, pending = np.frombuffer(self._next, np.int32), np.flatnonzero(rows >= 0)
        if len(pending):
            kept, wanted = (np.frombuffer(each, f"V{self._key_bytes}") for each in (self._keys, keys))
        while len(pending):
            pending = pending[kept[rows[pending]] != wanted[pending]]
            rows[pending] = following[rows[pending]]
            pending = pending[rows[pending] >= 0]
        return rows

    def add(self, key: bytes) -> int:
        assert len(key) == self._key_bytes
        row, width = self._free, self._key_bytes
        if row >= 0:
            self._free = self._next[row]
            self._keys[row * width : row * width + width] = key
        else:
            row = len(self._next)
            self._next.append(NO_ROW)
            self._keys += key
        self._count += 1
        if self._count > len(self._first):
            self._split()
        bucket = self._bucket(key)
        self._next[row], self._first[bucket] = self._first[bucket], row
        return row

    def fill(self, keys: bytearray) -> None:
        """Give rows from 0 on to different keys, which lie one after the other; there are none yet."""
        assert not len(self)
        count = len(keys) // self._key_bytes
        bucket_count = max(_FIRST_BUCKETS, count)
        self._first = array("i", [NO_ROW]) * bucket_count
        self._mask = (1 << (bucket_count.bit_length() - 1)) - 1
        buckets = self._buckets(keys)
        order = np.argsort(buckets, kind="stable").astype(np.int32)
        ordered = buckets[order]
        is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])[:count]
        following, first = np.full(count, NO_ROW, np.int32), np.full(bucket_count, NO_ROW, np.int32)
        following[order[:-1][~is_first[1:]]] = order[1:][~is_first[1:]]
        first[ordered[is_first]] = order[is_first]
        self._keys, self._next, self._first = keys, array("i", following.tobytes()), array("i", first.tobytes())
        self._count = count

    def remove(self, row: int) -> None:
        bucket = self._bucket(self.key(row))
        at = self._first[bucket]
        if at == row:
            self._first[bucket] = self._next[row]
        else:
            while self._next[at] != row:
                at = self._next[at]
            self._next[at] = self._next[row]
        self._next[row], self._free = self._free, row
        self._count -= 1

    def key(self, row: int) -> bytes:
        return bytes(self._keys[row * self._key_bytes : (row + 1) * self._key_bytes])

    def keys(self, first: int, end: int) -> bytes:
        """The keys of rows one after the other; of those that are free, any."""
        return bytes(memoryview(self._keys)[first * self._key_bytes : end * self._key_bytes])

    def _buckets(self, keys: bytes | bytearray) -> npt.NDArray[np.int64]:
        """The bucket of each of some keys."""
        each = chain.from_iterable(iter_unpack(f"{self._key_bytes}s", keys))
        hashes = np.fromiter(map(hash, each), np.int64, len(keys) // self._key_bytes)
        buckets = hashes & (self._mask << 1 | 1)
        return np.where(buckets < len(self._first), buckets, hashes & self._mask)

    def _bucket(self, key: bytes) -> int:
        number = hash(key)  # of this process: clients choose chunk hashes, and could choose those of one bucket
        bucket = number & (self._mask << 1 | 1)
        return bucket if bucket < len(self._first) else number & self._mask

    def _split(self) -> None:
        """Add a bucket, with the keys of another one that belong into it."""
        old = len(self._first) & self._mask
        row = self._first[old]
        self._first[old] = NO_ROW
        self._first.append(NO_ROW)
        while row >= 0:
            after = self._next[row]
            bucket = self._bucket(self.key(row))
            self._next[row], self._first[bucket] = self._first[bucket], row
            row = after
        if len(self._first) == 2 * (self._mask + 1):
            self._mask = self._mask << 1 | 1
