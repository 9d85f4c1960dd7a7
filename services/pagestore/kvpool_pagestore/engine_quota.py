"""Quotas enforced: whoever is over one gives up pages of its own, never those of others, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from kvpool.core.errors import QuotaExceeded
from kvpool.core.page import PageKey
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.ledger import Ledger
from kvpool_pagestore.core.quota import QuotaBook, Shortfall, TenantQuotas
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.engine_disk import DiskTier
from kvpool_pagestore.engine_writeback import WriteBack
from kvpool_pagestore.metrics import PageStoreMetrics

_SPARE_PART = 64  # looking for victims costs a walk: one part in this many of what is used is given up on top


class Quotas:
    """Counts what keyspaces use, in staging and on disk, and admits what is to come."""

    def __init__(
        self,
        tenants: TenantQuotas,
        keyspaces: KeyspaceBook,
        ledger: Ledger,
        disk: DiskTier | None,
        write_back: WriteBack | None,
        metrics: PageStoreMetrics,
    ) -> None:
        self._book = QuotaBook(tenants)
        self._keyspaces = keyspaces
        self._ledger = ledger
        self._disk = disk
        self._metrics = metrics
        ledger.on_held = lambda record, size_bytes: self._add(record.key.keyspace, size_bytes)
        ledger.admit = self._admit_slot
        if disk is not None:
            disk.map.on_bytes = self._add
        if write_back is not None:
            write_back.admit = self._admit_write
            write_back.on_settled = lambda key, size_bytes: self._add(key.keyspace, -size_bytes)

    def used_bytes(self, keyspace: bytes) -> int:
        """What a keyspace takes in staging and on disk."""
        return self._book.used_bytes(keyspace)

    def set_limit(self, keyspace: bytes, limit_bytes: int) -> None:
        """A keyspace's own quota has changed; what is too much is given up at once, as far as it is not in use."""
        self._know(keyspace)
        self._book.limit(keyspace, limit_bytes)
        self._make_room(keyspace, 0, None)

    def enforce(self) -> None:
        """Give up whatever is beyond a quota."""
        tenants = set[str]()
        for one in self._keyspaces.all():
            self._know(one.keyspace)
            for shortfall in self._book.shortfalls(one.keyspace, 0):
                if shortfall.tenant not in tenants:  # once for all of its keyspaces, also where it cannot be met
                    tenants.update(filter(None, (shortfall.tenant,)))
                    self._give_up(shortfall, None)

    # Inside

    def _know(self, keyspace: bytes) -> None:
        if not self._book.knows(keyspace):
            known = self._keyspaces.find(keyspace)
            # A policy may come before the keyspace itself: nothing of it is here then, nor counted.
            if known is not None:
                self._book.know(keyspace, known.tenant)

    def _add(self, keyspace: bytes, size_bytes: int) -> None:
        self._know(keyspace)
        self._book.add(keyspace, size_bytes)

    def _admit_slot(self, record: PageRecord, size_bytes: int) -> QuotaExceeded | None:
        return self._make_room(record.key.keyspace, size_bytes, record.key)

    def _admit_write(self, key: PageKey, size_bytes: int) -> QuotaExceeded | None:
        """Counted until `on_settled`, by when the disk's map has counted the page itself."""
        refused = self._make_room(key.keyspace, size_bytes, key)
        if refused is None:
            self._add(key.keyspace, size_bytes)
        return refused

    def _make_room(self, keyspace: bytes, more_bytes: int, spare: PageKey | None) -> QuotaExceeded | None:
        self._know(keyspace)
        if not self._book.knows(keyspace):
            return None
        shortfalls = self._book.shortfalls(keyspace, more_bytes)
        if not shortfalls:
            return None
        for shortfall in shortfalls:
            self._give_up(shortfall, spare)
        left = self._book.shortfalls(keyspace, more_bytes)
        if left:
            return QuotaExceeded(f"{left[0].owner} is used up by pages that are in use, pinned or not yet durable")
        return None

    def _give_up(self, shortfall: Shortfall, spare: PageKey | None) -> None:
        """Pages of the shortfall's keyspaces, by the eviction policies of the tiers held to them: copies in staging of
        what is on disk, which lose nothing; then pages on disk; then pages that are in staging alone."""
        used_bytes = self._book.used_for(shortfall)
        aim_bytes = used_bytes - shortfall.size_bytes - used_bytes // _SPARE_PART

        disk = self._disk
        if disk is not None:
            self._give_up_staged(shortfall, aim_bytes, lambda key: key == spare or key not in disk)
        self._give_up_stored(shortfall, aim_bytes, spare)
        self._give_up_staged(shortfall, aim_bytes, lambda key: key == spare)

    def _give_up_staged(self, shortfall: Shortfall, aim_bytes: int, spared: Callable[[PageKey], bool]) -> None:
        with closing(self._ledger.space.victims(shortfall.keyspaces, lambda slot: spared(slot.page.key))) as victims:
            while self._book.used_for(shortfall) > aim_bytes:
                slot = next(victims, None)
                if slot is None:
                    return
                self._ledger.give_up(slot)

    def _give_up_stored(self, shortfall: Shortfall, aim_bytes: int, spare: PageKey | None) -> None:
        """Pages on disk, by the disk's eviction policy held to these keyspaces."""
        disk = self._disk
        over_bytes = self._book.used_for(shortfall) - aim_bytes
        if disk is None or disk.fault or over_bytes <= 0:
            return
        chunks = disk.map.oldest(over_bytes, lambda key: key == spare or disk.is_read(key), shortfall.keyspaces)
        keys = [key for chunk in chunks for key in chunk.keys]
        if keys:
            self._metrics.evicted_pages.labels("disk").inc(len(keys))
            disk.discard(keys)
