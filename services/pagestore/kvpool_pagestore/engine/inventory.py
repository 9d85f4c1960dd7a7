"""What this node holds: announced to the index as it changes, compared with it, and listed for operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvpool.core.clock import Clock
from kvpool.core.cluster import LocationChange, PageMetadata
from kvpool.core.location_digest import ChunkPlaces, HeldChunk
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool_pagestore.core.events import DiskChanged, StagingChanged
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.slots import Slot
from kvpool_pagestore.engine.disk_tier import DiskTier
from kvpool_pagestore.ports import IndexLink

_Place = tuple[bytes, bytes, bytes]  # keyspace, chunk hash, head of the chunk's group
_NAMES_A_PART = 1024  # looked at in one turn of the event loop
_PLACES_A_PART = 8192  # the same before serving, where few large parts are learnt in less time than many small ones


def staged_parts(table: PageTable, keyspace: bytes, page_count: int) -> Iterator[list[Slot]]:
    """Slots of the visible pages of a keyspace, about so many at a time; a part may be empty.

    Chunks are those that were there when the first part was asked for, each as it is when its part is. Use a part in
    the turn of the event loop in which it comes: a slot may be another page's in the next one.
    """
    part: list[Slot] = []
    for number, chunk_hash in enumerate(table.ready_chunks(keyspace), 1):
        part += table.chunk_slots(keyspace, chunk_hash)
        if len(part) >= page_count or number % page_count == 0:
            yield part
            part = []
    yield part


class Announcer:
    """Announces what changes, in the turn of the event loop in which it does; the link merges what waits to be sent."""

    def __init__(self, index: IndexLink) -> None:
        self._index = index

    def staging(self, changed: StagingChanged) -> None:
        """Pages became visible in staging or left it: one change for each chunk."""
        pages = [(record.key, record.metadata.group_head_hash) for record in changed.records]
        self._announce(pages, Tier.STAGING, changed.present)

    def disk(self, changed: DiskChanged) -> None:
        """Pages became durable, or are on disk no more: one change for each chunk."""
        self._announce(changed.pages, Tier.DISK, changed.present)

    def _announce(self, pages: Iterable[tuple[PageKey, bytes]], tier: Tier, present: bool) -> None:
        shards: dict[_Place, int] = {}
        for (keyspace, chunk_hash, shard), group_head_hash in pages:
            place = (keyspace, chunk_hash, group_head_hash)
            shards[place] = shards.get(place, 0) | 1 << shard
        if present:
            self._index.announce([LocationChange(*place, tier, bitmap, 0) for place, bitmap in shards.items()])
        else:
            self._index.announce([LocationChange(*place, tier, 0, bitmap) for place, bitmap in shards.items()])

    async def wait_announced(self) -> None:
        """Return when the index has acknowledged everything announced so far. Raises StoreUnavailable."""
        await self._index.wait_announced()

    async def drop_keyspace(self, keyspace: bytes, remaining: Callable[[], Iterator[Sequence[LocationChange]]]) -> None:
        """The index forgets the keyspace here, then learns what came meanwhile.

        Each part that `remaining` yields is true when it is yielded, and announced in the same turn of the loop.
        """
        await self._index.drop_keyspace(keyspace)
        for part in remaining():
            if part:
                self._index.announce(part)
            await asyncio.sleep(0)


class Inventory:
    """What this node holds, as the index is to know it: kvpool_server.node.chunk_directory.LocationTruth."""

    def __init__(self, table: PageTable, keyspaces: KeyspaceBook) -> None:
        self._table = table
        self._disk_map = table.disk_map
        self._keyspaces = keyspaces

    def chunks(self) -> Iterator[ChunkPlaces]:
        """Every chunk that is held all the time while this is iterated; some come twice."""
        for keyspace in self._table.ready_keyspaces():
            ready = self._table.ready_chunks(keyspace)
            for start in range(0, len(ready), _PLACES_A_PART):
                part = ready[start : start + _PLACES_A_PART]
                announced = ((one, self._table.announced(keyspace, one)) for one in part)
                yield from ChunkPlaces.of((keyspace, one, staged[1]) for one, staged in announced if staged is not None)
        if self._disk_map is not None:
            yield from self._disk_map.places()

    def locate(self, keyspace: bytes, chunk_hashes: Collection[bytes]) -> list[tuple[bytes, HeldChunk]]:
        known = self._keyspaces.find(keyspace)
        if known is None:
            return []
        all_shards, names = known.all_shards, self._table.staged_names(keyspace)
        stored = self._disk_map.locations(keyspace, chunk_hashes) if self._disk_map is not None else []
        found = [(one, HeldChunk(head, (0, 0, shards), all_shards)) for one, shards, head in stored]
        staged = {one: at for one in chunk_hashes if one in names and (at := self._table.announced(keyspace, one))}
        for number, (chunk_hash, held) in enumerate(found) if staged else ():
            at = staged.get(chunk_hash)
            if at is not None and at[1] == held.group_head:
                found[number] = chunk_hash, held._replace(shards=(0, at[0], held.shards[2]))
                del staged[chunk_hash]
        return found + [(one, HeldChunk(head, (0, shards, 0), all_shards)) for one, (shards, head) in staged.items()]

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
                for chunk_hash, held in self.locate(keyspace, places)
                for tier, shards in zip((Tier.GPU, Tier.STAGING, Tier.DISK), held.shards, strict=True)
                if shards
            ]


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
        """Part after part, each collected in one turn of the event loop. keyspace: empty means all of the tenant's."""
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
            hashes = self._table.ready_chunks(keyspace)
            for start in range(0, len(hashes), _CHUNKS_A_PART):
                names = [keyspace + one for one in hashes[start : start + _CHUNKS_A_PART]]
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
