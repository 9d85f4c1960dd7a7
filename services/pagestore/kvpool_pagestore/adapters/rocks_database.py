"""RocksDB as this service opens it: options, column families, and errors in our words.

Durability: page bytes never pass through a memtable or the write-ahead log. They are written to a table file of their
own, which is synced and then taken into a volume (`ingest`), an act that is itself synced in the manifest. Records are
small; they go through the log, synced when asked.
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
    IngestExternalFileOptions,
    Options,
    Rdict,
    SstFileWriter,
    WriteBatch,
    WriteOptions,
)

from kvpool.core.errors import KvPoolError, PageCorrupt, StartupFailed, StoreFault
from kvpool_pagestore.adapters.rocks_layout import (
    FORMAT,
    FORMAT_NAME,
    MEMBERS,
    RECORDS,
    VALUES,
    volume_family,
    volume_of_family,
)

_BLOCK_CACHE_BYTES: Final = 4 << 20  # records only; pages are never cached here: the arena is their cache
_WRITE_BUFFER_BYTES: Final = 1 << 20
_WAL_LIMIT_BYTES: Final = 8 << 20
_OPEN_FILES: Final = 256  # bounds the memory of table readers; one that is not open costs a reader about 0.1 ms
_INCOMING: Final = "incoming"  # table files not yet taken in; what a crash leaves there is removed
_LOG_FILES: Final = 2
_LOG_FILE_BYTES: Final = 1 << 20
_SMALL_FAMILIES: Final = (RECORDS, MEMBERS, VALUES)


class RocksDatabase:
    """An open database. Thread-safe, except that volumes are created and dropped by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Open or create. Raises StartupFailed."""
        self._directory = directory
        self._incoming = directory / _INCOMING
        self._volume_options = _volume_options()
        self._small_options = _small_options()
        self._synced, self._unsynced = WriteOptions(), WriteOptions()
        self._synced.sync = True
        self._ingest_options = IngestExternalFileOptions()
        self._ingest_options.set_move_files(True)
        _prepare_directory(directory, self._incoming)
        self._root, self._small, self.volumes = self._open()

    def family(self, name: str) -> Rdict:
        """One of RECORDS, MEMBERS, VALUES."""
        return self._small[name]

    def handle(self, name: str) -> ColumnFamily:
        """For write batches."""
        return self._handles[name]

    def create_volume(self, volume: int) -> Rdict:
        with store_faults("creating a volume"):
            family = self._root.create_column_family(volume_family(volume), self._volume_options)
        self.volumes[volume] = family
        return family

    def recreate_family(self, name: str) -> None:
        """Empty one of the small families whatever state its files are in."""
        with store_faults(f"recreating {name}"):
            del self._small[name], self._handles[name]
            self._root.drop_column_family(name)
            self._small[name] = self._root.create_column_family(name, self._small_options)
            self._handles[name] = self._root.get_column_family_handle(name)

    def drop_volume(self, volume: int) -> None:
        """Forget a volume. Its files go when the last reader has let go of its family."""
        self.volumes.pop(volume, None)
        with store_faults("dropping a volume"):
            self._root.drop_column_family(volume_family(volume))

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """Apply a batch of records atomically."""
        with store_faults("writing records"):
            self._root.write(batch, self._synced if sync else self._unsynced)

    def ingest(self, volume: Rdict, name: str, entries: Sequence[tuple[bytes, memoryview]]) -> None:
        """Write entries (sorted by key, no key twice) to a table file and take it into a volume; synced on return."""
        path = str(self._incoming / f"{name}.sst")
        try:
            with store_faults("writing pages"):
                writer = SstFileWriter(self._volume_options)
                writer.open(path)
                for key, value in entries:
                    writer[key] = bytes(value)  # the one copy that the binding asks for
                writer.finish()
                volume.ingest_external_file([path], self._ingest_options)
        finally:
            with suppress(OSError):
                os.unlink(path)  # ingested files were moved; only a failed one is still here

    def used_bytes(self) -> int:
        """Allocated bytes of all files below the directory; files that vanish meanwhile count as gone."""
        return _allocated_bytes(str(self._directory))

    def close(self) -> None:
        """Sync the log and close. Raises StoreFault if the sync failed; closed in any case."""
        try:
            with store_faults("syncing the log"):
                self._root.flush_wal(sync=True)
        finally:
            for family in (*self._small.values(), *self.volumes.values()):
                family.close()
            self._root.close()

    def _open(self) -> tuple[Rdict, dict[str, Rdict], dict[int, Rdict]]:
        path = str(self._directory)
        known: list[str] = []
        try:
            if (self._directory / "CURRENT").exists():
                known = Rdict.list_cf(path)
            options = dict.fromkeys(_SMALL_FAMILIES, self._small_options)
            options |= {name: self._volume_options for name in known if volume_of_family(name) is not None}
            root = Rdict(path, self._small_options, column_families=options)
        except Exception as error:  # the binding raises nothing narrower
            raise _startup_failed(self._directory, error) from error
        small = {name: root.get_column_family(name) for name in _SMALL_FAMILIES}
        self._handles = {name: root.get_column_family_handle(name) for name in _SMALL_FAMILIES}
        volumes = {
            volume: root.get_column_family(name) for name in known if (volume := volume_of_family(name)) is not None
        }
        found = small[VALUES].get(FORMAT_NAME)
        if found is None:
            small[VALUES].put(FORMAT_NAME, FORMAT, self._synced)
        elif found != FORMAT:
            root.close()
            raise StartupFailed(
                f"{path} holds format {found!r} and this version writes {FORMAT!r}; "
                "start the version that wrote it, or empty the directory (it is only a cache)"
            )
        return root, small, volumes


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


def _volume_options() -> Options:
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


def _prepare_directory(directory: Path, incoming: Path) -> None:
    try:
        incoming.mkdir(parents=True, exist_ok=True)
        for left_over in incoming.iterdir():
            left_over.unlink()
        probe = incoming / "probe"
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
