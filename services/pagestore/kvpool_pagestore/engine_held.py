"""What this node holds, chunk by chunk, as moving pages asks for it."""

from __future__ import annotations

from collections.abc import Collection

from kvpool.core.page import PageKey
from kvpool_pagestore.core.copies import HeldChunk
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.ledger import Ledger
from kvpool_pagestore.engine_disk import DiskTier

_NAME_BYTES = 32  # keyspace id and chunk hash


class HeldPages:
    """Staging and disk looked at together."""

    def __init__(self, ledger: Ledger, disk: DiskTier | None, keyspaces: KeyspaceBook) -> None:
        self._ledger = ledger
        self._disk = disk
        self._keyspaces = keyspaces

    def names(self, keyspaces: Collection[bytes] | None = None) -> list[bytes]:
        """Keyspace id + chunk hash of all there is now, or of these keyspaces."""
        disk = self._disk if self._disk is not None and self._disk.is_readable else None
        found = list(disk.map.names()) if disk is not None else []
        for name in dict.fromkeys(page.key.keyspace + page.key.chunk_hash for page in self._ledger.ready_pages()):
            if disk is None or disk.map.chunk(name[:16], name[16:]) is None:
                found.append(name)
        return found if keyspaces is None else [name for name in found if name[:16] in keyspaces]

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
        staged, metadata = 0, None
        for shard in range(keyspace.grid.shard_count):
            slot = None if durable >> shard & 1 else self._ledger.find(PageKey(keyspace_id, chunk_hash, shard))
            if slot is not None:
                staged |= 1 << shard
                metadata = slot.page.metadata
        if metadata is not None:
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
