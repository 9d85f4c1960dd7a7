"""The disk tier on RocksDB.

rocks_layout: what lies where. rocks_volumes: how space comes back. rocks_files, rocks_tables: where bytes lie.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from kvpool.core.errors import KvPoolError, StoreFault
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.rocks_database import RocksDatabase, rows, store_faults
from kvpool_pagestore.adapters.rocks_files import FileVolumes
from kvpool_pagestore.adapters.rocks_layout import VALUES, keyspace_of_value_key, keyspace_value_key, named_value_key
from kvpool_pagestore.adapters.rocks_pages import RocksPages
from kvpool_pagestore.adapters.rocks_salvage import salvage_records
from kvpool_pagestore.adapters.rocks_tables import TableVolumes
from kvpool_pagestore.adapters.rocks_volumes import PayloadVolumes
from kvpool_pagestore.ports import OnDurable, PageWrite, StoredPage

_log = logging.getLogger(__name__)

DEFAULT_VOLUME_BYTES: Final = 512 << 20
_FORMAT: Final = b"1, page bytes in %s"


class PageBytes(Enum):
    """Where page bytes lie; records always lie in RocksDB. A directory keeps the way it was made with."""

    FILES = "files"  # in files beside RocksDB
    TABLES = "tables"  # inside RocksDB


class RocksPageStore:
    """A ports.PageStore whose pages live in volumes of about `volume_bytes`.

    A page is durable once its bytes and then its record are synced; a crash in between leaves dead bytes, never half a
    page. `put_batch` and the deletions may move the live pages of a volume before they return, so that `used_bytes`
    follows the live pages: rocks_volumes.live_limit_bytes tells how closely.
    """

    def __init__(
        self,
        directory: Path,
        *,
        volume_bytes: int = DEFAULT_VOLUME_BYTES,
        page_bytes: PageBytes = PageBytes.FILES,
    ) -> None:
        if volume_bytes <= 0:
            raise ValueError(f"volume_bytes must be > 0, got {volume_bytes}")
        self._directory = directory
        self._volume_bytes = volume_bytes
        self._page_bytes = page_bytes
        self._opened: _Opened | None = None

    def open(self) -> None:
        """Raises StartupFailed, or StoreFault if the disk fails."""
        if self._opened is not None:
            raise StoreFault(f"{self._directory} is open already")
        database = RocksDatabase(self._directory, _FORMAT % self._page_bytes.value.encode())
        try:
            in_files = self._page_bytes is PageBytes.FILES
            payloads: PayloadVolumes = FileVolumes(self._directory) if in_files else TableVolumes(database)
            salvage_records(database)
            self._opened = _Opened(database, payloads, RocksPages(database, payloads, self._volume_bytes))
        except BaseException:
            database.close()
            raise
        self._reclaim()  # what was dead when the last process ended

    def keyspaces(self) -> Sequence[bytes]:
        found = [keyspace_of_value_key(key) for key, _ in rows(self._database, VALUES)]
        return [encoding for encoding in found if encoding is not None]

    def remember_keyspace(self, encoding: bytes) -> None:
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

    def delete_batch(self, keys: Sequence[PageKey]) -> None:
        self._pages.forget(keys)
        self._reclaim()

    def delete_keyspace(self, keyspace: bytes) -> None:
        self._pages.forget_keyspace(keyspace)
        self._reclaim()

    def used_bytes(self) -> int:
        return self._database.used_bytes()

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.payloads.close()
            opened.database.close()

    @property
    def _database(self) -> RocksDatabase:
        return self._require_open().database

    @property
    def _pages(self) -> RocksPages:
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
    payloads: PayloadVolumes
    pages: RocksPages
