"""The disk tier: what is on it, reading verified, making room, faults, the scan at the start, values of the node."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KeyspaceUnknown, KvPoolError, PageCorrupt, PageMissing, QuotaExceeded, StoreFault
from kvpool.core.fault_points import reach
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey, verify
from kvpool_pagestore.core.chunk_columns import FoundChunks
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.events import DiskChanged, DiskHealthChanged, PagesArrived, PagesEvicted
from kvpool_pagestore.core.keyspaces import Keyspace, KeyspaceBook, check_page
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.core.stored_pages import PageKind, StoredPages
from kvpool_pagestore.engine.context import EngineContext, EngineTasks
from kvpool_pagestore.engine.disk_upkeep import Deletions, DiskHealth, DiskState, MetadataWrites
from kvpool_pagestore.ports import PageStore, PageWrite, Workers

_log = logging.getLogger(__name__)

_COUNTED_EVERY_S = 1.0  # at a terabyte, to look at every file takes longer than to write a batch of pages
_CLEARED_CHUNKS = 64  # forgotten between two turns of the loop: each takes some 10 us, more on a busy machine


class DiskTier:
    """One PageStore with its map. Serving goes on in any state of it; while it is OFF, nothing on it counts as present.

    live_limit_bytes: what pages may be charged together so that the files stay within the configured capacity.
    """

    def __init__(
        self,
        store: PageStore,
        live_limit_bytes: int,
        disk_map: DiskMap,
        keyspaces: KeyspaceBook,
        readers: Workers,
        writers: Workers,
        context: EngineContext,
    ) -> None:
        self._store = store
        self._live_limit_bytes = live_limit_bytes
        self._keyspaces = keyspaces
        self._events = events = context.events
        self._readers = readers
        self._writers = writers
        self._tasks = context.tasks
        self._metrics = context.metrics
        self._remembered: set[bytes] = set()
        self._promised_bytes = 0  # of batches that are being written
        self._reading: Counter[PageKey] = Counter()
        self._deletions = Deletions(store, writers, self.discard)
        self._metadata = MetadataWrites(store, writers, context.tasks)
        self._unreadable: set[PageKey] = set()  # the disk failed at them once
        self.map = disk_map
        self._scan = StartupScan(store, self.map, keyspaces, readers)
        self.health = DiskHealth(self._probe, events)
        self._clock = context.clock
        self._counted_s = float("-inf")
        self._is_counting, self._is_counted = False, True  # counted: nothing has changed since that is not in it
        self.used_bytes = 0  # as the file system counted them last

    def __contains__(self, key: PageKey) -> bool:
        return self.is_readable and key in self.map

    @property
    def fault(self) -> str:
        """Why pages are not made durable now; empty if they are."""
        return self.health.fault

    @property
    def is_readable(self) -> bool:
        """Whether what is on it counts as present."""
        return self.health.state is not DiskState.OFF

    @property
    def promised_bytes(self) -> int:
        """Bytes of batches that are being written, for which room is made or kept."""
        return self._promised_bytes

    async def load(self) -> None:
        """Build the map from what an earlier process left. Raises StoreFault."""
        # Held until the pages are counted: the book forgets keyspaces of which none is here.
        stored = [self._keyspaces.remember(encoding) for encoding in await self._readers.run(self._store.keyspaces)]
        self._remembered.update(one.keyspace for one in stored)
        if useless := await self._scan.take(self._found_with_an_end):
            await self._writers.run(self._store.delete_batch, useless)
        await self._shrink()
        await self._count()

    def count_changes(self) -> None:
        """Begin to count what files take if that has changed, once a second at most. Call it before `used_bytes`."""
        is_due = self._clock.monotonic_s() - self._counted_s >= _COUNTED_EVERY_S
        if is_due and not self._is_counting and not self._is_counted:
            self._is_counting = True
            self._tasks.start(self._count(), "count-disk")

    async def read(self, key: PageKey, keyspace: Keyspace, destination: memoryview) -> KvPoolError | None:
        """Fill a slot with a page that the map names and verify it. None, or why it cannot be used.

        A page that is absent or fails verification is forgotten, here and at the index.
        """
        self._reading[key] += 1
        try:
            size_bytes = await self._readers.run(read_verified, self._store, key, keyspace, destination)
        except PageCorrupt as error:
            self._metrics.verification_failures.labels("disk").inc()
            _log.error("page %s on disk fails verification and is dropped: %s", key, error)
            self.discard([key])
            return error
        except StoreFault as error:
            self.health.read_failed(error)
            self._suspect(key)
            return error
        except KvPoolError as error:  # no room in the queue, or closing
            return error
        finally:
            self._reading[key] -= 1
            self._reading += Counter()  # drops the zeros
        self.health.read_succeeded()
        if size_bytes is None:
            self.discard([key])
            return PageMissing(f"page {key} is not on disk, though the map names it")
        self.map.touch(key)
        self._unreadable.discard(key)
        return None

    def is_read(self, key: PageKey) -> bool:
        """Return whether the page is being read."""
        return key in self._reading

    async def recheck(self, key: PageKey, keyspace: Keyspace) -> KvPoolError | None:
        """A reader found this page corrupt: drop the disk's copy too unless it verifies; None, or why it does not."""
        return await self.read(key, keyspace, memoryview(bytearray(keyspace.page_bytes(key.shard))))

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget pages at once; the disk follows in the background."""
        self.forget(keys)
        self._tasks.start(self._delete(list(keys), self._deletions.begin()), "delete-pages")

    async def deleted(self) -> None:
        """Return when what was discarded by now is gone from the disk, or has failed to go."""
        await self._deletions.wait_ended()

    async def delete(self, keys: Sequence[PageKey]) -> None:
        """Forget pages at once; they are gone from the disk when this returns. Raises StoreFault: they go later."""
        self.forget(keys)
        await self._deletions.run(keys, self._deletions.begin())
        self._changed()

    async def delete_keyspace(self, keyspace: bytes, on_gone: Callable[[Sequence[tuple[bytes, int]]], None]) -> None:
        """Forget a keyspace, durably. Raises StoreFault; some of it may be left. Writes of it must be held back.

        on_gone: called with chunk hashes and bitmaps of shards once these pages cannot be promoted any more; drop what
        was promoted meanwhile.
        """
        await self._writers.run(self._store.delete_keyspace, keyspace)
        self._changed()
        for names in self.map.name_parts(_CLEARED_CHUNKS):
            removed = self.map.remove_chunks([name for name in names if name.startswith(keyspace)])
            on_gone([(name[len(keyspace) :], shards) for name, shards in removed])
            await asyncio.sleep(0)

    async def write(self, pages: Sequence[PageWrite]) -> dict[PageKey, KvPoolError | None]:
        """Make pages durable; per key None or why it failed. Makes room first, so that the budget is never exceeded."""
        if self.health.state is not DiskState.READ_WRITE:  # giving up pages for what cannot be written would be a loss
            return {page.key: StoreFault(self.fault) for page in pages}
        size_bytes = sum(self._store.charged_bytes(len(page.page)) for page in pages)
        self._promised_bytes += size_bytes
        results: dict[PageKey, KvPoolError | None]
        try:
            # A deletion that was asked for earlier must not hit the new copy, and gives room.
            await self._deletions.wait_ended()
            self._deletions.replaced(page.key for page in pages)
            await self._make_room()
            reach("pagestore.write.begin")
            results = await self._writers.run(self._write_blocking, pages)
            reach("pagestore.write.durable")
            self._changed()
        except KvPoolError as error:
            results = {page.key: error for page in pages}
        finally:
            self._promised_bytes -= size_bytes
        if len(pages) > 1 and all(isinstance(error, QuotaExceeded) for error in results.values()):
            for page in pages:  # some of them may fit where all of them do not
                results |= await self.write([page])
            return results
        self._judge(results)
        stored = [
            (page.key, page.metadata.group_head_hash)
            for page in pages
            if results[page.key] is None and self.map.add(page.key, page.metadata, is_used=page.is_used)
        ]
        if stored:
            self._events.publish(DiskChanged(stored, True))
        return results

    def set_metadata(self, changes: Sequence[tuple[PageKey, PageMetadata]]) -> Coroutine[Any, Any, None]:
        """Other retention for pages that are here, at once and in the order of calls.

        Durable when the answer returns; it raises StoreFault.
        """
        here = [(key, metadata) for key, metadata in changes if key in self.map]
        for key, metadata in here:
            self.map.set_metadata(key.keyspace, key.chunk_hash, metadata)
        return self._metadata.write(here)

    def retry_deletions(self, changed: DiskHealthChanged) -> None:
        """Delete what could not be deleted while the tier failed, once it works again."""
        if not changed.fault and (left := self._deletions.take_failed()):
            self.discard(left)

    async def close(self) -> None:
        """Stop probing and close the store. Call when nothing reads or writes any more."""
        self._deletions.close()
        await self.health.close()
        await self._writers.run(self._store.close)

    async def load_value(self, name: str) -> bytes | None:
        return await self._readers.run(self._store.load_value, name)

    async def save_value(self, name: str, value: bytes) -> None:
        await self._writers.run(self._store.save_value, name, value)

    # Inside

    def _changed(self) -> None:
        """What is on the disk has changed: `used_bytes` is to follow."""
        self._is_counted = False
        self.count_changes()

    async def _count(self) -> None:
        self._is_counted, self._counted_s = True, self._clock.monotonic_s()
        try:
            self.used_bytes = await self._readers.run(self._store.used_bytes)
        except KvPoolError as error:  # only a figure: what went before has still succeeded
            self._is_counted = False
            _log.warning("the use of the disk cannot be read: %s", error)
        finally:
            self._is_counting = False

    def _write_blocking(self, pages: Sequence[PageWrite]) -> dict[PageKey, KvPoolError | None]:
        for keyspace in {page.key.keyspace for page in pages} - self._remembered:
            known = self._keyspaces.find(keyspace)
            assert known is not None
            self._store.remember_keyspace(known.encoding)
            self._remembered.add(keyspace)
        results: dict[PageKey, KvPoolError | None] = {}
        self._store.put_batch(pages, results.__setitem__)
        return results

    async def _make_room(self) -> None:
        """Give up pages until what is being written fits. Raises QuotaExceeded; then none has gone."""
        excess_bytes = self.map.size_bytes + self._promised_bytes - self._live_limit_bytes
        if excess_bytes <= 0:
            return
        keys = [key for chunk in self.map.oldest(excess_bytes, self._reading.__contains__) for key in chunk.keys]
        if sum(map(self.map.page_bytes, keys)) < excess_bytes:
            raise QuotaExceeded("the disk tier is full of pages that are pinned or being read; enlarge --disk-bytes")
        await self._evict(keys)

    async def _evict(self, keys: Sequence[PageKey]) -> None:
        self.forget(keys)
        self._events.publish(PagesEvicted(Tier.DISK, len(keys)))
        reach("pagestore.evict.delete")
        await self._deletions.run(keys, self._deletions.begin())

    async def _shrink(self) -> None:
        """The budget may be smaller than it was, and is hard: pinned pages go as well, after all others."""
        while (excess_bytes := self.map.size_bytes - self._live_limit_bytes) > 0:
            chunks = self.map.oldest_of_all(excess_bytes, _CLEARED_CHUNKS)
            if not chunks:
                return
            await self._evict([key for chunk in chunks for key in chunk.keys])

    def _suspect(self, key: PageKey) -> None:
        """The disk failed at this page. If it did so before, the page is given up, or each reader would end service."""
        if key in self._unreadable:
            self._unreadable.discard(key)
            self.discard([key])
        else:
            self._unreadable.add(key)

    def forget(self, keys: Sequence[PageKey]) -> None:
        """They are not here any more. Who calls this from outside holds writes back and calls `delete` before long."""
        if removed := self.map.remove(keys):
            self._events.publish(DiskChanged(removed, False))

    def _judge(self, results: dict[PageKey, KvPoolError | None]) -> None:
        fault = next((error for error in results.values() if isinstance(error, StoreFault)), None)
        if fault is not None:
            self.health.write_failed(fault)

    async def _delete(self, keys: list[PageKey], ended: asyncio.Future[None]) -> None:
        try:
            await self._deletions.run(keys, ended)
            self._changed()
        except KvPoolError as error:
            _log.error("%d pages could not be deleted from disk: %s", len(keys), error)
            if isinstance(error, StoreFault):
                self.health.write_failed(error)

    async def _probe(self) -> None:
        await self._writers.run(self._store.probe)

    def _found_with_an_end(self, key: PageKey, metadata: PageMetadata) -> None:
        keyspace = self._keyspaces.find(key.keyspace)
        assert keyspace is not None  # else its size could not have been right
        self._events.publish(PagesArrived((PageRecord(key, keyspace.page_bytes(key.shard), metadata),)))


class StartupScan:
    """Reads the names of all pages on disk into the map, once, at the start."""

    def __init__(self, store: PageStore, disk_map: DiskMap, keyspaces: KeyspaceBook, readers: Workers) -> None:
        self._store = store
        self._map = disk_map
        self._keyspaces = keyspaces
        self._readers = readers
        self._is_right: dict[PageKind, bool] = {}

    async def take(self, on_stored: Callable[[PageKey, PageMetadata], None]) -> list[PageKey]:
        """Bring all into the map; return those that no request can name. Raises StoreFault.

        on_stored: called with pages whose pin or time to live ends.
        """
        useless = list[PageKey]()
        chunks = await self._readers.run(self._store.take_found)
        if chunks is None or not all(map(self._is_right_kind, chunks.page_counts)):
            chunks, parts = FoundChunks(), self._store.scan()
            while await self._readers.run(self._take, parts, chunks, useless):
                pass
        await self._readers.run(self._map.restore, chunks)
        self._map.count_restored(chunks)
        for page in chunks.ending:  # only now: what has expired is given up at once, and the map must name it
            on_stored(page.key, page.metadata)
        return useless

    def _take(self, parts: Iterator[StoredPages], chunks: FoundChunks, useless: list[PageKey]) -> bool:
        """Take the next part; False if there is none."""
        part = next(parts, None)
        if part is None:
            return False
        wrong = [pages for kind, pages in part.kinds() if not self._is_right_kind(kind)]
        if wrong:
            is_right = np.ones(len(part), bool)
            is_right[np.concatenate(wrong)] = False
            useless += [page.key for page in part.chosen(~is_right)]
            part = part.chosen(is_right)
        chunks.add(part)
        return True

    def _is_right_kind(self, kind: PageKind) -> bool:
        """Whether pages of that keyspace and shard have that size."""
        known = self._is_right.get(kind)
        if known is None:
            known = self._is_right[kind] = self._checked(kind)
        return known

    def _checked(self, kind: PageKind) -> bool:
        keyspace = self._keyspaces.find(kind.keyspace)
        try:
            if keyspace is None:
                raise KeyspaceUnknown(f"keyspace {kind.keyspace.hex()} was not remembered")
            check_page(keyspace, PageKey(kind.keyspace, bytes(16), kind.shard), kind.page_bytes)
        except KvPoolError as error:
            _log.error("pages on disk like %s are dropped: %s", kind, error)
            return False
        return True


def read_verified(store: PageStore, key: PageKey, keyspace: Keyspace, destination: memoryview) -> int | None:
    """Bytes of the page, which fills `destination`; None if it is absent. Raises PageCorrupt, StoreFault."""
    size_bytes = store.get_into(key, destination)
    if size_bytes is None:
        return None
    if size_bytes != len(destination):
        raise PageCorrupt(f"page {key} has {size_bytes} bytes on disk instead of {len(destination)}")
    fault = verify(destination, key, keyspace.spec.codec, keyspace.payload_bytes(key.shard))
    if fault is not None:
        raise PageCorrupt(f"page {key} on disk: {fault}")
    return size_bytes


class DurableValue:
    """One value beside the pages on disk. Without a disk tier it is forgotten at exit, as the pages are."""

    def __init__(self, disk: DiskTier | None, name: str, tasks: EngineTasks) -> None:
        self._disk = disk
        self._name = name
        self._tasks = tasks
        self._saving = asyncio.Lock()  # threads would save two values in any order

    async def load(self) -> bytes:
        """Return what was saved last; empty if nothing was. Raises StoreFault."""
        return (await self._disk.load_value(self._name) if self._disk is not None else None) or b""

    async def save(self, value: bytes) -> None:
        """Make a value durable; a failure of the disk is logged, and the process goes on with the new value.

        The last call wins, also if its caller is cancelled before it returns.
        """
        if self._disk is not None:
            await self._tasks.finish(self._save(self._disk, value), f"save-{self._name}")

    async def _save(self, disk: DiskTier, value: bytes) -> None:
        async with self._saving:
            try:
                await disk.save_value(self._name, value)
            except KvPoolError as error:
                _log.error("%s is lost at the next restart: %s", self._name, error)
