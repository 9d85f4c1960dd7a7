"""Damage to the records of pages in extents: what RocksDB cannot tell any more is found again behind the pages."""

from __future__ import annotations

import logging
import secrets
import threading
from bisect import bisect_left, insort
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from rocksdict import WriteBatch

from kvpool.core.errors import PageCorrupt
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.extents import ExtentFiles
from kvpool_pagestore.adapters.records import RECORDS, PageRecord, Trailer, unpack_trailer
from kvpool_pagestore.adapters.rocks_database import RocksDatabase, store_faults
from kvpool_pagestore.core.disk_budget import TRAILER_BYTES
from kvpool_pagestore.core.extents import Extent

_log = logging.getLogger(__name__)

_SECRET_NAME: Final = "secret"
_SECRET_BYTES: Final = 32
_KEYSPACE_SUFFIX: Final = ".keyspace"
_CLEARED_SUFFIX: Final = ".cleared"
_START_NAME: Final = "start"
_START_SHIFT: Final = 40  # the number of a write: the number of the start in its upper 24 bits, a count below them
_ALL: Final = (1 << 64) - 1  # the highest number of a write that a record can hold
_INTEGER_DIGITS: Final = 20
_BATCH_ROWS: Final = 4096


class Sidecar:
    """What is needed beside the pages when RocksDB is lost: small files, seldom written."""

    def __init__(self, files: ExtentFiles) -> None:
        """Raises StoreFault."""
        self._files = files
        self._lock = threading.Lock()  # two writers may meet a keyspace at the same time
        self.secret = files.kept(_SECRET_NAME).get(_SECRET_NAME, b"")
        if len(self.secret) != _SECRET_BYTES:
            self.secret = secrets.token_bytes(_SECRET_BYTES)
            files.keep(_SECRET_NAME, self.secret)

    def remember_keyspace(self, encoding: bytes) -> None:
        name = blake2b(encoding, digest_size=16).hexdigest() + _KEYSPACE_SUFFIX
        with self._lock:
            if name not in self._files.kept(_KEYSPACE_SUFFIX):
                self._files.keep(name, encoding)

    def first_number(self, highest_seen: int) -> int:
        """The number below those of all writes from now on; above any that this tier ever gave to a write.

        highest_seen: in records and trailers, in case that the file is lost. Call once a start. Raises StoreFault.
        """
        started = _integer(self._files.kept(_START_NAME).get(_START_NAME, b"0")) or 0
        seen = max(highest_seen, *(number or 0 for number in self._cleared().values()), 0)
        start = max(started, seen >> _START_SHIFT) + 1
        self._files.keep(_START_NAME, b"%d" % start)
        return start << _START_SHIFT

    def keyspaces(self) -> Iterable[bytes]:
        return self._files.kept(_KEYSPACE_SUFFIX).values()

    def clear_keyspace(self, keyspace: bytes, last_number: int) -> None:
        """Its pages that were written up to now are gone for good."""
        self._files.keep(keyspace.hex() + _CLEARED_SUFFIX, b"%d" % last_number)

    def cleared_numbers(self) -> dict[bytes, int]:
        """The last number that is gone, by keyspace; where a file is damaged, all of the keyspace is."""
        return {keyspace: _ALL if number is None else number for keyspace, number in self._cleared().items()}

    def _cleared(self) -> dict[bytes, int | None]:
        kept = self._files.kept(_CLEARED_SUFFIX)
        return {bytes.fromhex(name.removesuffix(_CLEARED_SUFFIX)): _integer(text) for name, text in kept.items()}


def _integer(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) <= _INTEGER_DIGITS else None


def salvage_records(database: RocksDatabase, files: ExtentFiles, sidecar: Sidecar, *, is_lost: bool) -> None:
    """Make a table of records that can be read from end to end. Reads all blocks there are.

    is_lost: records are missing altogether, and that one is not there says nothing. Otherwise only those that cannot
    be read are made anew from what lies behind the pages; what reads as absent was deleted. Raises StoreFault if the
    disk itself fails.
    """
    survivors = _survivors(database, _newest_trailers(files, sidecar), is_lost=is_lost)
    _log.error("records made anew from the pages on disk: %d pages survive", len(survivors))
    database.recreate_family(RECORDS)
    batch = WriteBatch(raw_mode=True)
    for key, record in survivors.items():
        batch.put(key.pack(), record.encode(), database.handle(RECORDS))
        if len(batch) == _BATCH_ROWS:
            database.write(batch, sync=False)
            batch = WriteBatch(raw_mode=True)
    database.write(batch, sync=True)


def _newest_trailers(files: ExtentFiles, sidecar: Sidecar) -> dict[PageKey, Trailer]:
    """The last one that was written of each page."""
    newest: dict[PageKey, Trailer] = {}
    cleared = sidecar.cleared_numbers()
    for file, block, end in files.block_ends(TRAILER_BYTES):
        trailer = unpack_trailer(end, sidecar.secret)
        if trailer is None or trailer.record.number <= cleared.get(trailer.key.keyspace, -1):
            continue
        extents = trailer.record.extents
        if extents and (extents[-1].file, extents[-1].start + extents[-1].block_count) != (file, block + 1):
            continue  # lies elsewhere than it says: somebody copied files
        known = newest.get(trailer.key)
        if known is None or known.record.number < trailer.record.number:
            newest[trailer.key] = trailer
    return newest


def _survivors(
    database: RocksDatabase, trailers: dict[PageKey, Trailer], *, is_lost: bool
) -> dict[PageKey, PageRecord]:
    """Records as they are where they can be read, else as the pages say; the newer of two that share blocks."""
    found: dict[PageKey, PageRecord] = {}
    records = database.family(RECORDS)
    for key, trailer in trailers.items():
        try:
            with store_faults("salvaging a record"):
                encoded = records.get(key.pack())
            if encoded is not None:
                found[key] = PageRecord.decode(encoded)
                continue
            if not is_lost:
                continue  # deleted
        except PageCorrupt:
            pass
        if trailer.record.extents:
            found[key] = trailer.record
    taken: dict[int, list[Extent]] = {}
    survivors: dict[PageKey, PageRecord] = {}
    for key, record in sorted(found.items(), key=lambda entry: entry[1].number, reverse=True):
        if not any(_overlaps(extent, taken.get(extent.file, [])) for extent in record.extents):
            survivors[key] = record
            for extent in record.extents:
                insort(taken.setdefault(extent.file, []), extent)
    return survivors


def _overlaps(extent: Extent, taken: list[Extent]) -> bool:
    """Whether an extent shares blocks with those of its file, which are sorted and share none."""
    at = bisect_left(taken, extent)
    before, after = taken[max(0, at - 1) : at], taken[at : at + 1]
    return any(one.start + one.block_count > extent.start for one in before) or any(
        one.start < extent.start + extent.block_count for one in after
    )
