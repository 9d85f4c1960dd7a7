"""What is on disk, in columns: one row a chunk, with a bitmap of its shards. The eviction policy shares the rows."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain
from struct import Struct
from typing import Final

from kvpool.core.cluster import PageMetadata
from kvpool.core.grid import shards_in
from kvpool.core.location_digest import ChunkPlace
from kvpool.core.page import PageKey
from kvpool_pagestore.core.events import BytesHeld, PageEvents, PagesLeft
from kvpool_pagestore.core.eviction import EvictionPolicy
from kvpool_pagestore.core.kept_metadata import StoredPage, unpack_metadata
from kvpool_pagestore.core.key_rows import NO_ROW, PackedRows
from kvpool_pagestore.core.retained import retention_of
from kvpool_pagestore.core.retention import extended

_NAME_BYTES: Final = 32  # of a chunk: keyspace id and chunk hash, which a packed key begins with
_HASH_BYTES: Final = 16
_ASKED: Final = Struct("<qiqq")  # ttl_ms, priority, pinned_until_us, expires_us
_PART_ROWS: Final = 256
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
        return [PageKey(self.keyspace, self.chunk_hash, shard) for shard in shards_in(self.shards)]


class _ChunkRows(PackedRows):
    """Rows of chunk names, with the bitmaps of their shards; the policy lets go of none that is on disk."""

    def __init__(self) -> None:
        super().__init__(_NAME_BYTES)
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

    Some 170 bytes a chunk, the policy's included. Iterating goes by rows, so that the map may change meanwhile.
    """

    def __init__(self, page_bytes: PageBytes, events: PageEvents, now_us: Callable[[], int]) -> None:
        self._page_bytes = page_bytes
        self._known_bytes: dict[tuple[bytes, int], int] = {}  # by keyspace and shard
        self._events = events
        self._now_us = now_us  # wall time, for pins and ends of life
        self._rows = _ChunkRows()
        self._policy: EvictionPolicy[bytes] = EvictionPolicy(self._rows)  # a keyspace is a domain
        self._parents, self._heads = bytearray(), bytearray()
        self._indexes, self._prompt_tokens = array("q"), array("q")
        self._asked: dict[int, bytes] = {}  # by row, packed: only of chunks whose retention is not plain
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

    def add(self, key: PageKey, metadata: PageMetadata) -> bool:
        """A page is durable. False if it was there already.

        Pages of a chunk are kept or given up together, as the one asks that wants to be kept longest.
        """
        row = self._open(key.keyspace + key.chunk_hash, metadata, self._policy.insert)
        if self._rows.shards[row] >> key.shard & 1:
            return False
        self._rows.shards[row] |= 1 << key.shard
        self.page_count += 1
        self._count(key, self.page_bytes(key))
        return True

    def add_found(self, pages: Iterable[StoredPage]) -> None:
        """Pages that the scan of a start has found. Quick where those of a chunk follow each other."""
        shards, row, last = self._rows.shards, NO_ROW, (b"", b"")
        counts: Counter[bytes] = Counter()
        for packed_key, _, packed_metadata in pages:
            name = packed_key[:_NAME_BYTES]
            if (name, packed_metadata) != last:
                last = name, packed_metadata
                row = self._open(name, unpack_metadata(packed_metadata), self._policy.restore)
            bit = 1 << (packed_key[-2] | packed_key[-1] << 8)
            if not shards[row] & bit:
                shards[row] |= bit
                counts[packed_key[:_HASH_BYTES] + packed_key[_NAME_BYTES:]] += 1
        for size, count in counts.items():
            self.page_count += count
            key = PageKey.unpack(size[:_HASH_BYTES] + bytes(_HASH_BYTES) + size[_HASH_BYTES:])
            self._count(key, count * self.page_bytes(key))

    def metadata(self, key: PageKey) -> PageMetadata | None:
        """What is kept beside a page, or None if the page is not on disk."""
        row = self._find(key.keyspace + key.chunk_hash)
        return self._metadata(row) if row >= 0 and self._rows.shards[row] >> key.shard & 1 else None

    def chunk(self, keyspace: bytes, chunk_hash: bytes) -> DiskChunk | None:
        """All that is on disk of one chunk."""
        row = self._find(keyspace + chunk_hash)
        return None if row < 0 else self._chunk(row)

    def location(self, keyspace: bytes, chunk_hash: bytes) -> tuple[int, bytes] | None:
        """The bitmap of a chunk's shards on disk and its group's head: `chunk`, as far as the index needs it."""
        row = self._find(keyspace + chunk_hash)
        return None if row < 0 else (self._rows.shards[row], self._head(row))

    def places(self) -> Iterator[ChunkPlace]:
        """All chunks, for the index."""
        for row in range(len(self._rows)):
            if self._rows.shards[row]:
                name = self._rows.key(row)
                yield ChunkPlace(name[:_HASH_BYTES], name[_HASH_BYTES:], self._head(row))

    def set_metadata(self, keyspace: bytes, chunk_hash: bytes, metadata: PageMetadata) -> None:
        """Other retention, for all pages of a chunk; nothing if the chunk is not on disk."""
        row = self._find(keyspace + chunk_hash)
        if row >= 0:
            self._keep(row, metadata)
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
            removed.append((key, self._head(row)))
            self._rows.shards[row] &= ~(1 << key.shard)
            self.page_count -= 1
            self._count(key, -self.page_bytes(key))
            if not self._rows.shards[row]:
                self._asked.pop(row, None)
                self._policy.remove(name)
        if removed:
            self._events.publish(PagesLeft([key for key, _ in removed]))
        return removed

    def remove_chunk(self, name: bytes) -> list[PageKey]:
        """Forget all pages of a chunk, named as by `names`; which they were."""
        row = self._find(name)
        return [key for key, _ in self.remove(self._chunk(row).keys)] if row >= 0 else []

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
        left = (chunk for row in self._asked if (chunk := self._chunk(row)).name not in names)
        pinned = (chunk for chunk in left if chunk.metadata.pinned_until_us)
        order = nsmallest(
            min(max_chunks, len(self._asked)),
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

    def _open(self, name: bytes, metadata: PageMetadata, enter: Callable[..., None]) -> int:
        """The row of a chunk of which a page came, brought to the policy by `enter` if it is new."""
        row = self._find(name)
        if row >= 0:
            if (known := self._metadata(row)) != metadata:
                self.set_metadata(name[:_HASH_BYTES], name[_HASH_BYTES:], extended(known, metadata))
            return row
        self._enter(name, metadata, enter)
        row = self._rows.find(name)
        while len(self._indexes) < len(self._rows):
            self._indexes.extend([0] * _PART_ROWS)
            self._prompt_tokens.extend([0] * _PART_ROWS)
            self._parents += bytes(_PART_ROWS * _HASH_BYTES)
            self._heads += bytes(_PART_ROWS * _HASH_BYTES)
        self._keep(row, metadata)
        return row

    def _enter(self, name: bytes, metadata: PageMetadata, enter: Callable[..., None]) -> None:
        keyspace = name[:_HASH_BYTES]
        parent = keyspace + metadata.parent_hash if metadata.chunk_index else None
        enter(name, parent, position=metadata.chunk_index, domain=keyspace, retention=retention_of(metadata))

    def _keep(self, row: int, metadata: PageMetadata) -> None:
        at = slice(row * _HASH_BYTES, (row + 1) * _HASH_BYTES)
        self._parents[at], self._heads[at] = metadata.parent_hash, metadata.group_head_hash
        self._indexes[row], self._prompt_tokens[row] = metadata.chunk_index, metadata.prompt_tokens
        asked = metadata.ttl_ms, metadata.priority, metadata.pinned_until_us, metadata.expires_us
        if any(asked):
            self._asked[row] = _ASKED.pack(*asked)
        else:
            self._asked.pop(row, None)

    def _metadata(self, row: int) -> PageMetadata:
        packed = self._asked.get(row)
        ttl_ms, priority, pinned_until_us, expires_us = (0, 0, 0, 0) if packed is None else _ASKED.unpack(packed)
        return PageMetadata(
            parent_hash=bytes(self._parents[row * _HASH_BYTES : (row + 1) * _HASH_BYTES]),
            chunk_index=self._indexes[row],
            group_head_hash=self._head(row),
            ttl_ms=ttl_ms,
            priority=priority,
            pinned_until_us=pinned_until_us,
            prompt_tokens=self._prompt_tokens[row],
            expires_us=expires_us,
        )

    def _head(self, row: int) -> bytes:
        return bytes(self._heads[row * _HASH_BYTES : (row + 1) * _HASH_BYTES])

    def _chunk(self, row: int) -> DiskChunk:
        name = self._rows.key(row)
        return DiskChunk(name[:_HASH_BYTES], name[_HASH_BYTES:], self._rows.shards[row], self._metadata(row))

    def _keys(self, name: bytes) -> Iterator[PageKey]:
        shards = shards_in(self._rows.shards[self._rows.find(name)])
        return (PageKey(name[:_HASH_BYTES], name[_HASH_BYTES:], shard) for shard in shards)

    def _put_back_chosen(self) -> None:
        for name in self._chosen:
            if self._find(name) >= 0 and name not in self._policy:
                self._enter(name, self._metadata(self._rows.find(name)), self._policy.restore)
        self._chosen = []

    def _count(self, key: PageKey, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._events.publish(BytesHeld(key.keyspace, size_bytes))
