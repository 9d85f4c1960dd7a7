"""Prefetching: pages of the disk come to staging before anybody asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.core.page import PageKey
from kvpool_pagestore.config import PROMOTION_SHARE
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.slots import PageRecord, slot_bytes_for
from kvpool_pagestore.engine_flights import Flight, Flights
from kvpool_pagestore.metrics import PageStoreMetrics


class Prefetch:
    """Starts promotions ahead of any reader; those under way take at most the share of the arena kept for promotion."""

    def __init__(
        self, table: PageTable, flights: Flights, keyspaces: KeyspaceBook, metrics: PageStoreMetrics, arena_bytes: int
    ) -> None:
        self._table = table
        self._flights = flights
        self._keyspaces = keyspaces
        self._metrics = metrics
        self._limit_bytes = arena_bytes // PROMOTION_SHARE
        self._under_way_bytes = 0

    def start(self, tenant: str, keys: Sequence[PageKey]) -> int:
        """Promote pages of the tenant that are on disk and not in staging; how many were begun."""
        return sum(self._start_one(tenant, key) for key in dict.fromkeys(keys))

    def _start_one(self, tenant: str, key: PageKey) -> bool:
        keyspace = self._keyspaces.find(key.keyspace)
        if keyspace is None or keyspace.tenant != tenant or key.shard >= keyspace.grid.shard_count:
            return False
        metadata = self._flights.disk_metadata(key)
        if metadata is None or self._table.find(key) is not None or self._flights.find(key) is not None:
            return False
        page_bytes = keyspace.page_bytes(key.shard)
        slot_bytes = slot_bytes_for(page_bytes)
        if self._under_way_bytes + slot_bytes > self._limit_bytes:
            return False
        self._under_way_bytes += slot_bytes

        def landed(flight: Flight) -> None:
            self._under_way_bytes -= slot_bytes
            if flight.landed:
                self._metrics.prefetched_pages.inc()
                self._metrics.prefetched_bytes.inc(page_bytes)

        self._flights.promote(PageRecord(key, page_bytes, metadata), keyspace).on_landed.append(landed)
        return True
