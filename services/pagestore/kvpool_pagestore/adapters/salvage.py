"""Damage to the records of pages in extents: what RocksDB has lost is found again behind the pages."""

from __future__ import annotations

import logging
import secrets
import threading
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt
from rocksdict import WriteBatch

from kvpool.core.errors import PageCorrupt
from kvpool_pagestore.adapters.extents import ExtentFiles
from kvpool_pagestore.adapters.records import (
    RECORDS,
    SALVAGED,
    TRAILER_MAGIC,
    PageRecord,
    Trailer,
    page_of_salvaged_key,
    salvaged_key,
    unpack_trailer,
)
from kvpool_pagestore.adapters.rocks_database import RocksDatabase, rows, store_faults
from kvpool_pagestore.core.extents import BLOCK_BYTES, TRAILER_BYTES

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
_LOGGED_WINDOWS: Final = 4096  # of 4 MiB
_LOGGED_ROWS: Final = 1 << 20


class Sidecar:
    """What is needed beside the pages when RocksDB is lost: small files, seldom written."""

    def __init__(self, files: ExtentFiles) -> None:
        """Raises StoreFault."""
        self._files = files
        self._lock = threading.Lock()  # two writers may meet a keyspace at the same time
        self._keyspace_names = files.kept_names(_KEYSPACE_SUFFIX)
        self.secret = files.kept(_SECRET_NAME).get(_SECRET_NAME, b"")
        if len(self.secret) != _SECRET_BYTES:
            self.secret = secrets.token_bytes(_SECRET_BYTES)
            files.keep(_SECRET_NAME, self.secret)

    def remember_keyspace(self, encoding: bytes) -> None:
        name = blake2b(encoding, digest_size=16).hexdigest() + _KEYSPACE_SUFFIX
        with self._lock:
            if name not in self._keyspace_names:
                self._files.keep(name, encoding)
                self._keyspace_names.add(name)

    def first_number(self, highest_seen: int) -> int:
        """The number below those of all writes from now on; above any that this tier ever gave to a write.

        highest_seen: in records and trailers, in case that the file is lost. Call once a start. Raises StoreFault.
        """
        started = _integer(self._files.kept(_START_NAME).get(_START_NAME, b"0")) or 0
        seen = max(highest_seen, *(number or 0 for number in self._cleared().values()), 0)
        start = min(max(started, seen >> _START_SHIFT) + 1, _ALL >> _START_SHIFT)
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
        values = self._files.kept(_CLEARED_SUFFIX)
        return {bytes.fromhex(name.removesuffix(_CLEARED_SUFFIX)): _integer(text) for name, text in values.items()}


def _integer(text: bytes) -> int | None:
    """What a small file says; None if it is damaged."""
    return int(text) if text.isdigit() and len(text) <= _INTEGER_DIGITS and int(text) <= _ALL else None


def salvage_records(database: RocksDatabase, files: ExtentFiles, sidecar: Sidecar, *, is_lost: bool) -> int:
    """Make a table of records that can be read from end to end, from what lies behind the pages. Reads all blocks.

    is_lost: records are missing altogether, and that one is not there says nothing. Otherwise only those that cannot
    be read are restored; what reads as absent was deleted. Returns the highest number of a write that any page bears.
    Killed at any instant, it is done again by the next start. Raises StoreFault if the disk itself fails.

    RocksDB sorts what is found. In memory are 36 bytes of each page, and batches.
    """
    database.recreate_family(SALVAGED)
    highest = _collect(database, files, sidecar, is_lost=is_lost)
    overwritten = _overwritten(_read_claims(database))
    database.set_incomplete()
    database.recreate_family(RECORDS)
    count = _restore(database, overwritten)
    database.recreate_family(SALVAGED)
    database.set_complete()
    _log.error("records were restored from the pages on disk: %d pages survive", count)
    return highest


class _Claims:
    """Which blocks each row of `salvaged` says are its page's. Arrays without a gap between, for tens of millions."""

    def __init__(self) -> None:
        self.numbers = array("Q")  # of the write, by row
        self.rows = array("I")  # of each extent, as the two below
        self.places = array("Q")  # file and first block
        self.counts = array("I")

    def add(self, encoded: bytes) -> None:
        record = PageRecord.decode(encoded)
        for extent in record.extents:
            self.rows.append(len(self.numbers))
            self.places.append(extent.file << 32 | extent.start)
            self.counts.append(extent.block_count)
        self.numbers.append(record.number)


def _collect(database: RocksDatabase, files: ExtentFiles, sidecar: Sidecar, *, is_lost: bool) -> int:
    """Write a row for every page that a trailer names; the highest number of a write."""
    cleared, highest, found = sidecar.cleared_numbers(), 0, list[Trailer]()
    total_gib = sum(files.block_counts.values()) * BLOCK_BYTES >> 30
    for window_number, window in enumerate(files.block_ends(TRAILER_BYTES, TRAILER_MAGIC)):
        if window_number % _LOGGED_WINDOWS == 0:
            _log.warning("salvaging the disk tier: %d of %d GiB read", window_number >> 8, total_gib)
        for file, block, end in window:
            trailer = unpack_trailer(end, sidecar.secret)
            if trailer is None:
                continue
            highest = max(highest, trailer.record.number)
            if trailer.record.number <= cleared.get(trailer.key.keyspace, -1):
                continue
            extents = trailer.record.extents
            if extents and (extents[-1].file, extents[-1].start + extents[-1].block_count) != (file, block + 1):
                continue  # lies elsewhere than it says: files were copied
            found.append(trailer)
        if len(found) >= _BATCH_ROWS:
            _write_rows(database, found, is_lost=is_lost)
            found = []
    _write_rows(database, found, is_lost=is_lost)
    return highest


def _write_rows(database: RocksDatabase, trailers: Sequence[Trailer], *, is_lost: bool) -> None:
    """Records as they are where they can be read, else as the trailers say."""
    batch, handle = WriteBatch(raw_mode=True), database.handle(SALVAGED)
    for trailer in trailers:
        try:
            with store_faults("salvaging a record"):
                encoded = database.family(RECORDS).get(trailer.key.pack())
            stored = None if encoded is None else PageRecord.decode(encoded)
            restore = is_lost and (stored is None or stored.number < trailer.record.number)
        except PageCorrupt:
            stored, restore = None, True
        if stored is not None:
            batch.put(salvaged_key(trailer.key, stored.number), encoded, handle)
        if restore and trailer.record.extents:
            batch.put(salvaged_key(trailer.key, trailer.record.number), trailer.record.encode(), handle)
    database.write(batch, sync=False)


def _read_claims(database: RocksDatabase) -> _Claims:
    claims = _Claims()
    for _, encoded in rows(database, SALVAGED):
        claims.add(encoded)
    return claims


def _overwritten(claims: _Claims) -> npt.NDArray[np.bool_]:
    """[rows] which of them share blocks with a newer one: their bytes are gone, even if the newer page is gone too."""
    lost = np.zeros(len(claims.numbers), bool)
    numbers, extent_rows = np.frombuffer(claims.numbers, np.uint64), np.frombuffer(claims.rows, np.uint32)
    places, counts = np.frombuffer(claims.places, np.uint64), np.frombuffer(claims.counts, np.uint32)
    order = np.argsort(places)
    reached, active = 0, list[tuple[int, int, int]]()  # end, number and row of those that later ones may overlap
    for first in range(0, len(order), _BATCH_ROWS):
        part = order[first : first + _BATCH_ROWS]
        starts, ends = places[part], places[part] + counts[part]
        before = np.maximum.accumulate(np.concatenate([[np.uint64(reached)], ends]))
        overlaps = starts < before[:-1]
        suspects = overlaps | np.append(overlaps[1:], True)  # the next part may begin within the last one
        reached = int(before[-1])
        for at in np.flatnonzero(suspects).tolist():
            row = int(extent_rows[part[at]])
            start, mine = int(starts[at]), (int(ends[at]), int(numbers[row]), row)
            active = [other for other in active if other[0] > start]
            for other in active:
                lost[min(mine, other, key=itemgetter(1))[2]] = True
            active.append(mine)
    return lost


def _restore(database: RocksDatabase, overwritten: npt.NDArray[np.bool_]) -> int:
    """Write the newest record of each page, synced, unless its blocks were overwritten; how many there are."""
    batch, before, count = WriteBatch(raw_mode=True), b"", 0
    for row, (key, encoded) in enumerate(rows(database, SALVAGED)):
        page_key = page_of_salvaged_key(key)
        if page_key != before and not overwritten[row]:
            batch.put(page_key, encoded, database.handle(RECORDS))
            count += 1
        before = page_key
        if len(batch) == _BATCH_ROWS:
            database.write(batch, sync=False)
            batch = WriteBatch(raw_mode=True)
        if (row + 1) % _LOGGED_ROWS == 0:
            _log.warning("salvaging the disk tier: %d of %d records restored", row + 1, len(overwritten))
    database.write(batch, sync=True)
    return count
