"""What the map of the disk tier keeps of each chunk, in columns by row; and how a scan fills them. Pure."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from struct import Struct
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.core.cluster import PageMetadata
from kvpool_pagestore.core.kept_metadata import unpack_metadata
from kvpool_pagestore.core.retention import extended
from kvpool_pagestore.core.stored_pages import PageKind, StoredPage, StoredPages, run_begins, words

NAME_BYTES: Final = 32  # of a chunk: keyspace id and chunk hash, which a packed key begins with
HASH_BYTES: Final = 16
_ASKED: Final = Struct("<qiqqqq")  # ttl_ms, priority, pinned_until_us, expires_us, chunk_index, prompt_tokens
_HASH: Final = Struct(f"{HASH_BYTES}s")
_SMALL: Final = np.iinfo(np.int32)  # indexes and counts of tokens that fit a column
_PART_ROWS: Final = 256
_ONE: Final = np.uint64(1)


class ChunkColumns:
    """What is kept beside the pages of chunks: as much for each row as nearly all ask for, the rest apart."""

    def __init__(self) -> None:
        self._parents, self._heads = bytearray(), bytearray()
        self._indexes, self._prompt_tokens = array("i"), array("i")
        self._asked: dict[int, bytes] = {}  # by row, packed: only of chunks whose retention or numbers are not plain

    def extend(self, row_count: int) -> None:
        """Have so many rows at least."""
        while len(self._indexes) < row_count:
            self._indexes.extend([0] * _PART_ROWS)
            self._prompt_tokens.extend([0] * _PART_ROWS)
            self._parents += bytes(_PART_ROWS * HASH_BYTES)
            self._heads += bytes(_PART_ROWS * HASH_BYTES)

    def append(self, rows: npt.NDArray[np.void]) -> None:
        """Rows more, of METADATA_COLUMNS. Not after `extend`."""
        first = len(self._indexes)
        self._parents += rows["parent"].tobytes()
        self._heads += rows["head"].tobytes()
        asked = (rows["ttl_ms"] != 0) | (rows["priority"] != 0)
        asked |= (rows["pinned_until_us"] != 0) | (rows["expires_us"] != 0)
        for name, column in (("index", self._indexes), ("prompt_tokens", self._prompt_tokens)):
            small = np.clip(rows[name], _SMALL.min, _SMALL.max)
            column.frombytes(small.astype(np.int32).tobytes())
            asked |= small != rows[name]
        for at in np.flatnonzero(asked).tolist():
            self.keep(first + at, unpack_metadata(rows[at].tobytes()))

    def keep(self, row: int, metadata: PageMetadata) -> None:
        at = slice(row * HASH_BYTES, (row + 1) * HASH_BYTES)
        self._parents[at], self._heads[at] = metadata.parent_hash, metadata.group_head_hash
        numbers = metadata.chunk_index, metadata.prompt_tokens
        small = self._indexes[row], self._prompt_tokens[row] = _small(numbers[0]), _small(numbers[1])
        asked = metadata.ttl_ms, metadata.priority, metadata.pinned_until_us, metadata.expires_us
        if any(asked) or small != numbers:
            self._asked[row] = _ASKED.pack(*asked, *numbers)
        else:
            self._asked.pop(row, None)

    def metadata(self, row: int) -> PageMetadata:
        packed = self._asked.get(row)
        plain = 0, 0, 0, 0, self._indexes[row], self._prompt_tokens[row]
        ttl_ms, priority, pinned_until_us, expires_us, chunk_index, tokens = (
            plain if packed is None else _ASKED.unpack(packed)
        )
        return PageMetadata(
            parent_hash=bytes(self._parents[row * HASH_BYTES : (row + 1) * HASH_BYTES]),
            chunk_index=chunk_index,
            group_head_hash=self.head(row),
            ttl_ms=ttl_ms,
            priority=priority,
            pinned_until_us=pinned_until_us,
            prompt_tokens=tokens,
            expires_us=expires_us,
        )

    def head(self, row: int) -> bytes:
        """The group's head hash."""
        return bytes(self._heads[row * HASH_BYTES : (row + 1) * HASH_BYTES])

    def heads(self, first: int, end: int) -> bytes:
        """Those of rows."""
        return bytes(memoryview(self._heads)[first * HASH_BYTES : end * HASH_BYTES])

    def heads_of(self, rows: npt.NDArray[np.int32]) -> Iterator[bytes]:
        """Those of some rows."""
        heads = np.frombuffer(self._heads, f"V{HASH_BYTES}")[rows].tobytes()
        return (head for (head,) in _HASH.iter_unpack(heads))

    def forget(self, row: int) -> None:
        """The row is free."""
        self._asked.pop(row, None)

    @property
    def asked(self) -> Iterator[int]:
        """Rows of chunks whose retention is not plain."""
        return iter(self._asked)

    @property
    def asked_count(self) -> int:
        return len(self._asked)

    @property
    def indexes(self) -> npt.NDArray[np.int32]:
        """[N] position of each chunk in its chain as of now, the highest for all that do not fit."""
        return np.frombuffer(self._indexes, np.int32)

    @property
    def parents(self) -> npt.NDArray[np.uint8]:
        """[N, HASH_BYTES] hash of the chunk before each, as of now."""
        return np.frombuffer(self._parents, np.uint8).reshape(-1, HASH_BYTES)


class FoundChunks:
    """Gathers the pages that a scan finds, by ascending key, to rows of chunks in the same order.

    Pages of a chunk are kept or given up together, as the one asks that wants to be kept longest.
    """

    def __init__(self) -> None:
        self.names = bytearray()
        self.shards = array("Q")
        self.kept = ChunkColumns()
        self.page_counts: Counter[PageKind] = Counter()
        self.ending: list[StoredPage] = []  # pages whose pin or life ends some time

    def __len__(self) -> int:
        return len(self.shards)

    def add(self, pages: StoredPages) -> None:
        """The next pages. Raises ValueError if their keys do not ascend."""
        if not len(pages):
            return
        packed = pages.key_bytes[:, :NAME_BYTES]
        names = words(packed)
        begins = run_begins(names)
        bits = np.left_shift(_ONE, pages.keys["shard"].astype(np.uint64))
        shards = np.bitwise_or.reduceat(bits, begins)
        last, next_one = bytes(self.names[-NAME_BYTES:]), packed[0].tobytes()
        if next_one < last or not _ascend(names[begins]):
            raise ValueError("pages must be found by ascending key")
        for kind, found in pages.kinds():
            self.page_counts[kind] += len(found)
        goes_on = next_one == last
        if goes_on:  # the last chunk of the pages before
            self.shards[-1] |= int(shards[0])
        first = len(self) - goes_on
        new = begins[1:] if goes_on else begins
        self.names += packed[new].tobytes()
        self.shards.frombytes(shards[goes_on:].tobytes())
        self.kept.append(pages.metadata[new])
        self._merge(pages.metadata, begins, first, goes_on=goes_on)
        self.ending += pages.chosen(pages.have_an_end)

    def _merge(
        self, metadata: npt.NDArray[np.void], begins: npt.NDArray[np.int64], first: int, *, goes_on: bool
    ) -> None:
        """What is kept beside the other pages of each chunk: nearly always the same as beside its first."""
        compared = np.ascontiguousarray(metadata).view(np.uint32).reshape(len(metadata), -1)
        differs = np.concatenate([[goes_on], (compared[1:] != compared[:-1]).any(axis=1)])
        differs[begins[1:]] = False
        if not goes_on:
            differs[0] = False
        for at in np.flatnonzero(differs).tolist():
            row = first + int(np.searchsorted(begins, at, side="right")) - 1
            self.kept.keep(row, extended(self.kept.metadata(row), unpack_metadata(metadata[at].tobytes())))


def _ascend(names: npt.NDArray[np.uint64]) -> bool:
    """Whether each row of [N, words] is less than the next."""
    before, after = names[:-1], names[1:]
    is_less, is_equal = np.zeros(len(before), bool), np.ones(len(before), bool)
    for word in range(names.shape[1]):
        is_less |= is_equal & (before[:, word] < after[:, word])
        is_equal &= before[:, word] == after[:, word]
    return bool(is_less.all())


def _small(number: int) -> int:
    return min(max(number, _SMALL.min), _SMALL.max)
