"""Pages of the disk tier as a scan finds them, in columns: a start finds ten million. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.core.cluster import PageMetadata
from kvpool.core.page import KEY_BYTES, PageKey
from kvpool_pagestore.core.kept_metadata import METADATA_COLUMNS, pack_metadata, unpack_metadata

KEY_COLUMNS: Final = np.dtype([("keyspace", "V16"), ("chunk_hash", "V16"), ("shard", "<u2")])
_KEYSPACE_BYTES: Final = 16


class StoredPage(NamedTuple):
    """One page of the disk tier."""

    key: PageKey
    page_bytes: int
    metadata: PageMetadata


class PageKind(NamedTuple):
    """What pages have in common that have one size."""

    keyspace: bytes
    shard: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Some pages by ascending packed key, in columns of one length. Iterating makes an object of each."""

    keys: npt.NDArray[np.void]  # KEY_COLUMNS
    page_bytes: npt.NDArray[np.int64]
    metadata: npt.NDArray[np.void]  # METADATA_COLUMNS

    @classmethod
    def of(cls, pages: Iterable[tuple[PageKey, int, PageMetadata]]) -> StoredPages:
        """From objects, in any order."""
        found = sorted((key.pack(), page_bytes, pack_metadata(metadata)) for key, page_bytes, metadata in pages)
        sizes = np.array([size for _, size, _ in found], np.int64)
        return cls.packed(
            [key for key, _, _ in found], sizes, np.frombuffer(b"".join(kept for _, _, kept in found), METADATA_COLUMNS)
        )

    @classmethod
    def packed(
        cls, keys: Iterable[bytes], page_bytes: npt.NDArray[np.int64], metadata: npt.NDArray[np.void]
    ) -> StoredPages:
        """From packed keys, ascending."""
        return cls(np.frombuffer(b"".join(keys), KEY_COLUMNS), page_bytes, metadata)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[StoredPage]:
        for number in range(len(self)):
            key = PageKey.unpack(self.keys[number].tobytes())
            yield StoredPage(key, int(self.page_bytes[number]), unpack_metadata(self.metadata[number].tobytes()))

    @property
    def key_bytes(self) -> npt.NDArray[np.uint8]:
        """[N, KEY_BYTES]: the packed keys."""
        return self.keys.view(np.uint8).reshape(-1, KEY_BYTES)

    def chosen(self, mask: npt.NDArray[np.bool_]) -> StoredPages:
        """Those for which it is true."""
        return StoredPages(self.keys[mask], self.page_bytes[mask], self.metadata[mask])

    @property
    def have_an_end(self) -> npt.NDArray[np.bool_]:
        """Of which the pin or the life ends some time: of most, neither does."""
        ends = [self.metadata[name] != 0 for name in ("pinned_until_us", "expires_us")]
        found: npt.NDArray[np.bool_] = np.logical_or(*ends)
        return found

    def kinds(self) -> list[tuple[PageKind, npt.NDArray[np.int64]]]:
        """The kinds that there are, and the pages of each."""
        found: list[tuple[PageKind, npt.NDArray[np.int64]]] = []
        begins = run_begins(words(self.key_bytes[:, :_KEYSPACE_BYTES])).tolist()
        for begin, end in pairwise([*begins, len(self)]):
            sizes, shards = self.page_bytes[begin:end], self.keys["shard"][begin:end]
            for shard in np.flatnonzero(np.bincount(shards)).tolist():
                pages = begin + np.flatnonzero(shards == shard)
                of_shard = sizes[pages - begin]
                for size in {int(of_shard[0])} if (of_shard == of_shard[0]).all() else set(of_shard.tolist()):
                    kind = PageKind(self.keys["keyspace"][begin].tobytes(), shard, size)
                    found.append((kind, pages[of_shard == size]))
        return found


def words(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """[N, bytes / 8]: rows of bytes as numbers, which are in order as the bytes are."""
    return np.ascontiguousarray(rows).view(">u8").astype(np.uint64)


def run_begins(rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The rows of [N, words] that differ from the one before, the first among them."""
    differs = np.ones(len(rows), bool)
    differs[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return np.flatnonzero(differs)
