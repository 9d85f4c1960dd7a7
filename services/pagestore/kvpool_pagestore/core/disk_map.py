"""What is on disk, in columns: one row a chunk, with a bitmap of its shards. The eviction policy shares the rows."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from itertools import chain, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.core.cluster import PageMetadata
from kvpool.core.location_digest import ChunkPlaces
from kvpool.core.page import PageKey
from kvpool_pagestore.core.chain_links import ALL_IN_CHAINS, ChainLink, ChainLinks
from kvpool_pagestore.core.chunk_columns import HASH_BYTES, NAME_BYTES, ChunkColumns, FoundChunks
from kvpool_pagestore.core.events import BytesHeld, ChunksLeft, PageEvents, PagesLeft
from kvpool_pagestore.core.eviction import EvictionPolicy
from kvpool_pagestore.core.key_rows import NO_ROW, PackedRows
from kvpool_pagestore.core.keyspaces import chunk_pages
from kvpool_pagestore.core.retained import retention_of
from kvpool_pagestore.core.retention import extended
from kvpool_pagestore.core.stored_pages import run_begins, words

_PART_ROWS: Final = 256
_PLACED_ROWS: Final = 1 << 17  # two steps of 15 ms; what is gathered for each range goes back to the system afterwards
_MANY: Final = 1 << 62

PageBytes = Callable[[PageKey], int]
"""What a page counts on disk; a pure function of its keyspace and shard."""


@dataclass(frozen=True, slots=True)
class DiskChunk:
    """One chunk's pages on disk."""

    keyspace: bytes
    chunk_hash: bytes
    shards: int
    metadata: PageMetadata

    @property
    def name(self) -> bytes:
        return self.keyspace + self.chunk_hash

    @property
    def keys(self) -> list[PageKey]:
        return chunk_pages(self.keyspace, self.chunk_hash, self.shards)


class _ChunkRows(PackedRows):
    """Rows of chunk names, with the bitmaps of their shards; the policy lets go of none that is on disk."""

    def __init__(self) -> None:
        super().__init__(NAME_BYTES)
        self.shards = array("Q")  # 0: not on disk, whatever the other columns say

    def add(self, key: bytes) -> int:
        row = super().add(key)
        if row == len(self.shards):
            self.shards.append(0)
        return row

    def remove(self, row: int) -> None:
        if not self.shards[row]:
            super().remove(row)


class DiskMap:
    """Pages of the disk tier, and which chunks of them go when it is full.

    Some 150 bytes a chunk, the policy's included. Iteration follows rows, so that the map may change meanwhile.
    """

    def __init__(
        self,
        page_bytes: PageBytes,
        events: PageEvents,
        now_us: Callable[[], int],
        links: ChainLinks = ALL_IN_CHAINS,
    ) -> None:
        self._page_bytes, self._links = page_bytes, links
        self._known_bytes: dict[tuple[bytes, int], int] = {}  # by keyspace and shard
        self._events = events
        self._now_us = now_us  # wall time, for pins and ends of life
        self._rows = _ChunkRows()
        self._policy: EvictionPolicy[bytes] = EvictionPolicy(self._rows)  # a keyspace is a domain
        self._kept = ChunkColumns()
        self._chosen: list[bytes] = []  # by the last call of `oldest`
        self.page_count = 0
        self.size_bytes = 0  # of pages; keys, indexes and logs of the store come on top

    def page_bytes(self, key: PageKey) -> int:
        """What a page counts towards the budget of the disk, and towards quotas."""
        at = (key.keyspace, key.shard)
        size_bytes = self._known_bytes.get(at)
        if size_bytes is None:
            size_bytes = self._known_bytes[at] = self._page_bytes(key)
        return size_bytes

    def __contains__(self, key: PageKey) -> bool:
        row = self._find(key.keyspace + key.chunk_hash)
        return row >= 0 and bool(self._rows.shards[row] >> key.shard & 1)

    def add(self, key: PageKey, metadata: PageMetadata, *, is_used: bool = False) -> bool:
        """A page is durable. False if it was there already. is_used: somebody has asked for it since it came.

        Pages of a chunk are kept or given up together, as the one asks that wants to be kept longest.
        """
        row = self._open(key.keyspace + key.chunk_hash, metadata, is_used)
        if self._rows.shards[row] >> key.shard & 1:
            return False
        self._rows.shards[row] |= 1 << key.shard
        self.page_count += 1
        self._count(key, self.page_bytes(key))
        return True

    def restore(self, found: FoundChunks) -> None:
        """Take over what the scan of a start has found; there is nothing here yet. No use of what was found.

        May run on any thread while nothing else uses the map; `count_restored` follows on the event loop.
        """
        self._rows.fill(found.names)
        self._rows.shards, self._kept = found.shards, found.kept
        parents, positions, keyspaces = _chains(found, self._links)
        self._policy.restore_all(parents, positions, keyspaces)
        name_of = self._rows.key
        for row in np.flatnonzero((parents == NO_ROW) & (positions > 0)).tolist():
            name = name_of(row)
            self._policy.follow(name, name[:HASH_BYTES] + self._kept.metadata(row).parent_hash, int(positions[row]))
        for row in list(self._kept.asked):
            self._policy.retain(name_of(row), retention_of(self._kept.metadata(row)))

    def count_restored(self, found: FoundChunks) -> None:
        """Count the pages that were restored, and publish their bytes."""
        for kind, count in found.page_counts.items():
            self.page_count += count
            key = PageKey(kind.keyspace, bytes(HASH_BYTES), kind.shard)
            self._count(key, count * self.page_bytes(key))

    def metadata(self, key: PageKey) -> PageMetadata | None:
        """What is kept beside a page, or None if the page is not on disk."""
        row = self._find(key.keyspace + key.chunk_hash)
        return self._kept.metadata(row) if row >= 0 and self._rows.shards[row] >> key.shard & 1 else None

    def chunk(self, keyspace: bytes, chunk_hash: bytes) -> DiskChunk | None:
        """All that is on disk of one chunk."""
        row = self._find(keyspace + chunk_hash)
        return None if row < 0 else self._chunk(row)

    def location(self, keyspace: bytes, chunk_hash: bytes) -> tuple[int, bytes] | None:
        """The bitmap of a chunk's shards on disk and its group's head: `chunk`, as far as the index needs it."""
        row = self._find(keyspace + chunk_hash)
        return None if row < 0 else (self._rows.shards[row], self._kept.head(row))

    def locations(self, keyspace: bytes, chunk_hashes: Collection[bytes]) -> list[tuple[bytes, int, bytes]]:
        """Those of some chunks that are on disk: hash, bitmap of shards, and head of the group of each."""
        if not len(self._rows):
            return []
        hashes = list(chunk_hashes)
        rows = self._rows.find_all(b"".join([keyspace + one for one in hashes]))
        shards = np.frombuffer(self._rows.shards, np.uint64)[rows] * (rows >= 0)
        found = np.flatnonzero(shards)
        if len(found) < len(hashes):  # others may have a row, for the chunks that follow them, and no columns
            hashes, rows, shards = [hashes[at] for at in found.tolist()], rows[found], shards[found]
        return list(zip(hashes, shards.tolist(), self._kept.heads_of(rows), strict=True))

    def places(self) -> Iterator[ChunkPlaces]:
        """All chunks, for the index."""
        for start in range(0, len(self._rows), _PLACED_ROWS):
            end = min(start + _PLACED_ROWS, len(self._rows))
            rows = start + np.flatnonzero(np.frombuffer(self._rows.shards[start:end], np.uint64))
            names = np.frombuffer(self._rows.keys(start, end), np.uint8).reshape(-1, NAME_BYTES)
            heads = np.frombuffer(self._kept.heads(start, end), np.uint8).reshape(-1, HASH_BYTES)
            if len(rows) < end - start:
                names, heads = names[rows - start], heads[rows - start]
            for keyspace, begin, stop in _keyspaces(names):
                yield ChunkPlaces(keyspace, names[begin:stop, HASH_BYTES:].tobytes(), heads[begin:stop].tobytes())

    def set_metadata(self, keyspace: bytes, chunk_hash: bytes, metadata: PageMetadata) -> None:
        """Other retention, for all pages of a chunk; nothing if the chunk is not on disk."""
        row = self._find(keyspace + chunk_hash)
        if row >= 0:
            self._kept.keep(row, metadata)
            self._policy.retain(keyspace + chunk_hash, retention_of(metadata))

    def names(self) -> Iterator[bytes]:
        """Keyspace id + chunk hash of every chunk, in any order."""
        return chain.from_iterable(self.name_parts(_PART_ROWS))

    def name_parts(self, row_count: int) -> Iterator[list[bytes]]:
        """The same, as many rows at a time as fit one turn of the event loop; a part may be empty.

        Chunks that are there all the time come once; of those that come or go meanwhile, some do.
        """
        start = 0
        while start < len(self._rows):
            end = min(start + row_count, len(self._rows))
            yield [self._rows.key(row) for row in range(start, end) if self._rows.shards[row]]
            start = end

    @property
    def row_count(self) -> int:
        """Rows of `name_parts`: at least one for each chunk."""
        return len(self._rows)

    def touch(self, key: PageKey) -> None:
        """The page was used."""
        self._policy.touch(key.keyspace + key.chunk_hash)

    def remove(self, keys: Iterable[PageKey]) -> list[tuple[PageKey, bytes]]:
        """Pages are gone or worthless. Return those that were here, each with the head of its chain group."""
        removed: list[tuple[PageKey, bytes]] = []
        for key in keys:
            name = key.keyspace + key.chunk_hash
            row = self._find(name)
            if row < 0 or not self._rows.shards[row] >> key.shard & 1:
                continue
            removed.append((key, self._kept.head(row)))
            self._rows.shards[row] &= ~(1 << key.shard)
            self.page_count -= 1
            self._count(key, -self.page_bytes(key))
            if not self._rows.shards[row]:
                self._kept.forget(row)
                self._policy.remove(name)
        if removed:
            self._events.publish(PagesLeft([key for key, _ in removed]))
        return removed

    def remove_chunks(self, names: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Forget all pages of chunks, named once each as by `names`; those that were here, with their shards."""
        if not len(self._rows):
            return []
        rows = self._rows.find_all(b"".join(names))
        bitmaps = np.frombuffer(self._rows.shards, np.uint64)[rows] * (rows >= 0)
        removed: list[tuple[bytes, int]] = []
        counts: Counter[tuple[bytes, int]] = Counter()  # of chunks by keyspace and bitmap of shards: few differ
        for name, row, shards in zip(names, rows.tolist(), bitmaps.tolist(), strict=True):
            if shards:
                counts[name[:HASH_BYTES], shards] += 1
                removed.append((name, shards))
                self._rows.shards[row] = 0
                self._kept.forget(row)
                self._policy.remove_row(row)
        for (keyspace, shards), count in counts.items():
            size_bytes = count * sum(map(self.page_bytes, chunk_pages(keyspace, bytes(HASH_BYTES), shards)))
            self.page_count -= count * shards.bit_count()
            self.size_bytes -= size_bytes
            self._events.publish(BytesHeld(keyspace, -size_bytes))
        if removed:
            self._events.publish(ChunksLeft(removed))
        return removed

    def oldest(
        self,
        free_bytes: int,
        spare: Callable[[PageKey], bool],
        keyspaces: Collection[bytes] | None = None,
        *,
        max_chunks: int = _MANY,
    ) -> list[DiskChunk]:
        """Chunks to give up, the least worth keeping first, until their pages make up `free_bytes`.

        The caller removes them now; one that it keeps may be chosen again. Chunks with a page that `spare` wants kept
        (being read, say) are passed over, as are pinned ones and, if `keyspaces` is not None, those of others.
        """
        self._put_back_chosen()
        chosen: list[DiskChunk] = []
        now_us = self._now_us()
        while free_bytes > 0 and len(chosen) < max_chunks:
            name = self._policy.evict(now_us, domains=keyspaces, spare=lambda name: any(map(spare, self._keys(name))))
            if name is None:
                break
            self._chosen.append(name)
            chosen.append(chunk := self._chunk(self._rows.find(name)))
            free_bytes -= sum(self.page_bytes(key) for key in chunk.keys)
        return chosen

    def oldest_of_all(self, free_bytes: int, max_chunks: int = _MANY) -> list[DiskChunk]:
        """As `oldest`, but where nothing else may go, pinned chunks too, those first whose pins end first."""
        chosen = self.oldest(free_bytes, lambda key: False, max_chunks=max_chunks)
        free_bytes -= sum(self.page_bytes(key) for chunk in chosen for key in chunk.keys)
        if free_bytes <= 0 or len(chosen) >= max_chunks:
            return chosen
        names = set(self._chosen)
        left = (chunk for row in self._kept.asked if (chunk := self._chunk(row)).name not in names)
        pinned = (chunk for chunk in left if chunk.metadata.pinned_until_us)
        order = nsmallest(
            min(max_chunks, self._kept.asked_count),
            pinned,
            key=lambda chunk: (chunk.metadata.pinned_until_us, chunk.metadata.priority),
        )
        for chunk in order:
            if free_bytes <= 0:
                break
            chosen.append(chunk)
            free_bytes -= sum(self.page_bytes(key) for key in chunk.keys)
        return chosen

    def chunks(self) -> Iterator[DiskChunk]:
        """Everything, in any order."""
        for row in range(len(self._rows)):
            if self._rows.shards[row]:
                yield self._chunk(row)

    # Inside

    def _find(self, name: bytes) -> int:
        row = self._rows.find(name)
        return row if row >= 0 and self._rows.shards[row] else NO_ROW

    def _open(self, name: bytes, metadata: PageMetadata, is_used: bool) -> int:
        """The row of a chunk of which a page came."""
        row = self._find(name)
        if row >= 0:
            if (known := self._kept.metadata(row)) != metadata:
                self.set_metadata(name[:HASH_BYTES], name[HASH_BYTES:], extended(known, metadata))
            return row
        link = self._links.find(name[:HASH_BYTES], metadata)
        self._enter(name, metadata, link, partial(self._policy.insert, is_unlikely=link.is_passed and not is_used))
        row = self._rows.find(name)
        self._kept.extend(len(self._rows))
        self._kept.keep(row, metadata)
        return row

    def _enter(self, name: bytes, metadata: PageMetadata, link: ChainLink, enter: Callable[..., None]) -> None:
        keyspace = name[:HASH_BYTES]
        parent = keyspace + link.parent if link.parent is not None else None
        enter(name, parent, position=metadata.chunk_index, domain=keyspace, retention=retention_of(metadata))

    def _chunk(self, row: int) -> DiskChunk:
        name = self._rows.key(row)
        return DiskChunk(name[:HASH_BYTES], name[HASH_BYTES:], self._rows.shards[row], self._kept.metadata(row))

    def _keys(self, name: bytes) -> list[PageKey]:
        return chunk_pages(name[:HASH_BYTES], name[HASH_BYTES:], self._rows.shards[self._rows.find(name)])

    def _put_back_chosen(self) -> None:
        for name in self._chosen:
            if self._find(name) >= 0 and name not in self._policy:
                metadata = self._kept.metadata(self._rows.find(name))
                self._enter(name, metadata, self._links.find(name[:HASH_BYTES], metadata), self._policy.restore)
        self._chosen = []

    def _count(self, key: PageKey, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._events.publish(BytesHeld(key.keyspace, size_bytes))


def _keyspaces(names: npt.NDArray[np.uint8]) -> list[tuple[bytes, int, int]]:
    """Runs of names [N, NAME_BYTES] of one keyspace: it, the first row, the one after the last."""
    begins = run_begins(words(names[:, :HASH_BYTES])).tolist()
    return [(names[begin, :HASH_BYTES].tobytes(), begin, end) for begin, end in pairwise([*begins, len(names)])]


def _chains(
    found: FoundChunks, links: ChainLinks
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], list[tuple[bytes, int, int]]]:
    """By row the chunk before, NO_ROW if that is not at once to be found, and the position in the chain, 0 for chunks
    that stand alone.

    And the keyspaces, each with its first row and the one after its last.
    """
    names = np.frombuffer(found.names, np.uint8).reshape(-1, NAME_BYTES)
    keyspaces = _keyspaces(names)
    hashes, wanted = words(names[:, HASH_BYTES:]), words(found.kept.parents)
    positions = np.maximum(found.kept.indexes, -1)
    parents = np.full(len(names), NO_ROW, np.int32)
    for keyspace, begin, end in keyspaces:
        if links.stand_alone(keyspace):
            positions[begin:end] = 0
        at = begin + np.searchsorted(hashes[begin:end, 0], wanted[begin:end, 0])
        at = np.minimum(at, end - 1)
        is_right = (hashes[at] == wanted[begin:end]).all(axis=1) & (positions[begin:end] > 0)
        parents[begin:end][is_right] = at[is_right]
    return parents, positions, keyspaces
