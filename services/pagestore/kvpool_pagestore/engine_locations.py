"""What the engine tells the index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from kvpool.core.cluster import LocationChange
from kvpool.core.location_digest import ChunkPlaces, HeldChunk
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool_pagestore.core.events import DiskChanged, StagingChanged
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.locations import LocationBuffer
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.ports import IndexLink

_NAMES_A_PART = 1024  # looked at in one turn of the event loop


class Announcer:
    """Gathers changes for one turn of the event loop and hands them to the index together."""

    def __init__(self, index: IndexLink) -> None:
        self._index = index
        self._buffer = LocationBuffer()
        self._scheduled = False

    def staging(self, changed: StagingChanged) -> None:
        """A page became visible in staging or left it."""
        record = changed.record
        self._note(record.key, record.metadata.group_head_hash, Tier.STAGING, changed.present)

    def disk(self, changed: DiskChanged) -> None:
        """Pages became durable, or are on disk no more."""
        for key, group_head_hash in changed.pages:
            self._note(key, group_head_hash, Tier.DISK, changed.present)

    def flush(self) -> None:
        """Hand over what was gathered."""
        self._scheduled = False
        if self._buffer:
            self._index.announce(self._buffer.take())

    async def wait_announced(self) -> None:
        """Return when the index has everything told so far. Raises StoreUnavailable."""
        self.flush()
        await self._index.wait_announced()

    async def drop_keyspace(self, keyspace: bytes, remaining: Callable[[], Iterator[Sequence[LocationChange]]]) -> None:
        """The index forgets the keyspace here, then learns what came meanwhile.

        Each part that `remaining` yields is true when it is yielded, and announced in the same turn of the loop.
        """
        self._buffer.forget_keyspace(keyspace)
        await self._index.drop_keyspace(keyspace)
        self.flush()
        for part in remaining():
            self.flush()
            if part:
                self._index.announce(part)
            await asyncio.sleep(0)

    def _note(self, key: PageKey, group_head_hash: bytes, tier: Tier, present: bool) -> None:
        self._buffer.note(key, group_head_hash, tier, present)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)


class NodeTruth:
    """What this node holds, as the index is to know it: kvpool_server.node.chunk_directory.LocationTruth."""

    def __init__(self, announcer: Announcer, table: PageTable, keyspaces: KeyspaceBook) -> None:
        self._announcer = announcer
        self._table = table
        self._disk_map = table.disk_map
        self._keyspaces = keyspaces

    def chunks(self) -> Iterator[ChunkPlaces]:
        """Every chunk that is held all the time while this is iterated; some come twice."""
        for keyspace in self._table.ready_keyspaces():
            announced = ((one, self._table.announced(keyspace, one)) for one in self._table.ready_chunks(keyspace))
            yield from ChunkPlaces.of((keyspace, one, staged[1]) for one, staged in announced if staged is not None)
        if self._disk_map is not None:
            yield from self._disk_map.places()

    def settle(self) -> None:
        self._announcer.flush()

    def locate(self, keyspace: bytes, chunk_hash: bytes) -> list[HeldChunk]:
        known = self._keyspaces.find(keyspace)
        if known is None:
            return []
        all_shards = known.all_shards
        staged = self._table.announced(keyspace, chunk_hash)
        stored = self._disk_map.location(keyspace, chunk_hash) if self._disk_map is not None else None
        if staged is None:
            return [] if stored is None else [HeldChunk(stored[1], (0, 0, stored[0]), all_shards)]
        if stored is None:
            return [HeldChunk(staged[1], (0, staged[0], 0), all_shards)]
        if stored[1] == staged[1]:
            return [HeldChunk(stored[1], (0, staged[0], stored[0]), all_shards)]
        return [
            HeldChunk(staged[1], (0, staged[0], 0), all_shards),
            HeldChunk(stored[1], (0, 0, stored[0]), all_shards),
        ]

    def keyspace_encodings(self) -> list[bytes]:
        return [keyspace.encoding for keyspace in self._keyspaces.all()]

    def of_keyspace(self, keyspace: bytes) -> Iterator[list[LocationChange]]:
        """All that is held of one keyspace; every other shard of these chunks is said to be gone.

        Part after part, each as it is when it is yielded and a bounded step: changes meanwhile are announced as ever.
        """
        known = self._keyspaces.find(keyspace)
        valid_shards = known.grid.valid_shards if known is not None else 0
        staged = [keyspace + chunk_hash for chunk_hash in self._table.ready_chunks(keyspace)]
        staged_parts = (staged[start : start + _NAMES_A_PART] for start in range(0, len(staged), _NAMES_A_PART))
        stored_parts = self._disk_map.name_parts(_NAMES_A_PART) if self._disk_map is not None else ()
        for part in chain(staged_parts, stored_parts):
            places = dict.fromkeys(at[16:] for at in part if at.startswith(keyspace))
            yield [
                LocationChange(
                    keyspace=keyspace,
                    chunk_hash=chunk_hash,
                    group_head_hash=held.group_head,
                    tier=tier,
                    added_shards=shards,
                    removed_shards=valid_shards & ~shards,
                )
                for chunk_hash in places
                for held in self.locate(keyspace, chunk_hash)
                for tier, shards in zip((Tier.GPU, Tier.STAGING, Tier.DISK), held.shards, strict=True)
                if shards
            ]
