"""What the engine tells the index."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvpool.core.cluster import ALL_SHARDS, LocationChange
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.ledger import Ledger
from kvpool_pagestore.core.locations import LocationBuffer
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.ports import IndexLink


class Announcer:
    """Gathers changes for one turn of the event loop and hands them to the index together."""

    def __init__(self, index: IndexLink) -> None:
        self._index = index
        self._buffer = LocationBuffer()
        self._scheduled = False

    def staging(self, record: PageRecord, present: bool) -> None:
        """A page became visible in staging or left it."""
        self._note(record.key, record.metadata.group_head_hash, Tier.STAGING, present)

    def disk(self, key: PageKey, group_head_hash: bytes, present: bool) -> None:
        """A page became durable, or is on disk no more."""
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


def all_locations(ledger: Ledger, disk_map: DiskMap, keyspace: bytes | None = None) -> list[LocationChange]:
    """Everything this node holds (of one keyspace, or of all), as additions."""
    buffer = LocationBuffer()
    for record in ledger.ready_pages():
        if keyspace in (None, record.key.keyspace):
            buffer.note(record.key, record.metadata.group_head_hash, Tier.STAGING, True)
    for chunk in disk_map.chunks():
        if keyspace in (None, chunk.keyspace):
            shards = chunk.shards & ALL_SHARDS
            head = chunk.metadata.group_head_hash
            buffer.note_shards(chunk.keyspace, chunk.chunk_hash, head, Tier.DISK, shards, True)
    return buffer.take()
