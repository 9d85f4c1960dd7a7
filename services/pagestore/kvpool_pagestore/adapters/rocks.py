"""The disk tier on RocksDB.

Page bytes lie in preallocated files (extent_*: extent_pages is the way in) or in RocksDB itself (rocks_pages is the way
in; rocks_volumes: how space comes back there, rocks_tables: where bytes lie). rocks_layout: what lies where.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

from kvpool.core.errors import KvPoolError, PageCorrupt, StoreFault
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.extent_files import ExtentFiles
from kvpool_pagestore.adapters.extent_pages import ExtentPages
from kvpool_pagestore.adapters.extent_salvage import Sidecar, salvage_extent_records
from kvpool_pagestore.adapters.rocks_database import RocksDatabase, rows, store_faults
from kvpool_pagestore.adapters.rocks_layout import VALUES, keyspace_of_value_key, keyspace_value_key, named_value_key
from kvpool_pagestore.adapters.rocks_pages import RocksPages
from kvpool_pagestore.adapters.rocks_salvage import salvage_records
from kvpool_pagestore.adapters.rocks_tables import TableVolumes
from kvpool_pagestore.adapters.rocks_volumes import TABLE_RECORD_BYTES, default_volume_bytes, live_limit_bytes
from kvpool_pagestore.core.disk_budget import ExtentBudget, charged_bytes
from kvpool_pagestore.ports import OnDurable, PageMetadata, PageWrite, StoredPage

_log = logging.getLogger(__name__)

_PROBE_NAME: Final = "probe"
_FORMAT: Final = b"2, page bytes in %s"


class PageBytes(Enum):
    """Where page bytes lie; records always lie in RocksDB. A directory keeps the way it was made with."""

    EXTENTS = "extents"  # in a few large preallocated files beside RocksDB
    TABLES = "tables"  # inside RocksDB


class Pages(Protocol):
    """What either way offers; see extent_pages and rocks_pages."""

    def scan(self) -> Iterator[StoredPage]: ...

    def write(self, pages: Sequence[PageWrite]) -> None: ...

    def get_into(self, key: PageKey, destination: memoryview) -> int | None: ...

    def set_metadata(self, changes: Iterable[tuple[PageKey, PageMetadata]]) -> None: ...

    def forget(self, keys: Iterable[PageKey]) -> None: ...

    def forget_keyspace(self, keyspace: bytes) -> None: ...

    def remember_keyspace(self, encoding: bytes) -> None: ...

    def probe(self) -> None: ...

    def reclaim(self) -> None: ...


class RocksPageStore:
    """A ports.PageStore within a capacity: real bytes of all its files, at any instant (core/disk_budget says how).

    A page is durable once its bytes and then its record are synced; a crash in between leaves dead bytes, never half a
    page. Page bytes in tables: `put_batch` and the deletions may move the live pages of a volume before they return.
    """

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        *,
        page_bytes: PageBytes = PageBytes.EXTENTS,
        volume_bytes: int = 0,
    ) -> None:
        """volume_bytes: of page bytes in tables; 0 follows from the capacity."""
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._volume_bytes = volume_bytes or default_volume_bytes(capacity_bytes)
        self._page_bytes = page_bytes
        self._opened: _Opened | None = None

    def open(self) -> None:
        """Raises StartupFailed, or StoreFault if the disk fails."""
        if self._opened is not None:
            raise StoreFault(f"{self._directory} is open already")
        has_pages = self._page_bytes is PageBytes.TABLES
        database = RocksDatabase(self._directory, _FORMAT % self._page_bytes.value.encode(), has_pages=has_pages)
        try:
            self._opened = self._open_pages(database)
        except BaseException:
            database.close()
            raise
        self._reclaim()  # what was dead when the last process ended

    def _open_pages(self, database: RocksDatabase) -> _Opened:
        if self._page_bytes is PageBytes.EXTENTS:
            return self._open_extents(database)
        salvage_records(database)
        payloads = TableVolumes(database)
        return _Opened(database, payloads.close, RocksPages(database, payloads, self._volume_bytes))

    def _open_extents(self, database: RocksDatabase) -> _Opened:
        files = ExtentFiles(self._directory)
        sidecar = Sidecar(files)
        is_lost = database.is_incomplete or (database.is_new and bool(files.block_counts))
        if is_lost:
            for encoding in sidecar.keyspaces():
                database.save_value(keyspace_value_key(encoding), b"")
            salvage_extent_records(database, files, sidecar, is_lost=True)
        budget = ExtentBudget(self._capacity_bytes)
        try:
            pages = ExtentPages(database, files, sidecar, budget)
        except PageCorrupt as damage:
            _log.error("the records of the disk tier are damaged: %s", damage.message)
            salvage_extent_records(database, files, sidecar, is_lost=False)
            pages = ExtentPages(database, files, sidecar, budget)
        return _Opened(database, files.close, pages)

    @property
    def live_limit_bytes(self) -> int:
        """What pages may be charged together so that the files stay within the capacity."""
        if self._page_bytes is PageBytes.EXTENTS:
            return ExtentBudget(self._capacity_bytes).live_limit_bytes
        return live_limit_bytes(self._capacity_bytes, self._volume_bytes)

    def charged_bytes(self, page_bytes: int) -> int:
        """What one page counts towards that limit."""
        if self._page_bytes is PageBytes.EXTENTS:
            return charged_bytes(page_bytes)
        return page_bytes + TABLE_RECORD_BYTES

    def keyspaces(self) -> Sequence[bytes]:
        found = [keyspace_of_value_key(key) for key, _ in rows(self._database, VALUES)]
        return [encoding for encoding in found if encoding is not None]

    def remember_keyspace(self, encoding: bytes) -> None:
        self._pages.remember_keyspace(encoding)
        self._database.save_value(keyspace_value_key(encoding), b"")

    def load_value(self, name: str) -> bytes | None:
        with store_faults(f"reading the value {name}"):
            value: bytes | None = self._database.family(VALUES).get(named_value_key(name))
            return value

    def save_value(self, name: str, value: bytes) -> None:
        self._database.save_value(named_value_key(name), value)

    def scan(self) -> Iterator[StoredPage]:
        return self._pages.scan()

    def put_batch(self, pages: Sequence[PageWrite], on_durable: OnDurable) -> None:
        """One synced piece of a volume, one synced batch of records: all pages become durable or none does."""
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
        self._reclaim()

    def get_into(self, key: PageKey, destination: memoryview) -> int | None:
        """Raises PageCorrupt if this page's bytes on disk are damaged (drop it), StoreFault if the disk fails."""
        return self._pages.get_into(key, destination)

    def set_metadata(self, changes: Sequence[tuple[PageKey, PageMetadata]]) -> None:
        self._pages.set_metadata(changes)

    def delete_batch(self, keys: Sequence[PageKey]) -> None:
        self._pages.forget(keys)
        self._reclaim()

    def delete_keyspace(self, keyspace: bytes) -> None:
        self._pages.forget_keyspace(keyspace)
        self._reclaim()

    def probe(self) -> None:
        self.save_value(_PROBE_NAME, b"1")
        self._pages.probe()
        self.load_value(_PROBE_NAME)

    def used_bytes(self) -> int:
        return self._database.used_bytes()

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close_payloads()
            opened.database.close()

    @property
    def _database(self) -> RocksDatabase:
        return self._require_open().database

    @property
    def _pages(self) -> Pages:
        return self._require_open().pages

    def _require_open(self) -> _Opened:
        if self._opened is None:
            raise StoreFault(f"the disk tier {self._directory} is not open")
        return self._opened

    def _reclaim(self) -> None:
        """Space that cannot be given back now is tried again after the next write or deletion."""
        try:
            self._pages.reclaim()
        except KvPoolError as error:
            _log.error("the space of dead pages could not be given back: %s", error.message)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What exists between `open` and `close`."""

    database: RocksDatabase
    close_payloads: Callable[[], None]
    pages: Pages
