"""Retention of pages: given with their store, extended by later ones, changed by pins, ended by a sweep.

The owner's disk is the truth: a change is synced before its request is answered. A page that is not durable
yet takes what was changed along when it is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvpool.core.clock import Clock
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import InvalidRequest, KvPoolError, QuotaExceeded, StoreFault
from kvpool.core.page import PageKey
from kvpool_pagestore.core.admission import AdmissionPurpose, AdmissionRequest
from kvpool_pagestore.core.events import ChunksLeft, PagesArrived, PagesLeft
from kvpool_pagestore.core.keyspaces import Keyspace, KeyspaceBook, chunk_pages
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.policy import PolicyBook
from kvpool_pagestore.core.retention import ExpiryQueue, PinBook, extended, is_expired, with_defaults
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.engine.disk_tier import DiskTier
from kvpool_pagestore.metrics import PageStoreMetrics

_log = logging.getLogger(__name__)

MAX_PIN_CHUNKS = 4096
_SWEPT_CHUNKS = 16  # between two turns of the loop: a chunk may have 64 pages
_CHANGED_CHUNKS = 16  # the same for pins
_SWEEP_PAUSE_S = 60.0  # the wall clock may jump: look at it now and then


class RetentionManager:
    """Knows what expires and what is pinned. Runs only while something will expire."""

    def __init__(
        self,
        policies: PolicyBook,
        keyspaces: KeyspaceBook,
        table: PageTable,
        disk: DiskTier | None,
        metrics: PageStoreMetrics,
        clock: Clock,
        max_pinned_bytes: int,
    ) -> None:
        self._policies = policies
        self._keyspaces = keyspaces
        self._table = table
        self._disk = disk
        self._metrics = metrics
        self._clock = clock
        self._expiry = ExpiryQueue()
        self._pins = PinBook(max_pinned_bytes)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_us = 0
        self._stopped = False

    @property
    def pinned_bytes(self) -> int:
        """Page bytes that are pinned now."""
        return self._pins.pinned_bytes(self._clock.wall_us())

    @property
    def may_expire(self) -> bool:
        """Whether any page that is here will expire: else `drop_expired` has nothing to do."""
        return bool(self._expiry)

    def stop(self) -> None:
        """Sweep no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def prepared(self, key: PageKey, metadata: PageMetadata) -> PageMetadata:
        """Metadata of a page that comes here now, with the defaults of its keyspace and the end of its life."""
        default = self._policies.policy(key.keyspace).retention
        return with_defaults(metadata, default, self._clock.wall_us())

    def prepared_all(self, keyspace: bytes, metadata: Sequence[PageMetadata]) -> list[PageMetadata]:
        """Do the same for pages of one keyspace."""
        default, now_us = self._policies.policy(keyspace).retention, self._clock.wall_us()
        return [with_defaults(one, default, now_us) for one in metadata]

    def arrived(self, event: PagesArrived) -> None:
        """Forget pages when their time comes, or soon if it has come already; count their pins, which were granted."""
        for record in event.records:
            key, metadata = record.key, record.metadata
            if metadata.expires_us:
                self._note(key.keyspace + key.chunk_hash, metadata)
            if metadata.pinned_until_us and metadata.pinned_until_us > self._clock.wall_us():
                self._pins.pin({key: record.page_bytes}, metadata.pinned_until_us, 0, force=True)
            elif self._pins and key in self._pins:  # counted for a writer who came second
                self._pins.unpin([key])

    def left(self, event: PagesLeft) -> None:
        """Forget what was known of pages that have gone from staging and from disk. Nothing is known of most."""
        for key in event.keys if self._pins or self._expiry else ():
            name = key.keyspace + key.chunk_hash
            if key in self._pins and self._table.metadata(key) is None and not self._table.is_coming(key):
                self._pins.unpin([key])
            if name in self._expiry and not self._table.keys(name[:16], name[16:]):
                self._expiry.forget(name)

    def chunks_left(self, event: ChunksLeft) -> None:
        """Do the same for all pages of chunks."""
        if self._pins or self._expiry:
            for name, shards in event.chunks:
                self.left(PagesLeft(chunk_pages(name[:16], name[16:], shards)))

    def refusal(self, request: AdmissionRequest) -> QuotaExceeded | None:
        """An AdmissionRule: count the pin of a page that is about to be stored, or say why it cannot be pinned."""
        if request.purpose is not AdmissionPurpose.STORE:
            return None
        return self._pin(request.record)

    @contextmanager
    def seeking_room(self, key: PageKey) -> Iterator[None]:
        """Take back the pin that was counted for a page if the block, which seeks a slot for it, raises."""
        try:
            yield
        except BaseException:
            self.turned_down(key)
            raise

    def turned_down(self, key: PageKey) -> None:
        """A page that was admitted did not come, or not now."""
        if key in self._pins and not self._table.is_coming(key):  # else its own writer's end decides
            current = self._table.metadata(key)
            if current is None or not current.pinned_until_us:
                self._pins.unpin([key])

    def drop_expired(self, key: PageKey) -> None:
        """Forget a page that is past its time, wherever it is: a request for it must not get it."""
        if not self._expiry:
            return
        now_us = self._clock.wall_us()
        slot = self._table.find(key)
        if slot is not None and is_expired(slot.page.metadata, now_us):
            self._table.drop(key)
        on_disk = self._disk.map.metadata(key) if self._disk is not None else None
        if on_disk is not None and is_expired(on_disk, now_us) and self._disk is not None:
            self._disk.discard([key])

    def extend(self, key: PageKey, page_bytes: int, wanted: PageMetadata, changed: list[PageKey]) -> KvPoolError | None:
        """A page that is here was asked to be stored again: keep it as long as both wish. None, or why not.

        Pages whose records on disk do not say so yet are added to `changed`; see `keep`.
        """
        current = self._table.metadata(key)
        if current is None or (after := extended(current, wanted)) == current:
            return None
        if after.pinned_until_us != current.pinned_until_us:
            refused = self._pin(PageRecord(key, page_bytes, after))
            if refused is not None:
                return refused
        changed += self._change([(key.keyspace + key.chunk_hash, after)])
        return None

    async def keep(self, changed: Sequence[PageKey]) -> None:
        """Write the metadata of pages to disk; synced, once for all of them. Raises StoreFault."""
        if self._disk is not None and changed:
            now = [(key, current) for key in changed if (current := self._table.metadata(key)) is not None]
            await self._disk.set_metadata(now)

    async def pin(self, tenant: str, keyspace: bytes, chunk_hashes: Sequence[bytes], until_us: int) -> int:
        """Pin chunks until then, or (0) end their pins; how many pages of them are here.

        All of them or none. Durable for durable pages when this returns. Raises QuotaExceeded when more than
        max_pinned_share of the tier would be pinned, StoreFault.
        """
        if len(chunk_hashes) > MAX_PIN_CHUNKS:
            raise InvalidRequest(f"{len(chunk_hashes)} chunks in one Pin, at most {MAX_PIN_CHUNKS}; split the request")
        known = self._keyspaces.find(keyspace)
        if known is None or known.tenant != tenant:
            return 0  # as if it did not exist
        if self._disk is not None and self._disk.fault:
            raise StoreFault(f"pins cannot be made durable: {self._disk.fault}")
        found: dict[bytes, list[PageKey]] = {}  # pages by chunk
        for position, chunk_hash in enumerate(dict.fromkeys(chunk_hashes)):
            if position % _CHANGED_CHUNKS == 0:
                await asyncio.sleep(0)
            if keys := self._table.keys(keyspace, chunk_hash):
                found[keyspace + chunk_hash] = keys
        now_us = self._clock.wall_us()
        pages = {key: known.page_bytes(key.shard) for keys in found.values() for key in keys}
        if until_us > now_us and (refused := self._pins.pin(pages, until_us, now_us)) is not None:
            raise refused
        count, names = 0, list(found)
        for start in range(0, len(names), _CHANGED_CHUNKS):
            changes = []
            for name in names[start : start + _CHANGED_CHUNKS]:
                keys = self._counted(known, name, found[name], until_us)
                current = self._table.metadata(keys[0]) if keys else None
                if current is not None:
                    changes.append((name, replace(current, pinned_until_us=until_us)))
                count += len(keys)
            await self.keep(self._change(changes))
        return count

    def sweep(self) -> int:
        """Forget what has expired, a bounded part of it at once; how many pages went."""
        now_us, count = self._clock.wall_us(), 0
        for name in self._expiry.take_due(now_us, _SWEPT_CHUNKS):
            expired: list[PageKey] = []
            for key in self._table.keys(name[:16], name[16:]):
                current = self._table.metadata(key)
                if current is not None and is_expired(current, now_us):
                    expired.append(key)
                elif current is not None:
                    self._expiry.add(name, current.expires_us)  # the caller sets the timer
            for key in expired:
                self._table.drop(key)
            on_disk = [key for key in expired if self._disk is not None and key in self._disk.map]
            if on_disk and self._disk is not None:
                self._disk.discard(on_disk)
            count += len(expired)
        self._metrics.expired_pages.inc(count)
        return count

    # Inside

    def _counted(self, known: Keyspace, name: bytes, found: Sequence[PageKey], until_us: int) -> list[PageKey]:
        """Pages of a chunk that are here now, counted as pinned or not; some went or came while others were changed."""
        keys = self._table.keys(name[:16], name[16:])
        if until_us <= self._clock.wall_us():
            self._pins.unpin(keys)
            return keys
        self._pins.unpin(key for key in found if self._table.metadata(key) is None and not self._table.is_coming(key))
        come = {key: known.page_bytes(key.shard) for key in keys if key not in self._pins}
        self._pins.pin(come, until_us, 0, force=True)
        return keys

    def _pin(self, record: PageRecord) -> QuotaExceeded | None:
        now_us, until_us = self._clock.wall_us(), record.metadata.pinned_until_us
        return self._pins.pin({record.key: record.page_bytes}, until_us, now_us) if until_us > now_us else None

    def _note(self, name: bytes, metadata: PageMetadata) -> None:
        if metadata.expires_us:
            self._expiry.add(name, metadata.expires_us)
            if self._timer is None or metadata.expires_us < self._timer_due_us:
                self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, due_us = None, self._expiry.next_us
        if due_us is not None and not self._stopped:
            delay_s = min(max(0.0, (due_us - self._clock.wall_us()) / 1e6), _SWEEP_PAUSE_S)
            self._timer_due_us = due_us
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._sweep_and_arm)

    def _sweep_and_arm(self) -> None:
        self.sweep()
        self._arm()

    def _change(self, changes: Sequence[tuple[bytes, PageMetadata]]) -> list[PageKey]:
        """Other metadata for all pages of chunks, in memory; those that are on disk too, for `keep`."""
        on_disk: list[PageKey] = []
        for name, metadata in changes:
            self._note(name, metadata)
            for key in self._table.keys(name[:16], name[16:]):
                slot = self._table.find(key)
                if slot is not None:
                    self._table.set_metadata(slot, metadata)
                if self._disk is not None and key in self._disk.map:
                    self._disk.map.set_metadata(name[:16], name[16:], metadata)
                    on_disk.append(key)
        return on_disk
