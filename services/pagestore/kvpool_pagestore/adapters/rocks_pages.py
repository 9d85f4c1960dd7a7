"""Pages in a RocksDatabase: writing, finding, forgetting, and moving what lives out of volumes that are mostly dead."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from rocksdict import WriteBatch

from kvpool.core.errors import PageCorrupt, StoreFault
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.rocks_database import RocksDatabase, rows, store_faults
from kvpool_pagestore.adapters.rocks_layout import (
    LAST_VOLUME_NAME,
    MEMBERS,
    RECORDS,
    VALUES,
    PageRecord,
    decode_kept,
    keyspace_bounds,
    member_bounds,
    member_key,
    member_page,
)
from kvpool_pagestore.adapters.rocks_salvage import rebuild_members
from kvpool_pagestore.adapters.rocks_volumes import PayloadVolumes, Volume, Volumes
from kvpool_pagestore.ports import PageMetadata, PageWrite, StoredPage

_log = logging.getLogger(__name__)

_MOVE_BYTES: Final = 32 << 20  # read into memory at once when a volume is emptied, at most


class RocksPages:
    """Thread-safe. The lock guards records and accounting: held over small synced writes, never over page bytes."""

    def __init__(self, database: RocksDatabase, payloads: PayloadVolumes, volume_bytes: int) -> None:
        """Count what lives where. The records must be readable (see rocks_salvage). Raises StoreFault."""
        self._database = database
        self._payloads = payloads
        self._volumes = Volumes(volume_bytes)
        self._move_bytes = min(_MOVE_BYTES, volume_bytes // 2)  # so that no volume grows far beyond its size
        self._lock = threading.Lock()
        self._reclaiming = threading.Lock()
        self._load()

    def scan(self) -> Iterator[StoredPage]:
        """Every page that has a record. Raises StoreFault."""
        for packed, encoded in rows(self._database, RECORDS):
            yield StoredPage(packed, *decode_kept(encoded))

    def write(self, pages: Sequence[PageWrite]) -> None:
        """Make pages durable, no key twice. Raises StoreFault; then none of them is."""
        self._write(pages, None)

    def get_into(self, key: PageKey, destination: memoryview) -> int | None:
        """Page bytes, or None if there is no page. Raises PageCorrupt if its bytes are damaged or gone, StoreFault."""
        record = self._record(key)
        while record is not None:
            if record.page_bytes > len(destination):
                raise PageCorrupt(f"page {key} has {record.page_bytes} bytes on disk, not {len(destination)}")
            if self._read(key, record, destination[: record.page_bytes]):
                return record.page_bytes
            newer = self._record(key)
            if newer == record:
                raise PageCorrupt(f"page {key} has a record on disk but no bytes")
            record = newer  # it was moved or written again between the two reads
        return None

    def set_metadata(self, changes: Iterable[tuple[PageKey, PageMetadata]]) -> None:
        """Replace what is kept beside pages, synced; absent pages are passed over. Raises StoreFault."""
        batch = WriteBatch(raw_mode=True)
        with self._lock:
            for key, metadata in changes:
                record = self._record_or_damaged(key)
                if record is not None:
                    changed = replace(record, metadata=metadata)
                    batch.put(key.pack(), changed.encode(), self._database.handle(RECORDS))
            if len(batch):
                self._database.write(batch, sync=True)

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Delete pages. Not synced: a page that comes back after a power loss is still the right page."""
        batch = WriteBatch(raw_mode=True)
        with self._lock:
            found = [record for key in set(keys) if (record := self._delete_into(batch, key)) is not None]
            if len(batch):
                self._database.write(batch, sync=False)
                self._subtract(found)

    def forget_keyspace(self, keyspace: bytes) -> None:
        """Delete all pages of a keyspace; synced, because an operator asked for it."""
        first, end = keyspace_bounds(keyspace)
        batch = WriteBatch(raw_mode=True)
        batch.delete_range(first, end, self._database.handle(RECORDS))
        with self._lock:
            found = [PageRecord.decode(encoded) for _, encoded in rows(self._database, RECORDS, first, end)]
            self._database.write(batch, sync=True)
            self._subtract(found)

    def remember_keyspace(self, encoding: bytes) -> None:
        """Nothing to do: the database remembers it, and nothing outlives the database."""

    def probe(self) -> None:
        """Nothing to do: what the database can write, it can ingest."""

    def reclaim(self) -> None:
        """Give space of dead pages back until little enough is dead.

        If another thread is at it, this one waits: writers that went on meanwhile would outrun the budget.
        """
        with self._reclaiming:
            while (victim := self._take_victim()) is not None:
                self._empty(victim)

    def _load(self) -> None:
        database = self._database
        found = {
            number: Volume(number=number, total_bytes=total_bytes)
            for number, total_bytes in sorted(self._payloads.sizes_bytes().items())
        }
        dangling = WriteBatch(raw_mode=True)
        for packed, encoded in rows(database, RECORDS):
            record = PageRecord.decode(encoded)
            if record.volume in found:
                found[record.volume].live_bytes += record.page_bytes
            else:
                dangling.delete(packed, database.handle(RECORDS))
        if len(dangling):
            # Their deletion was not synced when the machine went down, the dropping of their volume was.
            _log.warning("forgetting %d pages whose volume was dropped", len(dangling))
            database.write(dangling, sync=True)
        for volume in found.values():
            self._volumes.add(volume)
        with store_faults("reading the last volume's number"):
            last_number = int(database.family(VALUES).get(LAST_VOLUME_NAME) or b"0")
        self._volumes.last_number = max(self._volumes.last_number, last_number)

    def _write(self, pages: Sequence[PageWrite], only_if: Mapping[PageKey, PageRecord] | None) -> None:
        """With `only_if`, a page that lies elsewhere by now stays there, and all keep the metadata they have by now."""
        size_bytes = sum(len(page.page) for page in pages)
        with self._lock:
            volume = self._volume_for_batch()
            position = self._payloads.reserve(volume.number, size_bytes)
            volume.writer_count += 1
            volume.total_bytes += size_bytes  # dead until the records point there
        try:
            positions = self._append(volume, position, pages, size_bytes)
            reach("pagestore.write.synced")
            with self._lock:
                self._point_records_at(volume, positions, pages, only_if)
        finally:
            with self._lock:
                volume.writer_count -= 1

    def _append(self, volume: Volume, position: int, pages: Sequence[PageWrite], size_bytes: int) -> Sequence[int]:
        try:
            return self._payloads.append(volume.number, position, [(page.key, page.page) for page in pages])
        except BaseException:
            with self._lock:
                volume.total_bytes -= self._payloads.withdraw(volume.number, position, size_bytes)
            raise

    def _volume_for_batch(self) -> Volume:
        volume = self._volumes.current()
        if volume is None:
            volume = Volume(number=self._volumes.last_number + 1)
            # No number comes twice: a record that a power loss brings back must not point into another volume.
            self._database.save_value(LAST_VOLUME_NAME, b"%d" % volume.number)
            self._volumes.last_number = volume.number  # used up even if the volume cannot be made
            self._payloads.create(volume.number)
            self._volumes.add(volume)
        return volume

    def _point_records_at(
        self,
        volume: Volume,
        positions: Sequence[int],
        pages: Sequence[PageWrite],
        only_if: Mapping[PageKey, PageRecord] | None,
    ) -> None:
        batch = WriteBatch(raw_mode=True)
        replaced: list[PageRecord] = []
        added_bytes = 0
        for page, position in zip(pages, positions, strict=True):
            old, metadata = self._record_or_damaged(page.key), page.metadata
            if only_if is not None:
                if old is None or old.place != only_if[page.key].place:
                    continue
                metadata = old.metadata
            if old is not None:
                replaced.append(old)
            record = PageRecord(volume.number, position, len(page.page), metadata)
            batch.put(page.key.pack(), record.encode(), self._database.handle(RECORDS))
            batch.put(member_key(volume.number, page.key), b"", self._database.handle(MEMBERS))
            added_bytes += len(page.page)
        self._database.write(batch, sync=True)
        volume.live_bytes += added_bytes
        self._subtract(replaced)

    def _delete_into(self, batch: WriteBatch, key: PageKey) -> PageRecord | None:
        record = self._record_or_damaged(key)
        batch.delete(key.pack(), self._database.handle(RECORDS))
        return record

    def _subtract(self, records: Iterable[PageRecord]) -> None:
        for record in records:
            if (volume := self._volumes.by_number.get(record.volume)) is not None:
                volume.live_bytes -= record.page_bytes

    def _record(self, key: PageKey) -> PageRecord | None:
        with store_faults(f"reading the record of page {key}"):
            encoded = self._database.family(RECORDS).get(key.pack())
            return PageRecord.decode(encoded) if encoded is not None else None

    def _record_or_damaged(self, key: PageKey) -> PageRecord | None:
        """As `_record`, but a damaged one counts as none: it is about to be replaced or deleted."""
        try:
            return self._record(key)
        except PageCorrupt:
            return None

    def _read(self, key: PageKey, record: PageRecord, destination: memoryview) -> bool:
        return self._payloads.read_into(record.volume, record.position, key, destination)

    def _take_victim(self) -> Volume | None:
        with self._lock:
            return self._volumes.victim()

    def _empty(self, victim: Volume) -> None:
        """Move the live pages of a sealed volume elsewhere, then drop it."""
        batch: list[PageWrite] = []
        expected: dict[PageKey, PageRecord] = {}
        size_bytes = 0
        for key in self._members(victim):
            record = self._record_or_damaged(key)
            if record is None or record.volume != victim.number:
                continue
            payload = self._payload_or_lost(key, record)
            if payload is None:
                continue
            batch.append(PageWrite(key=key, page=payload, metadata=record.metadata))
            expected[key] = record
            size_bytes += len(payload)
            if size_bytes >= self._move_bytes:
                self._write(batch, expected)
                batch, expected, size_bytes = [], {}, 0
        if batch:
            self._write(batch, expected)
        self._drop(victim)

    def _members(self, volume: Volume) -> Sequence[PageKey]:
        """Pages that were written to a volume and may still be there."""
        first, end = member_bounds(volume.number)
        try:
            return [member_page(member) for member, _ in rows(self._database, MEMBERS, first, end)]
        except PageCorrupt as damage:
            _log.error("the members of volumes are damaged and made anew from the records: %s", damage.message)
            with self._lock:
                rebuild_members(self._database)
            return [member_page(member) for member, _ in rows(self._database, MEMBERS, first, end)]

    def _payload_or_lost(self, key: PageKey, record: PageRecord) -> memoryview | None:
        """Page bytes to be moved. A page that cannot be read is forgotten, as its next reader would do."""
        page = memoryview(bytearray(record.page_bytes))
        try:
            if self._read(key, record, page):
                return page
        except (PageCorrupt, StoreFault) as error:  # a bad sector must not hold the space of all other pages
            _log.warning("dropping a page that cannot be moved: %s", error.message)
        self.forget([key])
        return None

    def _drop(self, victim: Volume) -> None:
        first, end = member_bounds(victim.number)
        batch = WriteBatch(raw_mode=True)
        batch.delete_range(first, end, self._database.handle(MEMBERS))
        with self._lock:
            self._payloads.drop(victim.number)
            self._volumes.remove(victim)
            self._database.write(batch, sync=False)
