"""What is on disk, kept compactly: one entry a chunk, with a bitmap of its shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from kvpool.core.cluster import PageMetadata
from kvpool.core.eviction import DEFAULT_POLICY, EvictionPolicy, PolicyName, make_policy
from kvpool.core.grid import shards_in
from kvpool.core.location_digest import ChunkPlace
from kvpool.core.page import PageKey
from kvpool_pagestore.core.kept_metadata import StoredPage, group_head, pack_metadata, unpack_metadata
from kvpool_pagestore.core.retained import retention_of
from kvpool_pagestore.core.retention import extended

_KEYSPACE_BYTES = 16
_NAME_BYTES = 32  # of a chunk: keyspace id and chunk hash, which a packed key begins with

PageBytes = Callable[[PageKey], int]
"""Exact bytes of a page; a pure function of its keyspace and shard."""


@dataclass(slots=True)
class _Chunk:
    """Shards of one chunk. metadata is packed: a large disk has a million chunks."""

    shards: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class DiskChunk:
    """One chunk's pages on disk."""

    keyspace: bytes
    chunk_hash: bytes
    shards: int
    metadata: PageMetadata

    @property
    def keys(self) -> list[PageKey]:
        return [PageKey(self.keyspace, self.chunk_hash, shard) for shard in shards_in(self.shards)]


class DiskMap:
    """Pages of the disk tier, and which chunks of them go when it is full."""

    def __init__(self, page_bytes: PageBytes, policy: PolicyName = DEFAULT_POLICY) -> None:
        self._page_bytes = page_bytes
        self.on_bytes: Callable[[bytes, int], None] = lambda keyspace, size_bytes: None  # pages came (> 0) or went
        self.on_removed: Callable[[PageKey], None] = lambda key: None
        self.now_us: Callable[[], int] = lambda: 0  # wall time, for pins and ends of life
        self._chunks: dict[bytes, _Chunk] = {}  # by keyspace id + chunk hash
        self._policy: EvictionPolicy[bytes] = make_policy(policy)  # the same keys; a keyspace is a domain
        self._chosen: list[bytes] = []  # by the last call of `oldest`
        self._found: list[bytes] = []  # by a scan: the policy does not know them yet
        self.page_count = 0
        self.size_bytes = 0  # of pages; keys, indexes and logs of the store come on top

    def decide_by(self, policy: PolicyName, now_us: Callable[[], int]) -> None:
        """How victims are chosen. Only while the map is empty."""
        assert not self._chunks
        self._policy, self.now_us = make_policy(policy), now_us

    def __contains__(self, key: PageKey) -> bool:
        chunk = self._chunks.get(key.keyspace + key.chunk_hash)
        return chunk is not None and bool(chunk.shards >> key.shard & 1)

    def add(self, key: PageKey, metadata: PageMetadata) -> bool:
        """A page is durable. False if it was there already.

        Pages of a chunk are kept or given up together, as the one asks that wants to be kept longest.
        """
        at = key.keyspace + key.chunk_hash
        chunk, packed = self._chunks.get(at), pack_metadata(metadata)
        if chunk is None:
            chunk = self._chunks[at] = _Chunk(0, packed)
            self._enter(at, metadata)
        elif chunk.metadata != packed:
            self.set_metadata(key.keyspace, key.chunk_hash, extended(unpack_metadata(chunk.metadata), metadata))
        if chunk.shards >> key.shard & 1:
            return False
        chunk.shards |= 1 << key.shard
        self.page_count += 1
        self._count(key, self._page_bytes(key))
        return True

    def add_found(self, pages: Iterable[StoredPage]) -> None:
        """Pages that the scan of a start has found.

        Their chunks are shown to the policy later, by `enter_found`: that takes longer than the scan.
        """
        chunks, names, sizes = self._chunks, list[bytes](), list[bytes]()
        for packed_key, _, packed_metadata in pages:
            at, bit = packed_key[:_NAME_BYTES], 1 << (packed_key[-2] | packed_key[-1] << 8)
            chunk = chunks.get(at)
            if chunk is None:
                chunks[at] = _Chunk(bit, packed_metadata)
                names.append(at)
            elif chunk.metadata == packed_metadata and not chunk.shards & bit:
                chunk.shards |= bit
            else:  # a page that is to be kept for longer than others of its chunk
                self.add(PageKey.unpack(packed_key), unpack_metadata(packed_metadata))
                continue
            sizes.append(packed_key[:_KEYSPACE_BYTES] + packed_key[_NAME_BYTES:])
        self._found += names
        counts = Counter(sizes)
        for size, count in counts.items():
            self.page_count += count
            key = PageKey.unpack(size[:_KEYSPACE_BYTES] + bytes(_NAME_BYTES - _KEYSPACE_BYTES) + size[_KEYSPACE_BYTES:])
            self._count(key, count * self._page_bytes(key))

    def metadata(self, key: PageKey) -> PageMetadata | None:
        """What is kept beside a page, or None if the page is not on disk."""
        chunk = self._chunks.get(key.keyspace + key.chunk_hash)
        if chunk is None or not chunk.shards >> key.shard & 1:
            return None
        return unpack_metadata(chunk.metadata)

    def chunk(self, keyspace: bytes, chunk_hash: bytes) -> DiskChunk | None:
        """All that is on disk of one chunk."""
        chunk = self._chunks.get(keyspace + chunk_hash)
        return None if chunk is None else DiskChunk(keyspace, chunk_hash, chunk.shards, unpack_metadata(chunk.metadata))

    def location(self, keyspace: bytes, chunk_hash: bytes) -> tuple[int, bytes] | None:
        """The bitmap of a chunk's shards on disk and its group's head: `chunk`, as far as the index needs it."""
        chunk = self._chunks.get(keyspace + chunk_hash)
        return None if chunk is None else (chunk.shards, group_head(chunk.metadata))

    def places(self) -> Iterator[ChunkPlace]:
        """All chunks, for the index. Do not change the map while iterating."""
        for at, chunk in self._chunks.items():
            yield ChunkPlace(at[:16], at[16:], group_head(chunk.metadata))

    def set_metadata(self, keyspace: bytes, chunk_hash: bytes, metadata: PageMetadata) -> None:
        """Other retention, for all pages of a chunk; nothing if the chunk is not on disk."""
        chunk = self._chunks.get(keyspace + chunk_hash)
        if chunk is not None:
            chunk.metadata = pack_metadata(metadata)
            self._policy.retain(keyspace + chunk_hash, retention_of(metadata))

    def names(self) -> list[bytes]:
        """Keyspace id + chunk hash of every chunk, in any order."""
        return list(self._chunks)

    def touch(self, key: PageKey) -> None:
        """The page was used."""
        at = key.keyspace + key.chunk_hash
        if self._found:
            self._enter_missing([at])
        self._policy.touch(at)

    def enter_found(self, count: int) -> bool:
        """Show the policy some of the chunks that it does not know yet; whether there are more."""
        part, self._found[-count:] = self._found[-count:], []
        self._enter_missing(part)
        return bool(self._found)

    def remove(self, key: PageKey) -> bool:
        """The page is gone or worthless. False if it was not there."""
        at = key.keyspace + key.chunk_hash
        chunk = self._chunks.get(at)
        if chunk is None or not chunk.shards >> key.shard & 1:
            return False
        chunk.shards &= ~(1 << key.shard)
        self.page_count -= 1
        self._count(key, -self._page_bytes(key))
        if not chunk.shards:
            del self._chunks[at]
            self._policy.remove(at)
        self.on_removed(key)
        return True

    def remove_chunk(self, name: bytes) -> list[PageKey]:
        """Forget all pages of a chunk, named as by `names`; which they were."""
        keys = self._chunk(name).keys if name in self._chunks else []
        for key in keys:
            self.remove(key)
        return keys

    def oldest(
        self, free_bytes: int, spare: Callable[[PageKey], bool], keyspaces: Collection[bytes] | None = None
    ) -> list[DiskChunk]:
        """Chunks to give up, the least worth keeping first, until their pages make up `free_bytes`.

        The caller removes them now; one that it keeps may be chosen again. Chunks with a page that `spare` wants kept
        (being read, say) are passed over, as are pinned ones and, if `keyspaces` is not None, those of others.
        """
        self.enter_found(len(self._found))
        self._enter_missing(self._chosen)
        self._chosen = []
        chosen: list[DiskChunk] = []
        now_us = self.now_us()
        while free_bytes > 0:
            at = self._policy.evict(now_us, domains=keyspaces, spare=lambda at: any(map(spare, self._chunk(at).keys)))
            if at is None:
                break
            self._chosen.append(at)
            chosen.append(chunk := self._chunk(at))
            free_bytes -= sum(self._page_bytes(key) for key in chunk.keys)
        return chosen

    def oldest_of_all(self, free_bytes: int) -> list[DiskChunk]:
        """As `oldest`, but then pinned chunks too, those first whose pins end first. Looks at everything."""
        chosen = self.oldest(free_bytes, lambda key: False)
        free_bytes -= sum(self._page_bytes(key) for chunk in chosen for key in chunk.keys)
        if free_bytes > 0:
            names = set(self._chosen)
            left = [chunk for chunk in self.chunks() if chunk.keyspace + chunk.chunk_hash not in names]
            left.sort(key=lambda chunk: (chunk.metadata.pinned_until_us, chunk.metadata.priority))
            for chunk in left:
                if free_bytes <= 0:
                    break
                chosen.append(chunk)
                free_bytes -= sum(self._page_bytes(key) for key in chunk.keys)
        return chosen

    def _chunk(self, at: bytes) -> DiskChunk:
        chunk = self._chunks[at]
        return DiskChunk(at[:16], at[16:], chunk.shards, unpack_metadata(chunk.metadata))

    def _enter(self, at: bytes, metadata: PageMetadata, *, found: bool = False) -> None:
        keyspace = at[:16]
        parent = keyspace + metadata.parent_hash if metadata.chunk_index else None
        bring = self._policy.restore if found else self._policy.insert
        bring(at, parent, domain=keyspace, retention=retention_of(metadata))

    def _enter_missing(self, names: Collection[bytes]) -> None:
        for at in names:
            if at in self._chunks and at not in self._policy:
                self._enter(at, unpack_metadata(self._chunks[at].metadata), found=True)

    def _count(self, key: PageKey, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self.on_bytes(key.keyspace, size_bytes)

    def chunks(self) -> Iterator[DiskChunk]:
        """Everything, in any order. Do not change the map while iterating."""
        for at, chunk in self._chunks.items():
            yield DiskChunk(at[:16], at[16:], chunk.shards, unpack_metadata(chunk.metadata))
