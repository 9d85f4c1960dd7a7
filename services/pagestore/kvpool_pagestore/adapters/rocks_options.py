"""How RocksDB is tuned: small families of records, and families that hold page bytes."""

from __future__ import annotations

from typing import Final

from rocksdict import BlockBasedOptions, Cache, ChecksumType, DBCompressionType, DBRecoveryMode, Options

_BLOCK_CACHE_BYTES: Final = 4 << 20  # records only; pages are never cached here: the arena is their cache
_WRITE_BUFFER_BYTES: Final = 1 << 20
_WAL_LIMIT_BYTES: Final = 8 << 20
_OPEN_FILES: Final = 256  # bounds the memory of table readers; one that is not open costs a reader about 0.1 ms
_LOG_FILES: Final = 2
_LOG_FILE_BYTES: Final = 1 << 20


def small_options(*, direct_reads: bool) -> Options:
    """Of a family of records."""
    options = _common_options(direct_reads=direct_reads)
    table = BlockBasedOptions()
    table.set_block_cache(Cache(_BLOCK_CACHE_BYTES))
    table.set_bloom_filter(10, False)
    table.set_cache_index_and_filter_blocks(True)  # counted in the cache, so that they cannot grow beside it
    table.set_checksum_type(ChecksumType.xxh3())
    options.set_block_based_table_factory(table)
    return options


def table_options(*, direct_reads: bool) -> Options:
    """Of a family of page bytes."""
    options = _common_options(direct_reads=direct_reads)
    table = BlockBasedOptions()
    table.disable_cache()
    table.set_checksum_type(ChecksumType.xxh3())
    options.set_block_based_table_factory(table)
    options.set_disable_auto_compactions(True)  # files of a volume never overlap; space comes back by dropping volumes
    return options


def _common_options(*, direct_reads: bool) -> Options:
    """direct_reads: all of the database, past the page cache; the last options it is opened with decide."""
    options = Options(raw_mode=True)
    options.set_use_direct_reads(direct_reads)
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
