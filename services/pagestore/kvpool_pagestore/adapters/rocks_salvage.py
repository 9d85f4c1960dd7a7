"""Damage to the small tables: what can still be read is carried into a new table."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rocksdict import WriteBatch

from kvpool.core.errors import PageCorrupt
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.rocks_database import RocksDatabase, rows, store_faults
from kvpool_pagestore.adapters.rocks_layout import MEMBERS, RECORDS, PageRecord, member_key, member_page

_log = logging.getLogger(__name__)

_BATCH_ROWS = 4096


def salvage_records(database: RocksDatabase) -> None:
    """Leave a table of records that can be read from end to end. Costs one scan if nothing is wrong.

    A scan stops at the first bad block, so that the survivors are looked up one by one, by the members of all volumes;
    if those are damaged too, only those named before their first bad block survive. Raises StoreFault if the disk
    itself fails.
    """
    try:
        for _, encoded in rows(database, RECORDS):
            PageRecord.decode(encoded)
    except PageCorrupt as damage:
        survivors = _survivors(database)
        _log.error("the records of the disk tier are damaged, %d pages survive: %s", len(survivors), damage.message)
        _replace(database, RECORDS, survivors.items())
        rebuild_members(database)


def rebuild_members(database: RocksDatabase) -> None:
    """Make the members of all volumes anew from the records. No page may be written meanwhile."""
    found = [(PageKey.unpack(packed), PageRecord.decode(encoded)) for packed, encoded in rows(database, RECORDS)]
    _replace(database, MEMBERS, ((member_key(record.volume, key), b"") for key, record in found))


def _survivors(database: RocksDatabase) -> dict[bytes, bytes]:
    """Readable records by packed page key."""
    survivors: dict[bytes, bytes] = {}
    records = database.family(RECORDS)
    try:
        for member, _ in rows(database, MEMBERS):
            packed = member_page(member).pack()
            try:
                with store_faults("salvaging a record"):
                    if (encoded := records.get(packed)) is not None:
                        PageRecord.decode(encoded)
                        survivors[packed] = encoded
            except PageCorrupt:
                continue  # lost; the caller reports how many are left
    except PageCorrupt as damage:
        _log.error("the members of volumes are damaged too: %s", damage.message)
    return survivors


def _replace(database: RocksDatabase, family: str, items: Iterable[tuple[bytes, bytes]]) -> None:
    database.recreate_family(family)
    batch = WriteBatch(raw_mode=True)
    for key, value in items:
        batch.put(key, value, database.handle(family))
        if len(batch) == _BATCH_ROWS:
            database.write(batch, sync=False)
            batch = WriteBatch(raw_mode=True)
    database.write(batch, sync=True)
