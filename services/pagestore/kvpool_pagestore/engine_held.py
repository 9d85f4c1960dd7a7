"""What this node holds, chunk by chunk, as moving pages asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator

from kvpool_pagestore.core.copies import HeldChunk
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.engine_disk import DiskTier

_NAME_BYTES = 32  # keyspace id and chunk hash
_CHUNKS_A_TURN = 512  # looked at between two turns of the loop: each takes 2 us, or 20 on a busy machine
_BUCKET_CHUNKS = 256


class ChunkNames:
    """Names of chunks in one piece: a collection of garbage visits each element of a list, 90 ms for a million."""

    __slots__ = ("_packed",)

    def __init__(self) -> None:
        self._packed = bytearray()

    def __len__(self) -> int:
        return len(self._packed) // _NAME_BYTES

    def append(self, name: bytes) -> None:
        self._packed += name

    def parts(self, most: int) -> Iterator[list[bytes]]:
        """All of them in order, at most so many at a time."""
        for start in range(0, len(self), most):
            packed = bytes(self._packed[start * _NAME_BYTES : (start + most) * _NAME_BYTES])
            yield [packed[at : at + _NAME_BYTES] for at in range(0, len(packed), _NAME_BYTES)]


class HeldPages:
    """Staging and disk looked at together."""

    def __init__(self, table: PageTable, disk: DiskTier | None, keyspaces: KeyspaceBook) -> None:
        self._table = table
        self._disk = disk
        self._keyspaces = keyspaces

    async def buckets(self, keyspaces: Collection[bytes] | None = None) -> list[ChunkNames]:
        """Keyspace id + chunk hash of all there is now, or of these keyspaces, some hundreds of chunks together.

        Chunks of a chain group are in one list, one after the other in no order. Takes the bytes of each name and
        bounded steps, however many chunks there are.
        """
        disk = self._disk if self._disk is not None and self._disk.is_readable else None
        stored_count = disk.map.row_count if disk is not None else 0
        count = 1 + (stored_count + self._table.ready_count) // _BUCKET_CHUNKS
        buckets = [ChunkNames() for _ in range(count)]
        for names in disk.map.name_parts(_CHUNKS_A_TURN) if disk is not None else ():
            for name in names:
                if disk is not None and (keyspaces is None or name[:16] in keyspaces):
                    location = disk.map.location(name[:16], name[16:])
                    if location is not None:
                        buckets[_bucket(location[1], count)].append(name)
            await asyncio.sleep(0)
        for keyspace in self._table.ready_keyspaces():
            if keyspaces is None or keyspace in keyspaces:
                await self._add_staged(keyspace, buckets)
        return buckets

    async def _add_staged(self, keyspace: bytes, buckets: list[ChunkNames]) -> None:
        """Add chunks of which nothing is on disk."""
        disk = self._disk if self._disk is not None and self._disk.is_readable else None
        keys, seen = self._table.keys_of(keyspace), set[bytes]()
        for start in range(0, len(keys), _CHUNKS_A_TURN):
            for key in keys[start : start + _CHUNKS_A_TURN]:
                slot = self._table.find(key)
                if slot is None or key.chunk_hash in seen:
                    continue
                seen.add(key.chunk_hash)
                if disk is None or disk.map.location(keyspace, key.chunk_hash) is None:
                    at = _bucket(slot.page.metadata.group_head_hash, len(buckets))
                    buckets[at].append(keyspace + key.chunk_hash)
            await asyncio.sleep(0)

    def chunk(self, name: bytes) -> list[HeldChunk]:
        """What is here of one chunk now: its durable shards, and those in staging only; nothing if it is gone."""
        keyspace_id, chunk_hash = name[:16], name[16:_NAME_BYTES]
        keyspace = self._keyspaces.find(keyspace_id)
        if keyspace is None:
            return []
        held: list[HeldChunk] = []
        stored = None
        if self._disk is not None and self._disk.is_readable:
            stored = self._disk.map.chunk(keyspace_id, chunk_hash)
        durable = stored.shards if stored is not None else 0
        if stored is not None and durable:
            held.append(
                HeldChunk(
                    keyspace=keyspace_id,
                    chunk_hash=chunk_hash,
                    chunk_index=stored.metadata.chunk_index,
                    group_head_hash=stored.metadata.group_head_hash,
                    shards=durable,
                    durable=True,
                    grid=keyspace.grid,
                )
            )
        staged = self._table.staged_shards(keyspace_id, chunk_hash) & ~durable
        if staged:
            metadata = self._table.chunk_slots(keyspace_id, chunk_hash)[-1].page.metadata
            held.append(
                HeldChunk(
                    keyspace=keyspace_id,
                    chunk_hash=chunk_hash,
                    chunk_index=metadata.chunk_index,
                    group_head_hash=metadata.group_head_hash,
                    shards=staged,
                    durable=False,
                    grid=keyspace.grid,
                )
            )
        return held


def _bucket(group_head_hash: bytes, count: int) -> int:
    return int.from_bytes(group_head_hash[:8], "big") % count
