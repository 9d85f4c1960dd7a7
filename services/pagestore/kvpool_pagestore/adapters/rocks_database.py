"""RocksDB as this service opens it: options, column families, and errors in our words.

Records are small; they go through the log, synced when asked. Page bytes never pass through a memtable or the log: see
rocks_files and rocks_tables.

The binding keeps the interpreter's lock through nearly every call; only a lookup of a *list* of keys and a flush let
go of it (seen with rocksdict 0.3.29). A synced batch of records holds it for some 0.7 ms.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from rocksdict import ColumnFamily, Rdict, WriteBatch, WriteOptions

from kvpool.core.errors import KvPoolError, PageCorrupt, StartupFailed, StoreFault
from kvpool_pagestore.adapters.direct_io import allows_direct
from kvpool_pagestore.adapters.durable_names import make_directories
from kvpool_pagestore.adapters.rocks_layout import (
    FORMAT_NAME,
    LOG_NAME,
    MEMBERS,
    RECORDS,
    VALUES,
    volume_of_family,
)
from kvpool_pagestore.adapters.rocks_log import DatabaseLog
from kvpool_pagestore.adapters.rocks_options import small_options, table_options

_log = logging.getLogger(__name__)

SMALL_FAMILIES: Final = (RECORDS, MEMBERS, VALUES)


class RocksDatabase:
    """An open database with three small families and any number of table volumes.

    Thread-safe, except that families are created, dropped and recreated by one thread at a time.
    """

    def __init__(self, directory: Path, page_format: bytes, *, has_pages: bool = False) -> None:
        """Open or create; `page_format` names where page bytes lie. Raises StartupFailed.

        has_pages: page bytes lie in here. They are read past the page cache where the file system allows it: a page is
        read once into the arena, and by way of the cache took half as long again.
        """
        self.directory = directory
        self._synced, self._unsynced = WriteOptions(), WriteOptions()
        self._synced.sync = True
        direct_reads = _prepare_directory(directory) and has_pages
        self._small_options = small_options(direct_reads=direct_reads)
        self.table_options = table_options(direct_reads=direct_reads)
        self.is_incomplete = False  # it had to be repaired or made anew: that a record is absent says nothing
        self._root, self._families = self._open_or_repair()
        self._handles = {name: self._root.get_column_family_handle(name) for name in SMALL_FAMILIES}
        self._log = DatabaseLog(directory, self._write_tables)
        found = self.family(VALUES).get(FORMAT_NAME)
        self.is_new = found is None
        if found is None:
            self.family(VALUES).put(FORMAT_NAME, page_format, self._synced)
        elif found != page_format:
            self.close()
            raise StartupFailed(
                f"{directory} holds the format {found!r}, this pagestore writes {page_format!r}; "
                "start it as before, or empty the directory (it is only a cache)"
            )

    def family(self, name: str) -> Rdict:
        """An open family. Raises KeyError."""
        return self._families[name]

    def family_names(self) -> Sequence[str]:
        """All families, those of table volumes among them."""
        return list(self._families)

    def handle(self, name: str) -> ColumnFamily:
        """Of a small family, for write batches."""
        return self._handles[name]

    def create_table_family(self, name: str) -> Rdict:
        """A new family for page bytes."""
        with store_faults(f"creating {name}"):
            family = self._root.create_column_family(name, self.table_options)
        self._families[name] = family
        return family

    def drop_family(self, name: str) -> None:
        """Forget a family. Its files go when the last reader has let go of it."""
        self._families.pop(name, None)
        with store_faults(f"dropping {name}"):
            self._root.drop_column_family(name)

    def recreate_family(self, name: str) -> None:
        """Empty a small family whatever state its files are in."""
        self._handles.pop(name)
        self.drop_family(name)
        with store_faults(f"recreating {name}"):
            self._families[name] = self._root.create_column_family(name, self._small_options)
            self._handles[name] = self._root.get_column_family_handle(name)

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """Apply a batch of records atomically."""
        try:
            with store_faults("writing records"):
                self._root.write(batch, self._synced if sync else self._unsynced)
        except BaseException:
            self._log.failed()
            raise

    def sync_log(self) -> None:
        """Make all batches that were written before this call durable, without the interpreter's lock."""
        self._log.sync()

    def save_value(self, key: bytes, value: bytes) -> None:
        """Keep a value, synced."""
        batch = WriteBatch(raw_mode=True)
        batch.put(key, value, self.handle(VALUES))
        self.write(batch, sync=True)

    def sequence_number(self) -> int:
        """Of the last change; never falls, not even over a restart."""
        return self._root.latest_sequence_number()

    def used_bytes(self) -> int:
        """Allocated bytes of all files below the directory; files that vanish meanwhile count as gone."""
        try:
            return _allocated_bytes(str(self.directory))
        except OSError as error:
            raise StoreFault(f"measuring {self.directory} failed: {error.strerror}") from error

    def close(self) -> None:
        """Sync the log and close. Raises StoreFault if the sync failed; closed in any case."""
        try:
            with store_faults("syncing the log"):
                self._root.flush_wal(sync=True)
        finally:
            self._log.close()
            self._handles.clear()  # each handle of a family keeps the database open
            while self._families:
                self._families.popitem()[1].close()
            self._root.close()

    def _write_tables(self) -> None:
        """Have what lies in the log in synced tables too, and leave the log's file."""
        with store_faults("writing what the log should hold"):
            # A file of the log that nothing was written to would be kept.
            self.family(VALUES).put(LOG_NAME, b"", self._unsynced)
            for name in SMALL_FAMILIES:
                self.family(name).flush(wait=True)

    def _open_or_repair(self) -> tuple[Rdict, dict[str, Rdict]]:
        """Damage to what names the files is repaired from the files; if that fails too, the database begins anew."""
        try:
            return self._open()
        except PageCorrupt as damage:
            _log.error("repairing the database of the disk tier: %s", damage.message)
        self.is_incomplete = True
        try:
            with store_faults("repairing"):
                Rdict.repair(str(self.directory), self._small_options)
            return self._open()
        except (PageCorrupt, StoreFault) as damage:
            _log.error("the database of the disk tier is lost and begins anew: %s", damage.message)
        try:
            for path in self.directory.iterdir():
                if path.is_file() and path.name != "LOCK":
                    path.unlink()
        except OSError as error:
            raise StartupFailed(f"{self.directory} cannot be emptied: {error.strerror}; make it writable") from error
        return self._open()

    def _open(self) -> tuple[Rdict, dict[str, Rdict]]:
        path = str(self.directory)
        if not (self.directory / "CURRENT").exists() and any(self.directory.glob("*.sst")):
            raise PageCorrupt(f"{self.directory} has tables but no CURRENT")
        try:
            known = Rdict.list_cf(path) if (self.directory / "CURRENT").exists() else []
            options = dict.fromkeys(SMALL_FAMILIES, self._small_options)
            options |= {name: self.table_options for name in known if volume_of_family(name) is not None}
            root = Rdict(path, self._small_options, column_families=options)
        except Exception as error:  # the binding raises nothing narrower
            if _is_damaged(error):
                raise PageCorrupt(f"opening {path}: {_one_line(error)}") from error
            raise _startup_failed(self.directory, error) from error
        return root, {name: root.get_column_family(name) for name in options}


@contextmanager
def store_faults(action: str) -> Iterator[None]:
    """What the driver raises becomes PageCorrupt if it says that stored bytes are damaged, else StoreFault."""
    try:
        yield
    except KvPoolError:
        raise
    except Exception as error:  # the binding raises nothing narrower
        raise fault_of(action, error) from error


def fault_of(action: str, error: Exception) -> KvPoolError:
    """What the driver raised, in our words."""
    text = _one_line(error)
    return (PageCorrupt if _is_damage(text) else StoreFault)(f"{action} failed: {text}")


def _is_damage(text: str) -> bool:
    """Stored bytes are wrong, or a table file is gone: the disk as such still works."""
    return text.startswith("Corruption") or ("No such file" in text and "for random read" in text)


def rows(
    database: RocksDatabase, family: str, first: bytes | None = None, end: bytes | None = None
) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a small family with first <= key < end, as of the call.

    Raises PageCorrupt at a damaged block: the driver's own iterators would end there as if there were no more.
    """
    with store_faults(f"scanning {family}"):
        cursor = database.family(family).iter()
        if first is None:
            cursor.seek_to_first()
        else:
            cursor.seek(first)
        while cursor.valid():
            key: bytes = cursor.key()
            if end is not None and key >= end:
                return
            yield key, cursor.value()
            cursor.next()
        cursor.status()


def row_blocks(database: RocksDatabase, family: str, count: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Keys and values of a small family, `count` at a time, as `rows` finds them, but faster."""
    with store_faults(f"scanning {family}"):
        cursor = database.family(family).iter()
        cursor.seek_to_first()
        valid, key, value, following = cursor.valid, cursor.key, cursor.value, cursor.next
        while valid():
            keys, values = list[bytes](), list[bytes]()
            while valid() and len(keys) < count:
                keys.append(key())
                values.append(value())
                following()
            yield keys, values
        cursor.status()


def _prepare_directory(directory: Path) -> bool:
    """Whether its files can be read past the page cache. Raises StartupFailed."""
    try:
        make_directories(directory)
        return allows_direct(directory)
    except OSError as error:
        raise StartupFailed(
            f"the disk tier's directory {directory} cannot be used: {error.strerror}; "
            "make it writable for this user or configure another one"
        ) from error


def _is_damaged(error: Exception) -> bool:
    """What names the other files, or a log, cannot be used as it is."""
    text = _one_line(error)
    return text.startswith(("Corruption", "Invalid argument: Column family")) or "No such file" in text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _startup_failed(directory: Path, error: Exception) -> StartupFailed:
    text = _one_line(error)
    if "lock" in text.lower() and "LOCK" in text:
        return StartupFailed(
            f"the disk tier {directory} is in use by another process; stop that pagestore or use another directory"
        )
    return StartupFailed(
        f"the disk tier {directory} cannot be opened: {text}; "
        "repair the disk, or empty the directory (it is only a cache)"
    )


def _allocated_bytes(path: str) -> int:
    total = 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        total += _allocated_bytes(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return total
    return total
