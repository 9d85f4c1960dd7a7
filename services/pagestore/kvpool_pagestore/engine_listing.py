"""What this node holds, chunk by chunk, as operators ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kvpool.core.clock import Clock
from kvpool.core.cluster import PageMetadata
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.engine_disk import DiskTier

MAX_MOST_READ = 1024
_CHUNKS_A_PART = 256
_NAME_BYTES = 32  # keyspace id and chunk hash


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedChunk:
    """See the proto message of that name."""

    keyspace: bytes
    chunk_hash: bytes
    metadata: PageMetadata
    staging_shards: int
    disk_shards: int
    page_reads_per_minute: float = 0.0


class Listing:
    """most_read: names of chunks whose pages are read most, with reads a minute."""

    def __init__(
        self,
        table: PageTable,
        disk: DiskTier | None,
        keyspaces: KeyspaceBook,
        most_read: Callable[[int], Sequence[tuple[bytes, float]]],
        clock: Clock,
    ) -> None:
        self._table = table
        self._disk = disk
        self._keyspaces = keyspaces
        self._most_read = most_read
        self._clock = clock

    async def chunks(
        self, tenant: str, keyspace: bytes, *, most_read: int, pinned_only: bool
    ) -> AsyncIterator[list[ListedChunk]]:
        """Part after part, each gathered in one turn of the event loop. keyspace: empty means all of the tenant's."""
        chosen = {one.keyspace for one in self._keyspaces.of_tenant(tenant) if keyspace in (b"", one.keyspace)}
        reads = dict(self._most_read(MAX_MOST_READ)) if most_read else {}
        parts = (
            self._first([name for name in reads if name[:16] in chosen][:most_read]) if most_read else self._all(chosen)
        )
        for names in parts:
            now_us = self._clock.wall_us()
            found = (self._chunk(name, reads.get(name, 0.0)) for name in names)
            part = [
                chunk
                for chunk in found
                if chunk is not None and (not pinned_only or chunk.metadata.pinned_until_us > now_us)
            ]
            if part:
                yield part
            await asyncio.sleep(0)

    def _first(self, names: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        for start in range(0, len(names), _CHUNKS_A_PART):
            yield names[start : start + _CHUNKS_A_PART]

    def _all(self, chosen: Collection[bytes]) -> Iterator[Sequence[bytes]]:
        """Names of the chunks of keyspaces, each once, some at a time: a disk may have millions."""
        disk_map = self._disk.map if self._disk is not None and self._disk.is_readable else None
        listed = set[bytes]()
        for keyspace in chosen:
            keys, seen = self._table.keys_of(keyspace), set[bytes]()
            for start in range(0, len(keys), _CHUNKS_A_PART):
                hashes = dict.fromkeys(key.chunk_hash for key in keys[start : start + _CHUNKS_A_PART])
                new = [one for one in hashes if one not in seen]
                seen.update(new)
                names = [keyspace + one for one in new]
                if disk_map is not None:  # those on disk come with the disk
                    names = [name for name in names if disk_map.location(keyspace, name[16:]) is None]
                listed.update(names)
                yield names
        for names in disk_map.name_parts(_CHUNKS_A_PART) if disk_map is not None else ():
            yield [name for name in names if name[:16] in chosen and name not in listed]

    def _chunk(self, name: bytes, page_reads_per_minute: float) -> ListedChunk | None:
        keyspace_id, chunk_hash = name[:16], name[16:_NAME_BYTES]
        if self._keyspaces.find(keyspace_id) is None:
            return None
        stored = None
        if self._disk is not None and self._disk.is_readable:
            stored = self._disk.map.chunk(keyspace_id, chunk_hash)
        slots = self._table.chunk_slots(keyspace_id, chunk_hash)
        metadata = slots[-1].page.metadata if slots else stored.metadata if stored is not None else None
        if metadata is None:
            return None
        return ListedChunk(
            keyspace=keyspace_id,
            chunk_hash=chunk_hash,
            metadata=metadata,
            staging_shards=self._table.staged_shards(keyspace_id, chunk_hash),
            disk_shards=stored.shards if stored is not None else 0,
            page_reads_per_minute=page_reads_per_minute,
        )
