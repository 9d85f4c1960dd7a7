"""RocksDB as this service opens it: options, families of small records, a log that syncs, errors in our words.

Page bytes never pass through here: they lie in files beside it (extents).

The binding keeps the interpreter's lock through nearly every call; only a lookup of a *list* of keys and a flush
release it (seen with rocksdict 0.3.29). A synced batch of records holds it for some 0.7 ms.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Final

from rocksdict import (
    BlockBasedOptions,
    Cache,
    ChecksumType,
    ColumnFamily,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from kvpool.core.errors import KvPoolError, PageCorrupt, StartupFailed, StoreFault
from kvpool_pagestore.adapters.file_io import make_directories
from kvpool_pagestore.adapters.records import FORMAT_NAME, LOG_NAME, RECORDS, SALVAGED, VALUES
from kvpool_server.data_directory import sync_directory

_log = logging.getLogger(__name__)

_FAMILIES: Final = (RECORDS, SALVAGED, VALUES)
_FORMAT: Final = b"3, page bytes in extents"
_BLOCK_CACHE_BYTES: Final = 4 << 20  # at least; records only: the arena is the cache of pages
_BLOCK_BYTES: Final = 16 << 10  # of records: an index of blocks of 4 KiB takes as much memory as the filter
_CACHE_SHARE: Final = 64  # one part in this many of the tables: filters and indexes are 1.6 of 140 bytes a record
_CACHE_FITTED_WRITES: Final = 1024
_WRITE_BUFFER_BYTES: Final = 1 << 20
_WAL_LIMIT_BYTES: Final = 8 << 20
_OPEN_FILES: Final = 256  # bounds the memory of table readers; one that is not open costs a reader about 0.1 ms
_LOG_FILES: Final = 2
_LOG_FILE_BYTES: Final = 1 << 20
_WAL_SUFFIX: Final = ".log"
_INCOMPLETE_NAME: Final = "incomplete"


class RocksDatabase:
    """An open database. Thread-safe, except that families are recreated by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Open or create. Raises StartupFailed."""
        self.directory = directory
        self._incomplete_path = directory / _INCOMPLETE_NAME
        self._synced, self._unsynced = WriteOptions(), WriteOptions()
        self._synced.sync = True
        _prepare_directory(directory)
        self._cache = Cache(_BLOCK_CACHE_BYTES)
        self._options = _options(self._cache)
        self._writes = itertools.count(1)
        self._root, self._families = self._open_or_repair()
        self._handles = {name: self._root.get_column_family_handle(name) for name in _FAMILIES}
        self._log = DatabaseLog(directory, self._write_tables)
        found = self.family(VALUES).get(FORMAT_NAME)
        if found is None:
            self.set_incomplete()
            self.family(VALUES).put(FORMAT_NAME, _FORMAT, self._synced)
        self._fit_cache()
        if found not in (None, _FORMAT):
            self.close()
            raise StartupFailed(
                f"{directory} holds the format {found!r}, this pagestore writes {_FORMAT!r}; "
                "start the version that wrote it, or empty the directory (it is only a cache)"
            )

    @property
    def is_incomplete(self) -> bool:
        """It was created, repaired or is being salvaged: that a record is absent says nothing."""
        return self._incomplete_path.exists()

    def set_incomplete(self) -> None:
        """Until `set_complete`, over kills and losses of power. Raises StoreFault."""
        try:
            self._incomplete_path.touch()
            sync_directory(self.directory)
        except OSError as error:
            raise StoreFault(f"writing {self._incomplete_path} failed: {error.strerror}") from error

    def set_complete(self) -> None:
        """Every page that there is has its record, synced. Raises StoreFault."""
        try:
            if not self.is_incomplete:
                return
            self._incomplete_path.unlink()
            sync_directory(self.directory)
        except OSError as error:
            raise StoreFault(f"removing {self._incomplete_path} failed: {error.strerror}") from error

    def family(self, name: str) -> Rdict:
        """An open family. Raises KeyError."""
        return self._families[name]

    def handle(self, name: str) -> ColumnFamily:
        """Return the handle of a column family, for write batches."""
        return self._handles[name]

    def recreate_family(self, name: str) -> None:
        """Empty a family whatever state its files are in."""
        self._handles.pop(name)
        self._families.pop(name)
        with store_faults(f"dropping {name}"):
            self._root.drop_column_family(name)
        with store_faults(f"recreating {name}"):
            self._families[name] = self._root.create_column_family(name, self._options)
            self._handles[name] = self._root.get_column_family_handle(name)

    def cache_bytes(self) -> int:
        """What the cache of blocks may hold: it follows the tables, so that no lookup has to read a filter."""
        tables_bytes = self.family(RECORDS).property_int_value("rocksdb.total-sst-files-size") or 0
        return max(_BLOCK_CACHE_BYTES, tables_bytes // _CACHE_SHARE)

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """Apply a batch of records atomically."""
        if next(self._writes) % _CACHE_FITTED_WRITES == 0:
            self._fit_cache()
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

    def _fit_cache(self) -> None:
        with store_faults("measuring tables"):
            self._cache.set_capacity(self.cache_bytes())

    def _write_tables(self) -> None:
        """Have what lies in the log in synced tables too, and leave the log's file."""
        with store_faults("writing what the log should hold"):
            # A file of the log that nothing was written to would be kept.
            self.family(VALUES).put(LOG_NAME, b"", self._unsynced)
            for name in _FAMILIES:
                self.family(name).flush(wait=True)

    def _open_or_repair(self) -> tuple[Rdict, dict[str, Rdict]]:
        """Repair damage to what names the files from the files; if that fails too, create an empty database."""
        try:
            return self._open()
        except PageCorrupt as damage:
            _log.error("repairing the database of the disk tier: %s", damage.message)
        self.set_incomplete()
        try:
            with store_faults("repairing"):
                Rdict.repair(str(self.directory), self._options)
            return self._open()
        except (PageCorrupt, StoreFault) as damage:
            _log.error("the database of the disk tier is lost; starting with an empty one: %s", damage.message)
        try:
            for path in self.directory.iterdir():
                if path.is_file() and path.name not in ("LOCK", _INCOMPLETE_NAME):
                    path.unlink()
        except OSError as error:
            raise StartupFailed(f"{self.directory} cannot be emptied: {error.strerror}; make it writable") from error
        return self._open()

    def _open(self) -> tuple[Rdict, dict[str, Rdict]]:
        path = str(self.directory)
        if not (self.directory / "CURRENT").exists() and any(self.directory.glob("*.sst")):
            raise PageCorrupt(f"{self.directory} has tables but no CURRENT")
        try:
            options = dict.fromkeys(_FAMILIES, self._options)
            root = Rdict(path, self._options, column_families=options)
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
    """Keys and values of a family with first <= key < end, as of the call.

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


def row_blocks(
    database: RocksDatabase, family: str, count: int, first: bytes = b"", end: bytes | None = None
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Keys and values of a family, `count` at a time, as `rows` finds them, but in half the time."""
    table, last = database.family(family), first
    with store_faults(f"scanning {family}"):
        options = ReadOptions()
        options.fill_cache(False)  # type: ignore[call-arg]  # each block is read once; the stub lacks the argument
        if end is not None:
            options.set_iterate_upper_bound(end)
        found = table.items(from_key=first, read_opt=options)
        while True:
            while flat := list(chain.from_iterable(islice(found, count))):
                yield flat[::2], flat[1::2]
                last = flat[-2]
            # The driver's iterator also ends at a damaged block: see whether there is anything behind the last row.
            cursor = table.iter()
            cursor.seek(last)
            if cursor.valid() and cursor.key() == last:
                cursor.next()
            if cursor.valid() and end is not None and cursor.key() >= end:
                return
            if not cursor.valid():
                cursor.status()
                return
            found = table.items(from_key=cursor.key(), read_opt=options)


def _prepare_directory(directory: Path) -> None:
    try:
        make_directories(directory)
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


class DatabaseLog:
    """The log files of one database. Thread-safe; a sync covers all who asked for one before it began.

    The kernel reports a lost write once per open file and takes what it could not write for written: a later sync says
    nothing of it, and records behind the gap would not be found again. So files stay open from their first sync until
    they are gone (their blocks with them, at the next sync), and after a failure nothing is durable before all that the
    log should hold has been written elsewhere.
    """

    def __init__(self, directory: Path, rewrite: Callable[[], None]) -> None:
        """rewrite: have all records in synced tables, and begin a new log file. Raises StoreFault."""
        self._directory = directory
        self._rewrite = rewrite
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._covered = 0  # tickets below this one need no sync any more
        self._descriptors: dict[str, int] = {}
        self._known: set[str] = set()  # files whose names are durable
        self._is_broken = False

    def failed(self) -> None:
        """The database could not write or sync its log by itself."""
        with self._lock:
            self._is_broken = True

    def sync(self) -> None:
        """Make all that was written before this call durable. Raises StoreFault."""
        ticket = next(self._tickets)
        with self._lock:
            if ticket < self._covered:
                return
            covered = next(self._tickets)
            was_broken, self._is_broken = self._is_broken, False
            try:
                if was_broken:
                    self._rewrite()
                    _log.warning("the log in %s was rewritten", self._directory)
                else:
                    self._sync_files()
            except BaseException:
                self._is_broken = True
                raise
            self._covered = covered

    def close(self) -> None:
        """Let go of files."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def _sync_files(self) -> None:
        """What is not in a log file any more is in a synced table."""
        try:
            names = {name for name in os.listdir(self._directory) if name.endswith(_WAL_SUFFIX)}
            for name in self._descriptors.keys() - names:
                os.close(self._descriptors.pop(name))
            for name in names - self._descriptors.keys():
                with suppress(FileNotFoundError):
                    self._descriptors[name] = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
            for descriptor in self._descriptors.values():
                os.fdatasync(descriptor)
            if not names <= self._known:
                sync_directory(self._directory)
                self._known = names
        except OSError as error:
            raise StoreFault(f"syncing the log in {self._directory} failed: {error.strerror}") from error


def _options(cache: Cache) -> Options:
    """Return the options of each family."""
    options = Options(raw_mode=True)
    table = BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_block_size(_BLOCK_BYTES)
    table.set_bloom_filter(10, False)
    table.set_cache_index_and_filter_blocks(True)  # counted in the cache, so that they cannot grow beside it
    table.set_checksum_type(ChecksumType.xxh3())
    options.set_block_based_table_factory(table)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_compression_type(DBCompressionType.none())
    # A damaged table must cost its own records, not turn the whole database read-only. Records are covered by the
    # checksums of their blocks, verified on every read.
    options.set_paranoid_checks(False)
    options.set_wal_recovery_mode(DBRecoveryMode.skip_any_corrupted_record())
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(2)
    options.set_max_total_wal_size(_WAL_LIMIT_BYTES)
    options.set_max_open_files(_OPEN_FILES)
    options.set_max_background_jobs(2)
    options.set_max_manifest_file_size(4 << 20)
    options.set_manifest_preallocation_size(64 << 10)
    options.set_keep_log_file_num(_LOG_FILES)
    options.set_max_log_file_size(_LOG_FILE_BYTES)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options
