"""What is asked of a pool without an agent, and what it has done so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvpool.core.chunks import GROUP_CHUNKS, ROOT_HASH
from kvpool.core.cluster import ChainQuery, PageMetadata, RemoteSource
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec, encode_keyspace, keyspace_id
from kvpool.core.page import PageKey
from kvpool.core.payload import payload_bytes
from kvpool.core.retention import NO_RETENTION, Retention

PayloadCopy = Callable[[int, int, memoryview], None]
"""(position of the chunk in the call, shard, payload): fills a payload, or reads one. Runs in a copy thread, keeps no
reference to the payload."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """A chunk and its place in a chain; one that stands alone is a chain of its own."""

    chunk_hash: bytes
    parent_hash: bytes
    chunk_index: int
    group_head_hash: bytes
    retention: Retention = NO_RETENTION  # of its pages, where it is written

    @classmethod
    def alone(cls, chunk_hash: bytes, retention: Retention = NO_RETENTION) -> ChunkPlace:
        """A chunk of which no neighbours are known."""
        return cls(chunk_hash, ROOT_HASH, 0, chunk_hash, retention)

    @classmethod
    def chain(cls, hashes: Sequence[bytes], first: int = 0) -> list[ChunkPlace]:
        """Chunks from index `first` on of the chain that `hashes` are from its beginning."""
        return [
            cls(
                hashes[index],
                hashes[index - 1] if index else ROOT_HASH,
                index,
                hashes[index - index % GROUP_CHUNKS],
            )
            for index in range(first, len(hashes))
        ]

    @property
    def metadata(self) -> PageMetadata:
        """What the pagestore keeps beside each page."""
        return PageMetadata(
            parent_hash=self.parent_hash,
            chunk_index=self.chunk_index,
            group_head_hash=self.group_head_hash,
            ttl_ms=self.retention.ttl_ms,
            priority=self.retention.priority,
            pinned_until_us=self.retention.pinned_until_us,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyspaceShards:
    """A keyspace by its name, and the shards of each chunk that this engine rank writes.

    It reads the same layers and heads from pages of any split.
    """

    name: str
    spec: KeyspaceSpec
    shards: int  # bitmap

    @classmethod
    def of(cls, engine: str, spec: KeyspaceSpec, shards: int, name: str = "") -> KeyspaceShards:
        """name: empty for one that is derived from the engine, the model and everything else in the specification."""
        digest = keyspace_id(encode_keyspace(engine, spec)).hex()[:12]
        return cls(name=name or f"{engine}/{spec.model_id}/{digest}", spec=spec, shards=shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedShards:
    """A keyspace that the index has opened."""

    space: KeyspaceShards
    keyspace: bytes  # 16-byte id
    hash_key: bytes  # 32 bytes, of its chunk hashes
    _payload_bytes: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)  # by shard

    def page_key(self, chunk: ChunkPlace, shard: int) -> PageKey:
        """Of one shard of a chunk."""
        return PageKey(self.keyspace, chunk.chunk_hash, shard)

    def payload_bytes(self, shard: int) -> int:
        """Of a page of that shard."""
        known = self._payload_bytes.get(shard)
        if known is None:  # to look it up by the specification takes 20 us
            known = payload_bytes(self.space.spec, ShardGrid.of(self.space.spec), shard)
            self._payload_bytes[shard] = known
        return known

    def query(self, chunks: Sequence[ChunkPlace], host_id: str) -> ChainQuery:
        """A question about chunks that follow each other."""
        return ChainQuery(
            keyspace=self.keyspace,
            chunk_hashes=b"".join(chunk.chunk_hash for chunk in chunks),
            first_chunk_index=chunks[0].chunk_index,
            group_head_hash=chunks[0].group_head_hash,
            shards=self.space.shards,
            host_id=host_id,
        )


@dataclass(frozen=True, slots=True)
class WantedPage:
    """One page of a call. position: of its chunk in the call."""

    position: int
    chunk: ChunkPlace = field(hash=False)  # no other has its position
    shard: int


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """What a look-up said of a chunk that it found.

    shards: bitmap of the pages to read; they may be of other splits than the space's. remote: other nodes that have
    some of them, best first.
    """

    shards: int
    remote: tuple[RemoteSource, ...]


def wanted_pages(chunks: Sequence[ChunkPlace], shards: Sequence[int]) -> list[WantedPage]:
    """Pages of chunks, in chunk order. shards: a bitmap for each chunk."""
    return [
        WantedPage(at, chunk, shard)
        for at, (chunk, bitmap) in enumerate(zip(chunks, shards, strict=True))
        for shard in shards_in(bitmap)
    ]


def consecutive(chunks: Sequence[ChunkPlace], most: int) -> Iterator[range]:
    """Positions of chunks that one query of at most `most` chunks can be about, in order."""
    start = 0
    for at in range(1, len(chunks) + 1):
        if at == len(chunks) or at - start == most or not _follows(chunks[at - 1], chunks[at]):
            yield range(start, at)
            start = at


def _follows(before: ChunkPlace, after: ChunkPlace) -> bool:
    return after.chunk_index == before.chunk_index + 1 and after.parent_hash == before.chunk_hash


@dataclass(slots=True)
class StoreCounts:
    """What a pool has done since it was made. Written on its loop only."""

    looked_up_chunks: int = 0
    found_chunks: int = 0
    loaded_chunks: int = 0
    missed_chunks: int = 0  # asked for and not loaded, whatever the cause
    stored_chunks: int = 0  # those that were there already included
    refused_chunks: int = 0  # not stored, whatever the cause
    loaded_bytes: int = 0
    stored_bytes: int = 0  # written
    corrupt_pages: int = 0
    failed_calls: int = 0  # the index or the pagestore could not be asked
    last_failure: str = field(default="", repr=False)
