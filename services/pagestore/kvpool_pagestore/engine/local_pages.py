"""The pages that this node holds: chunk by chunk, and their bytes for as long as they are on their way to others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError, PageCorrupt
from kvpool.core.page import PageKey
from kvpool_pagestore.core.keyspaces import Keyspace, KeyspaceBook
from kvpool_pagestore.core.replication import HeldChunk
from kvpool_pagestore.core.slots import Slot
from kvpool_pagestore.engine.context import EngineContext, Tiers
from kvpool_pagestore.ports import PageWrite

_log = logging.getLogger(__name__)

_NAME_BYTES = 32  # keyspace id and chunk hash
_CHUNKS_A_TURN = 512  # looked at between two turns of the loop: each takes 2 us, or 20 on a busy machine
_BUCKET_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class HeldPage:
    """A page whose bytes stay valid until it is released."""

    item: PageWrite
    slot: Slot | None = None  # pinned; None: the bytes were read from disk


class ChunkNames:
    """Names of chunks in one piece: a collection of garbage visits each element of a list, 90 ms for a million."""

    __slots__ = ("_packed",)

    def __init__(self) -> None:
        self._packed = bytearray()

    def __len__(self) -> int:
        return len(self._packed) // _NAME_BYTES

    def append(self, name: bytes) -> None:
        """Add one at the end."""
        self._packed += name

    def parts(self, most: int) -> Iterator[list[bytes]]:
        """Return all of them in order, at most so many at a time."""
        for start in range(0, len(self), most):
            packed = bytes(self._packed[start * _NAME_BYTES : (start + most) * _NAME_BYTES])
            yield [packed[at : at + _NAME_BYTES] for at in range(0, len(packed), _NAME_BYTES)]


class LocalPages:
    """The pages in staging and on disk of this node, as replication and draining need them."""

    def __init__(
        self,
        tiers: Tiers,
        keyspaces: KeyspaceBook,
        context: EngineContext,
    ) -> None:
        staging = tiers.staging
        self._table, self._space, self._sealing = staging.table, staging.space, staging.sealing
        self._disk, self._write_back = tiers.disk, tiers.write_back
        self._keyspaces = keyspaces
        self._tasks, self._metrics = context.tasks, context.metrics

    @property
    def is_being_written(self) -> bool:
        """Whether writers hold slots that they have not committed yet."""
        return self._table.writer_bytes > self._table.dirty_bytes

    async def flush(self) -> tuple[int, int]:
        """Wait until dirty pages are durable; return how many are, and how many failed. Raises StoreFault."""
        if self._write_back is None:
            return 0, 0
        return await self._write_back.flush({one.keyspace for one in self._keyspaces.all()})

    def keyspaces(self) -> list[bytes]:
        """Return the ids of all keyspaces of which pages may be here."""
        return [one.keyspace for one in self._keyspaces.all()]

    def keyspace(self, keyspace: bytes) -> Keyspace | None:
        """Return a keyspace by its id."""
        return self._keyspaces.find(keyspace)

    def size_bytes(self, keys: Iterable[PageKey]) -> int:
        """Return the exact bytes of pages; of an unknown keyspace they count nothing."""
        known = ((self._keyspaces.find(key.keyspace), key.shard) for key in keys)
        return sum(keyspace.page_bytes(shard) for keyspace, shard in known if keyspace is not None)

    def discard_durable(self, keys: Sequence[PageKey]) -> None:
        """Delete pages from disk that other nodes hold. A copy in staging stays as long as it is used."""
        if self._disk is not None and keys:
            self._disk.discard(keys)

    async def hold(self, keyspace: Keyspace, key: PageKey) -> HeldPage | KvPoolError | None:
        """Keep a page's bytes until `release`: its slot is pinned and sealed, or it is read from disk.

        None if the page is not here any more.
        """
        slot = self._table.find(key)
        if slot is not None:
            self._table.pin(slot)
            (error,) = await self._sealing.seal([slot])
            if error is not None:
                self._table.unpin(slot)
                return error
            return HeldPage(PageWrite(key=key, page=self._space.view(slot), metadata=slot.page.metadata), slot)
        metadata = self._disk.map.metadata(key) if self._disk is not None and key in self._disk else None
        if self._disk is None or metadata is None:
            return None
        # Beside the arena: pages that move away must not push out pages that readers want.
        buffer = memoryview(bytearray(keyspace.page_bytes(key.shard)))
        error = await self._disk.read(key, keyspace, buffer)
        if error is None:
            return HeldPage(PageWrite(key=key, page=buffer, metadata=metadata))
        return error if key in self._disk else None

    def release(self, page: HeldPage) -> None:
        """Let a page be evicted again."""
        if page.slot is not None:
            self._table.unpin(page.slot)

    def start_recheck(self, keyspace: Keyspace, key: PageKey) -> None:
        """Begin to `recheck` a page."""
        self._tasks.start(self.recheck(keyspace, key), "recheck-page")

    async def recheck(self, keyspace: Keyspace, key: PageKey) -> KvPoolError | bool:
        """Verify a page that another node received corrupt. A copy that verifies stays, whatever that node says.

        Returns whether a good copy is here, or why not: PageCorrupt if the only copy failed and was dropped.
        """
        error: KvPoolError | None = None
        slot = self._table.find(key)
        if slot is not None:
            # To its end even if the caller leaves: a thread reads the slot.
            error = await self._tasks.finish(self._verify(slot), "verify-page")
            if error is None:
                return True
            if isinstance(error, PageCorrupt) and self._table.find(key) is slot:
                self._metrics.verification_failures.labels("reader").inc()
                _log.error("%s; dropped", error.message)
                self._table.drop(key)
        if self._disk is not None and key in self._disk:
            return await self._disk.recheck(key, keyspace) or True
        return error or False

    async def _verify(self, slot: Slot) -> KvPoolError | None:
        self._table.pin(slot)
        try:
            return await self._sealing.verify(slot)
        finally:
            self._table.unpin(slot)

    async def buckets(self, keyspaces: Collection[bytes] | None = None) -> list[ChunkNames]:
        """Return keyspace id + chunk hash of all chunks here, or of these keyspaces, some hundreds of chunks together.

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
        hashes = self._table.ready_chunks(keyspace)
        for start in range(0, len(hashes), _CHUNKS_A_TURN):
            for chunk_hash in hashes[start : start + _CHUNKS_A_TURN]:
                slots = self._table.chunk_slots(keyspace, chunk_hash)
                if slots and (disk is None or disk.map.location(keyspace, chunk_hash) is None):
                    at = _bucket(slots[0].page.metadata.group_head_hash, len(buckets))
                    buckets[at].append(keyspace + chunk_hash)
            await asyncio.sleep(0)

    def chunk(self, name: bytes) -> list[HeldChunk]:
        """Return what is here of one chunk: its durable shards, and those in staging only; nothing if it is gone."""
        keyspace_id, chunk_hash = name[:16], name[16:_NAME_BYTES]
        keyspace = self._keyspaces.find(keyspace_id)
        if keyspace is None:
            return []

        def held(metadata: PageMetadata, shards: int, *, durable: bool) -> HeldChunk:
            return HeldChunk(
                keyspace=keyspace_id,
                chunk_hash=chunk_hash,
                chunk_index=metadata.chunk_index,
                group_head_hash=metadata.group_head_hash,
                shards=shards,
                durable=durable,
                grid=keyspace.grid,
            )

        chunks: list[HeldChunk] = []
        disk = self._disk if self._disk is not None and self._disk.is_readable else None
        stored = disk.map.chunk(keyspace_id, chunk_hash) if disk is not None else None
        if stored is not None:
            chunks.append(held(stored.metadata, stored.shards, durable=True))
        staged = self._table.staged_shards(keyspace_id, chunk_hash) & ~(stored.shards if stored is not None else 0)
        if staged:
            last = self._table.chunk_slots(keyspace_id, chunk_hash)[-1]
            chunks.append(held(last.page.metadata, staged, durable=False))
        return chunks


def _bucket(group_head_hash: bytes, count: int) -> int:
    return int.from_bytes(group_head_hash[:8], "big") % count
