"""The disk tier: page bytes in extents, their records in RocksDB."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rocksdict import WriteBatch

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError, PageCorrupt, QuotaExceeded, StartupFailed, StoreFault
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.extents import ExtentBlocks, ExtentFiles, Extents
from kvpool_pagestore.adapters.records import (
    RECORDS,
    VALUES,
    PageRecord,
    RecordColumns,
    Trailer,
    UsedBlocks,
    decode_place,
    keyspace_bounds,
    keyspace_of_value_key,
    keyspace_value_key,
    named_value_key,
    pack_trailer,
)
from kvpool_pagestore.adapters.rocks_database import RocksDatabase, fault_of, row_blocks, rows, store_faults
from kvpool_pagestore.adapters.salvage import Sidecar, salvage_records
from kvpool_pagestore.core.chunk_columns import FoundChunks
from kvpool_pagestore.core.extents import Extent, ExtentBudget, charged_bytes, page_blocks
from kvpool_pagestore.core.stored_pages import StoredPages
from kvpool_pagestore.ports import OnDurable, PageWrite

_log = logging.getLogger(__name__)

_LOAD_ROWS: Final = 1 << 14
_SCAN_ROWS: Final = 1 << 13
_FORGOTTEN_ROWS: Final = 1024  # under the lock at once
_UNSYNCED_PAGES: Final = 1 << 14  # deleted, of which each takes 300 bytes until that is synced
_FREED_TOGETHER: Final = 2  # parts of a keyspace that is forgotten: joining their blocks saves time
_PROBE_NAME: Final = "probe"
_Freed = list[tuple[PageKey, Extents]]


def live_page_bytes(capacity_bytes: int) -> int:
    """What pages on disk may be charged together so that the tier's files stay within the capacity."""
    return ExtentBudget(capacity_bytes).live_limit_bytes


def largest_batch_bytes(capacity_bytes: int, writer_count: int) -> int:
    """Bytes of one batch so that batches written at once leave most of a small tier as it is."""
    return max(1, live_page_bytes(capacity_bytes) // 16 // writer_count)


def open_disk_tier(directory: Path, capacity_bytes: int) -> RocksPageStore:
    """Blocks. Raises StartupFailed naming the cure."""
    if live_page_bytes(capacity_bytes) <= 0:
        raise StartupFailed(f"disk_bytes ({capacity_bytes}) is too small for a disk tier; give 64 MiB or more, or 0")
    store = RocksPageStore(directory, capacity_bytes)
    try:
        store.open()
    except StoreFault as error:
        raise StartupFailed(f"the disk tier in {directory} cannot be opened: {error}") from error
    return store


class RocksPageStore:
    """A ports.PageStore within a capacity: real bytes of all its files, at any instant (core/extents says how).

    A page is durable once its bytes and then its record are synced; a crash in between leaves free blocks, never half a
    page.
    """

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self._directory = directory
        self._budget = ExtentBudget(capacity_bytes)
        self._opened: _Pages | None = None

    def open(self) -> None:
        """Raises StartupFailed, or StoreFault if the disk fails."""
        if self._opened is not None:
            raise StoreFault(f"{self._directory} is open already")
        database = RocksDatabase(self._directory)
        try:
            self._opened = _open_pages(database, ExtentFiles(self._directory), self._budget)
        except BaseException:
            database.close()
            raise

    @property
    def live_limit_bytes(self) -> int:
        """What pages may be charged together so that the files stay within the capacity."""
        return self._budget.live_limit_bytes

    def charged_bytes(self, page_bytes: int) -> int:
        """What one page counts towards that limit."""
        return charged_bytes(page_bytes)

    def keyspaces(self) -> Sequence[bytes]:
        found = [keyspace_of_value_key(key) for key, _ in rows(self._pages.database, VALUES)]
        return [encoding for encoding in found if encoding is not None]

    def remember_keyspace(self, encoding: bytes) -> None:
        self._pages.sidecar.remember_keyspace(encoding)
        self._pages.database.save_value(keyspace_value_key(encoding), b"")

    def load_value(self, name: str) -> bytes | None:
        with store_faults(f"reading the value {name}"):
            value: bytes | None = self._pages.database.family(VALUES).get(named_value_key(name))
            return value

    def save_value(self, name: str, value: bytes) -> None:
        self._pages.database.save_value(named_value_key(name), value)

    def scan(self) -> Iterator[StoredPages]:
        return self._pages.scan()

    def take_found(self) -> FoundChunks | None:
        return self._pages.take_found()

    def put_batch(self, pages: Sequence[PageWrite], on_durable: OnDurable) -> None:
        """One sync of page bytes, one of records: all pages become durable or none does."""
        by_key = {page.key: page for page in pages}
        failure: KvPoolError | None = None
        try:
            if by_key:
                self._pages.write(list(by_key.values()))
                reach("pagestore.write.recorded")
        except KvPoolError as error:
            failure = error
        for page in pages:
            on_durable(page.key, failure)

    def get_into(self, key: PageKey, destination: memoryview) -> int | None:
        """Raises PageCorrupt if this page's bytes on disk are damaged (drop it), StoreFault if the disk fails."""
        return self._pages.get_into(key, destination)

    def set_metadata(self, changes: Sequence[tuple[PageKey, PageMetadata]]) -> None:
        self._pages.set_metadata(changes)

    def delete_batch(self, keys: Sequence[PageKey]) -> None:
        self._pages.forget(keys)

    def delete_keyspace(self, keyspace: bytes) -> None:
        self._pages.forget_keyspace(keyspace)

    def probe(self) -> None:
        self.save_value(_PROBE_NAME, b"1")
        self._pages.probe()
        self.load_value(_PROBE_NAME)

    def used_bytes(self) -> int:
        return self._pages.database.used_bytes()

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    @property
    def _pages(self) -> _Pages:
        if self._opened is None:
            raise StoreFault(f"the disk tier {self._directory} is not open")
        return self._opened


def _open_pages(database: RocksDatabase, files: ExtentFiles, budget: ExtentBudget) -> _Pages:
    sidecar = Sidecar(files)
    if database.is_incomplete and files.block_counts:
        for encoding in sidecar.keyspaces():
            database.save_value(keyspace_value_key(encoding), b"")
        highest = salvage_records(database, files, sidecar, is_lost=True)
        return _Pages(database, files, sidecar, budget, highest)
    database.set_complete()
    try:
        return _Pages(database, files, sidecar, budget)
    except PageCorrupt as damage:
        _log.error("the records of the disk tier are damaged: %s", damage.message)
        highest = salvage_records(database, files, sidecar, is_lost=False)
        return _Pages(database, files, sidecar, budget, highest)


class _Pages:
    """What exists between `open` and `close`. Thread-safe.

    The lock guards changes of records: it is never held over page bytes, a sync, or the making of a file.

    An extent is used again only when the change of records that freed it is synced and no reader is left, so
    that neither a power loss nor a slow reader can find another page's bytes where it expects its own.
    """

    def __init__(
        self,
        database: RocksDatabase,
        files: ExtentFiles,
        sidecar: Sidecar,
        budget: ExtentBudget,
        salvaged_number: int = 0,
    ) -> None:
        """Find out what is free. Raises PageCorrupt if records are damaged (see salvage), StoreFault.

        salvaged_number: the highest number of a write that a salvage has met.
        """
        self.database = database
        self._records = database.family(RECORDS)
        self._files = files
        self.sidecar = sidecar
        self._budget = budget
        self._blocks = ExtentBlocks(files, budget)
        self._lock = threading.Lock()
        self._unsynced: _Freed = []  # freed by changes that may not be synced yet
        self._found: FoundChunks | None = None  # by `_load`, until they change
        self._shrink()
        self._last_number = sidecar.first_number(max(salvaged_number, self._load()))

    def scan(self) -> Iterator[StoredPages]:
        """Every page that has a record. Raises StoreFault."""
        for keys, records in row_blocks(self.database, RECORDS, _SCAN_ROWS):
            columns = RecordColumns.of(records)
            yield StoredPages.packed(keys, columns.page_bytes, columns.metadata)

    def take_found(self) -> FoundChunks | None:
        """What the opening found, which reads all records for the free blocks anyway; None if that is not known."""
        found, self._found = self._found, None
        return found

    def write(self, pages: Sequence[PageWrite]) -> None:
        """Make pages durable, no key twice. Raises StoreFault or QuotaExceeded; then none of them is."""
        self._found = None
        records = self._place(pages)
        try:
            secret = self.sidecar.secret
            trailers = [pack_trailer(Trailer(page.key, at), secret) for page, at in zip(pages, records, strict=True)]
            places = [(at.extents, page.page) for page, at in zip(pages, records, strict=True)]
            self._files.write([(*place, trailer) for place, trailer in zip(places, trailers, strict=True)])
            reach("pagestore.write.synced")
            with self._lock:
                self._unsynced += self._point_records_at(pages, records)
        except BaseException:
            for record in records:
                self._blocks.give(record.extents)
            raise
        try:
            self._sync()
        except BaseException:
            self.forget([page.key for page in pages])  # they were not to be found, and may not outlive a power loss
            raise

    def get_into(self, key: PageKey, destination: memoryview) -> int | None:
        """Page bytes, or None if there is no page. Raises PageCorrupt if its bytes are damaged or gone, StoreFault."""
        self._blocks.begin_reading(key)
        try:
            encoded = self._encoded(key)
            if encoded is None:
                return None
            page_bytes, extents = decode_place(encoded)
            if page_bytes > len(destination):
                raise PageCorrupt(f"page {key} has {page_bytes} bytes on disk, not {len(destination)}")
            self._files.read_into(extents, destination[:page_bytes])
            return page_bytes
        finally:
            self._blocks.end_reading(key)

    def set_metadata(self, changes: Sequence[tuple[PageKey, PageMetadata]]) -> None:
        """Replace the metadata of pages, synced; absent pages are skipped. Raises StoreFault."""
        self._found = None
        batch, keys = WriteBatch(raw_mode=True), [key for key, _ in changes]
        with self._lock:
            for (key, metadata), encoded in zip(changes, self._all_encoded(keys), strict=True):
                with suppress(PageCorrupt):  # a damaged record is as good as none
                    if encoded is not None:
                        changed = replace(PageRecord.decode(encoded), metadata=metadata)
                        batch.put(key.pack(), changed.encode(), self.database.handle(RECORDS))
            if len(batch):
                self.database.write(batch, sync=False)
        self._sync()

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Delete pages. Synced before their blocks are used again; until then a power loss brings them back."""
        self._found = None
        batch, freed = WriteBatch(raw_mode=True), _Freed()
        chosen = list(set(keys))
        with self._lock:
            for key, extents in zip(chosen, self._places(chosen), strict=True):
                batch.delete(key.pack(), self.database.handle(RECORDS))
                if extents is not None:
                    freed.append((key, extents))
            if len(batch):
                self.database.write(batch, sync=False)
                self._unsynced += freed
        if len(self._unsynced) >= _UNSYNCED_PAGES:
            self._sync()

    def forget_keyspace(self, keyspace: bytes) -> None:
        """Delete all pages of a keyspace, some at a time; synced, because an operator asked for it.

        Raises StoreFault; then some of them may still be there.
        """
        self._found = None
        with self._lock:
            last_number = self._last_number
        self.sidecar.clear_keyspace(keyspace, last_number)
        following: bytes | None
        following, end = keyspace_bounds(keyspace)
        free = list[UsedBlocks]()  # 12 bytes for each run of blocks, which mostly are neighbours once more are here
        try:
            while following is not None:
                keys, records = list[bytes](), list[bytes]()
                try:
                    while following is not None and len(keys) < _UNSYNCED_PAGES:
                        with self._lock:  # for some milliseconds: writers of other keyspaces wait for it
                            following = self._forget_some(following, end, keys, records)
                    self._sync()
                except BaseException:
                    with self._lock:
                        freed = zip(keys, records, strict=True)
                        self._unsynced += [(PageKey.unpack(key), decode_place(record)[1]) for key, record in freed]
                    raise
                free.append(self._blocks.give_if_read(keys, records).merged())
                if len(free) == _FREED_TOGETHER:  # on a full disk writers of other keyspaces wait for them
                    self._blocks.give_all(UsedBlocks.joined(free).merged())
                    free.clear()
        finally:
            self._blocks.give_all(UsedBlocks.joined(free).merged())

    def probe(self) -> None:
        """Find the room that was not there, and read a page. Raises StoreFault while either fails."""
        self._blocks.grow_as_wanted()
        self._files.probe()

    def close(self) -> None:
        """Raises StoreFault if the log cannot be synced; closed in any case."""
        self._files.close()
        self.database.close()

    # Inside

    def _shrink(self) -> None:
        """Give up what lies beyond a budget that is smaller than it was: whole files, then the end of one."""
        counts = self._files.block_counts
        excess, cuts = sum(counts.values()) - self._budget.block_count, dict[int, int]()
        for number, count in sorted(counts.items(), reverse=True):
            if excess > 0:
                cuts[number] = max(0, count - excess)
                excess -= count - cuts[number]
        if not cuts:
            return
        batch = WriteBatch(raw_mode=True)
        for packed, encoded in rows(self.database, RECORDS):
            for extent in PageRecord.decode(encoded).extents:
                if extent.start + extent.block_count > cuts.get(extent.file, extent.start + extent.block_count):
                    batch.delete(packed, self.database.handle(RECORDS))
                    break
        _log.warning("giving up %d pages on disk: the tier is smaller than it was", len(batch))
        self.database.write(batch, sync=True)  # before the blocks are gone
        for number, count in cuts.items():
            self._files.cut(number, count)

    def _load(self) -> int:
        """Find what is free, and which chunks there are; returns the highest number of a write.

        Raises PageCorrupt if records are damaged.
        """
        found = FoundChunks()

        def used_blocks() -> Iterator[UsedBlocks]:
            for keys, records in row_blocks(self.database, RECORDS, _LOAD_ROWS):
                columns = RecordColumns.of(records)
                found.add(StoredPages.packed(keys, columns.page_bytes, columns.metadata))
                yield columns.used

        used = UsedBlocks.joined(used_blocks())
        if lost := self._blocks.found(used):
            self._forget_pages_in(lost)
        else:
            self._found = found
        return used.last_number

    def _forget_pages_in(self, lost: set[Extent]) -> None:
        """Records that point to blocks which are not there, or are another page's."""
        batch, count = WriteBatch(raw_mode=True), 0
        for packed, encoded in rows(self.database, RECORDS):
            record = PageRecord.decode(encoded)
            if lost.intersection(record.extents):
                batch.delete(packed, self.database.handle(RECORDS))
                count += 1
        _log.warning("forgetting %d pages whose blocks are not theirs", count)
        self.database.write(batch, sync=True)

    def _forget_some(self, first: bytes, end: bytes, keys: list[bytes], records: list[bytes]) -> bytes | None:
        """Delete the next records from `first` on, short of `end`, and append what they were.

        Return where to go on, None if there are no more.
        """
        # A new scan each time: others delete records between two calls, and their blocks are free then.
        found = next(row_blocks(self.database, RECORDS, _FORGOTTEN_ROWS, first, end), None)
        if found is None:
            return None
        following = found[0][-1] + b"\0"
        batch = WriteBatch(raw_mode=True)
        batch.delete_range(found[0][0], following, self.database.handle(RECORDS))
        self.database.write(batch, sync=False)
        keys += found[0]
        records += found[1]
        return following

    def _place(self, pages: Sequence[PageWrite]) -> list[PageRecord]:
        """Blocks for each page. Raises QuotaExceeded if they are not there, StoreFault if files cannot grow."""
        wanted = [page_blocks(len(page.page)) for page in pages]
        taken = self._blocks.take(wanted) or self._blocks.take_new(wanted)
        if taken is None:
            self._sync()
            taken = self._blocks.take(wanted)
        if taken is None:
            raise QuotaExceeded("no room on disk: pages that were given up are still being read or deleted")
        with self._lock:
            first, self._last_number = self._last_number + 1, self._last_number + len(pages)
        return [
            PageRecord(len(page.page), number, extents, page.metadata)
            for number, (page, extents) in enumerate(zip(pages, taken, strict=True), first)
        ]

    def _point_records_at(self, pages: Sequence[PageWrite], records: Sequence[PageRecord]) -> _Freed:
        batch, replaced = WriteBatch(raw_mode=True), _Freed()
        places = self._places([page.key for page in pages])
        for page, record, old in zip(pages, records, places, strict=True):
            if old is not None:
                replaced.append((page.key, old))
            batch.put(page.key.pack(), record.encode(), self.database.handle(RECORDS))
        self.database.write(batch, sync=False)
        return replaced

    def _sync(self) -> None:
        """Make all changes of records up to now durable, and what they freed free. Raises StoreFault."""
        with self._lock:
            freed, self._unsynced = self._unsynced, []
        try:
            self.database.sync_log()
        except BaseException:
            with self._lock:
                self._unsynced += freed
            raise
        self._blocks.give_unless_read(freed)

    def _places(self, keys: Sequence[PageKey]) -> list[Extents | None]:
        """Where pages lie; None for those without a record, or with a damaged one: it is about to be replaced or
        deleted. Raises StoreFault."""
        places: list[Extents | None] = []
        for encoded in self._all_encoded(keys):
            try:
                places.append(decode_place(encoded)[1] if encoded is not None else None)
            except PageCorrupt:
                places.append(None)
        return places

    def _all_encoded(self, keys: Sequence[PageKey]) -> list[bytes | None]:
        """By one look-up, which lets go of the interpreter's lock; a damaged record is None. Raises StoreFault."""
        try:
            encoded: Any = self._records.get([key.pack() for key in keys])
            return list(encoded)
        except Exception:  # one damaged record fails all; the binding raises nothing narrower
            return [self._encoded_or_damaged(key) for key in keys]

    def _encoded_or_damaged(self, key: PageKey) -> bytes | None:
        try:
            return self._encoded(key)
        except PageCorrupt:
            return None

    def _encoded(self, key: PageKey) -> bytes | None:
        try:
            encoded: bytes | None = self._records.get(key.pack())
            return encoded
        except Exception as error:  # the binding raises nothing narrower; no context manager: this is the way of reads
            raise fault_of(f"reading the record of page {key}", error) from error
