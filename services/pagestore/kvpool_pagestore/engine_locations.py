"""What the engine tells the index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.ledger import Ledger
from kvpool_pagestore.core.locations import LocationBuffer
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.ports import IndexLink

from kvpool.core.cluster import LocationChange


class Announcer:
    """Gathers changes for one turn of the event loop and hands them to the index together."""

    def __init__(self, index: IndexLink) -> None:
        self._index = index
        self._buffer = LocationBuffer()
        self._scheduled = False
        self.on_stored: Callable[[PageKey, bytes], None] = lambda key, group_head_hash: None  # it became durable

    def staging(self, record: PageRecord, present: bool) -> None:
        """A page became visible in staging or left it."""
        self._note(record.key, record.metadata.group_head_hash, Tier.STAGING, present)

    def disk(self, key: PageKey, group_head_hash: bytes, present: bool) -> None:
        """A page became durable, or is on disk no more."""
        if present:
            self.on_stored(key, group_head_hash)
        self._note(key, group_head_hash, Tier.DISK, present)

    def flush(self) -> None:
        """Hand over what was gathered."""
        self._scheduled = False
        if self._buffer:
            self._index.announce(self._buffer.take())

    async def wait_announced(self) -> None:
        """Return when the index has everything told so far. Raises StoreUnavailable."""
        self.flush()
        await self._index.wait_announced()

    async def drop_keyspace(self, keyspace: bytes, remaining: Iterable[LocationChange]) -> None:
        """The index forgets the keyspace here, then learns what came meanwhile."""
        self._buffer.forget_keyspace(keyspace)
        await self._index.drop_keyspace(keyspace)
        self.flush()
        self._index.announce(list(remaining))

    def _note(self, key: PageKey, group_head_hash: bytes, tier: Tier, present: bool) -> None:
        self._buffer.note(key, group_head_hash, tier, present)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)


def snapshot(ledger: Ledger, disk_map: DiskMap | None, keyspaces: KeyspaceBook) -> Iterator[LocationChange]:
    """Everything this node holds, chunk by chunk, each as it is when it is taken: the node may change in between."""
    chunks = {(record.key.keyspace, record.key.chunk_hash): None for record in ledger.told_pages()}
    if disk_map is not None:
        chunks.update(((chunk.keyspace, chunk.chunk_hash), None) for chunk in disk_map.chunks())
    for keyspace_id, chunk_hash in chunks:
        yield from chunk_locations(ledger, disk_map, keyspaces, keyspace_id, chunk_hash)


def chunk_locations(
    ledger: Ledger, disk_map: DiskMap | None, keyspaces: KeyspaceBook, keyspace_id: bytes, chunk_hash: bytes
) -> Iterator[LocationChange]:
    """What this node holds of one chunk now; shards that it lacks are named as removed."""
    keyspace = keyspaces.find(keyspace_id)
    assert keyspace is not None
    staged, staged_head = 0, b""
    for shard in range(keyspace.grid.shard_count):
        slot = ledger.told(PageKey(keyspace_id, chunk_hash, shard))
        if slot is not None:
            staged |= 1 << shard
            staged_head = slot.page.metadata.group_head_hash
    stored = disk_map.chunk(keyspace_id, chunk_hash) if disk_map is not None else None
    held = [(Tier.STAGING, staged, staged_head)]
    if stored is not None:
        held.append((Tier.DISK, stored.shards, stored.metadata.group_head_hash))
    for tier, shards, head in held:
        if shards:
            yield LocationChange(
                keyspace=keyspace_id,
                chunk_hash=chunk_hash,
                group_head_hash=head,
                tier=tier,
                added_shards=shards,
                removed_shards=keyspace.grid.all_shards & ~shards,
            )
