"""RocksDB as this service opens it: options, column families, and errors in our words.

Records are small; they go through the log, synced when asked. Page bytes never pass through a memtable or the log: see
rocks_files and rocks_tables.

The binding keeps the interpreter's lock through nearly every call; only a lookup of a *list* of keys and a flush let
go of it (seen with rocksdict 0.3.29). A synced batch of records holds it for some 0.7 ms.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
    WriteBatch,
    WriteOptions,
)

from kvpool.core.errors import KvPoolError, PageCorrupt, StartupFailed, StoreFault
from kvpool_pagestore.adapters.durable_names import make_directories
from kvpool_pagestore.adapters.rocks_layout import (
    FORMAT_NAME,
    MEMBERS,
    RECORDS,
    VALUES,
    volume_of_family,
)

_BLOCK_CACHE_BYTES: Final = 4 << 20  # records only; pages are never cached here: the arena is their cache
_WRITE_BUFFER_BYTES: Final = 1 << 20
_WAL_LIMIT_BYTES: Final = 8 << 20
_OPEN_FILES: Final = 256  # bounds the memory of table readers; one that is not open costs a reader about 0.1 ms
_LOG_FILES: Final = 2
_LOG_FILE_BYTES: Final = 1 << 20
SMALL_FAMILIES: Final = (RECORDS, MEMBERS, VALUES)


class RocksDatabase:
    """An open database with three small families and any number of table volumes.

    Thread-safe, except that families are created, dropped and recreated by one thread at a time.
    """

    def __init__(self, directory: Path, page_format: bytes) -> None:
        """Open or create; `page_format` names where page bytes lie. Raises StartupFailed."""
        self.directory = directory
        self._synced, self._unsynced = WriteOptions(), WriteOptions()
        self._synced.sync = True
        self._small_options = _small_options()
        self.table_options = _table_options()
        _prepare_directory(directory)
        self._root, self._families = self._open()
        self._handles = {name: self._root.get_column_family_handle(name) for name in SMALL_FAMILIES}
        found = self.family(VALUES).get(FORMAT_NAME)
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
        with store_faults("writing records"):
            self._root.write(batch, self._synced if sync else self._unsynced)

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
            self._handles.clear()  # each handle of a family keeps the database open
            while self._families:
                self._families.popitem()[1].close()
            self._root.close()

    def _open(self) -> tuple[Rdict, dict[str, Rdict]]:
        path = str(self.directory)
        try:
            known = Rdict.list_cf(path) if (self.directory / "CURRENT").exists() else []
            options = dict.fromkeys(SMALL_FAMILIES, self._small_options)
            options |= {name: self.table_options for name in known if volume_of_family(name) is not None}
            root = Rdict(path, self._small_options, column_families=options)
        except Exception as error:  # the binding raises nothing narrower
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
        text = " ".join(str(error).split())
        raise (PageCorrupt if _is_damage(text) else StoreFault)(f"{action} failed: {text}") from error


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


def _small_options() -> Options:
    options = _common_options()
    table = BlockBasedOptions()
    table.set_block_cache(Cache(_BLOCK_CACHE_BYTES))
    table.set_bloom_filter(10, False)
    table.set_cache_index_and_filter_blocks(True)  # counted in the cache, so that they cannot grow beside it
    table.set_checksum_type(ChecksumType.xxh3())
    options.set_block_based_table_factory(table)
    return options


def _table_options() -> Options:
    options = _common_options()
    table = BlockBasedOptions()
    table.disable_cache()
    table.set_checksum_type(ChecksumType.xxh3())
    options.set_block_based_table_factory(table)
    options.set_disable_auto_compactions(True)  # files of a volume never overlap; space comes back by dropping volumes
    return options


def _common_options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_compression_type(DBCompressionType.none())
    # A damaged table must cost its own pages, not turn the whole database read-only. Page bytes carry sums of their
    # own, which the engine verifies; records are covered by the checksums of their blocks, verified on every read.
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


def _prepare_directory(directory: Path) -> None:
    try:
        make_directories(directory)
        probe = directory / "probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise StartupFailed(
            f"the disk tier's directory {directory} cannot be used: {error.strerror}; "
            "make it writable for this user or configure another one"
        ) from error


def _startup_failed(directory: Path, error: Exception) -> StartupFailed:
    text = " ".join(str(error).split())
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
