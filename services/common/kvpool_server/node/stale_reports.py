"""Reports of wrong locations on their way to the index: best effort, bounded, never waited for."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from kvpool.client.index import IndexClient
from kvpool.client.retry import TRANSIENT, Backoff
from kvpool.core.cluster import Location, RemoteSource, StaleLocation
from kvpool.core.errors import DeadlineExceeded, KvPoolError, StoreUnavailable
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey

_log = logging.getLogger(__name__)
_LATER: tuple[type[KvPoolError], ...] = (*TRANSIENT, StoreUnavailable, DeadlineExceeded)


class StaleReports:
    """A queue that forgets its oldest reports when it is full: an unreported location costs each reader one miss."""

    def __init__(self, index: IndexClient, *, pending_max: int, batch_max: int, linger_s: float) -> None:
        self._index = index
        self._pending: deque[StaleLocation] = deque(maxlen=pending_max)
        self._batch_max = batch_max
        self._linger_s = linger_s
        self._work = asyncio.Event()

    @property
    def pending_count(self) -> int:
        """Reports that were not sent yet."""
        return len(self._pending)

    def limit_items(self, items_max: int) -> None:
        """Send at most so many at once from now on."""
        self._batch_max = min(self._batch_max, items_max)

    def add_page(self, key: PageKey, group_head_hash: bytes, source: RemoteSource) -> None:
        """Queue a report that `source` did not hold a page that it was said to hold, in any tier."""
        for tier in (Tier.STAGING, Tier.DISK):
            place = Location(node_id=source.node_id, incarnation=source.incarnation, tier=tier, shards=1 << key.shard)
            self.add(
                StaleLocation(
                    keyspace=key.keyspace, chunk_hash=key.chunk_hash, group_head_hash=group_head_hash, location=place
                )
            )

    def add(self, location: StaleLocation) -> None:
        """Queue a report."""
        self._pending.append(location)
        self._work.set()

    async def run(self) -> None:
        """Send reports until cancelled."""
        config = self._index.endpoints.config
        backoff = Backoff(config.backoff_initial_s, config.backoff_max_s)
        while True:
            await self._work.wait()
            self._work.clear()
            await asyncio.sleep(self._linger_s)
            while self._pending:
                batch = [self._pending.popleft() for _ in range(min(self._batch_max, len(self._pending)))]
                try:
                    await self._index.report_stale(batch)
                    backoff.reset()
                except _LATER:
                    room = (self._pending.maxlen or 0) - len(self._pending)
                    self._pending.extendleft(reversed(batch[-room:] if room else []))
                    await asyncio.sleep(backoff.next_s())
                except KvPoolError as error:
                    _log.warning("the index refuses %d reports of stale locations: %s", len(batch), error)
