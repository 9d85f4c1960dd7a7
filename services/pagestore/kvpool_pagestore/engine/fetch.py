"""Reading: each page of a request is leased as soon as it is in staging, wherever it has to come from.

A page on its way, from disk or from a peer, has one flight, however many wait for it. A page in staging that is not
sealed has a flight too, for readers that do not trust the arena: it waits to be sealed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvpool.core.cluster import PageMetadata, RemoteSource
from kvpool.core.errors import DeadlineExceeded, KeyspaceUnknown, KvPoolError, PageCorrupt, PageMissing, SessionUnknown
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey
from kvpool.core.tracing import BYTES, TIER
from kvpool_pagestore.config import PROMOTION_SHARE
from kvpool_pagestore.core.events import PagesArrived
from kvpool_pagestore.core.keyspaces import Keyspace, KeyspaceBook
from kvpool_pagestore.core.page_table import Grant, PageTable
from kvpool_pagestore.core.policy import PolicyBook
from kvpool_pagestore.core.sessions import SessionState
from kvpool_pagestore.core.slots import PageRecord, Slot, slot_bytes_for
from kvpool_pagestore.engine.context import EngineContext, Staging
from kvpool_pagestore.engine.disk_tier import DiskTier
from kvpool_pagestore.engine.pulls import PagePull, Pulls
from kvpool_pagestore.metrics import PageStoreMetrics

if TYPE_CHECKING:  # it cancels what is defined here
    from kvpool_pagestore.engine.sessions import PeerSession


class Source(Enum):
    """Where the bytes of a page were when it was asked for."""

    STAGING = "staging"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(slots=True, eq=False)
class Flight:
    """One page on its way. `on_landed` are called once each, on the loop, while the page cannot be evicted."""

    record: PageRecord
    keyspace: Keyspace
    source: Source
    on_landed: list[Callable[[Flight], None]] = field(default_factory=list)
    tried: set[RemoteSource] = field(default_factory=set)  # sources that were asked
    landed: bool = False  # it arrived, verified or sealed; else see error
    error: KvPoolError | None = None


class Flights:
    """Starts flights and joins waiters to them."""

    def __init__(
        self,
        staging: Staging,
        disk: DiskTier | None,
        pulls: Pulls,
        policies: PolicyBook,
        context: EngineContext,
    ) -> None:
        self._tracer = context.tracer
        self._policies = policies
        self._table = staging.table
        self._space = staging.space
        self._sealing = staging.sealing
        self._disk = disk
        self._pulls = pulls
        self._events = context.events
        self._tasks = context.tasks
        self._by_key: dict[PageKey, Flight] = {}

    @property
    def count(self) -> int:
        """Flights that are under way."""
        return len(self._by_key)

    def find(self, key: PageKey) -> Flight | None:
        """The page's flight that is under way."""
        return self._by_key.get(key)

    def disk_metadata(self, key: PageKey) -> PageMetadata | None:
        """What is kept beside the page on disk; None if it is not there or the disk tier is out of service."""
        return self._disk.map.metadata(key) if self._disk is not None and self._disk.is_readable else None

    def promote(self, record: PageRecord, keyspace: Keyspace, cause: object | None = None) -> Flight:
        """Begin to read a page from disk. cause: trace of the request that asks for it."""
        flight = self._add(record, keyspace, Source.DISK)
        self._tasks.start(self._promote(flight, cause), "promote")
        return flight

    def seal(self, slot: Slot, keyspace: Keyspace) -> Flight:
        """Begin to seal a page that is in staging."""
        flight = self._add(slot.page, keyspace, Source.STAGING)
        self._table.pin(slot)
        self._tasks.start(self._seal(flight, slot), "seal")
        return flight

    def pull(
        self,
        record: PageRecord,
        keyspace: Keyspace,
        sources: Sequence[RemoteSource],
        cause: object | None = None,
    ) -> Flight:
        """Begin to fetch a page from the first of its sources, and from the next one if that brings nothing.

        A source that fails ends the flight, unless the next one was asked by then; `tried` says which were. cause:
        trace of the request that asks for it.
        """
        flight = self._add(record, keyspace, Source.REMOTE)

        def on_done(page: PagePull, slot: Slot | None, error: KvPoolError | None, hit: bool) -> None:
            self._land(flight, slot, error, hit)

        pulled = PagePull(record, keyspace, list(dict.fromkeys(sources)), on_done, tried=flight.tried, cause=cause)
        self._pulls.start(pulled)
        return flight

    # Inside

    def _add(self, record: PageRecord, keyspace: Keyspace, source: Source) -> Flight:
        flight = Flight(record, keyspace, source)
        self._by_key[record.key] = flight
        return flight

    async def _seal(self, flight: Flight, slot: Slot) -> None:
        (flight.error,) = await self._sealing.seal([slot])
        del self._by_key[flight.record.key]
        flight.landed = flight.error is None
        for on_landed in flight.on_landed:
            on_landed(flight)
        self._table.unpin(slot)

    async def _promote(self, flight: Flight, cause: object | None) -> None:
        with self._tracer.part_of([cause], "pagestore.promote") as span:
            span.set({BYTES: flight.record.page_bytes, TIER: flight.source.value})
            await self._read(flight)
            if flight.error is not None:
                span.fail(flight.error)

    async def _read(self, flight: Flight) -> None:
        assert self._disk is not None
        slot: Slot | None = None
        error: KvPoolError | None = PageCorrupt(f"page {flight.record.key} was not read to its end")
        try:  # whatever goes wrong, the flight ends: the next reader of the page begins another one
            found = await self._slot(flight)
            if isinstance(found, KvPoolError):
                error = found
                return
            slot = found
            if flight.record.key not in self._disk:  # its bytes may be there still, and it must not come back
                error = PageMissing(f"page {flight.record.key} was given up while its slot was sought")
                return
            reach("pagestore.promote.read")
            error = await self._disk.read(flight.record.key, flight.keyspace, self._space.view(slot))
        finally:
            self._land(flight, slot, error)

    async def _slot(self, flight: Flight) -> Slot | KvPoolError:
        return await self._space.find(
            flight.keyspace.tenant,
            flight.record.page_bytes,
            lambda: self._table.begin_fill(flight.keyspace.tenant, flight.record),
        )

    def _land(self, flight: Flight, slot: Slot | None, error: KvPoolError | None, hit: bool = True) -> None:
        """Make the page visible, then serve all who wait, before anything else can evict it."""
        del self._by_key[flight.record.key]
        flight.error = error
        ready: Slot | None = None
        if slot is not None:
            ready = self._table.finish_fill(slot, verified=hit and error is None)
        if ready is not None and ready is slot:
            self._events.publish(PagesArrived((ready.page,)))
        if ready is not None and ready is slot and not self._policies.plan(flight.record.key.keyspace).stays_in_staging:
            self._table.free_on_release(ready)
        flight.landed = ready is not None
        for on_landed in flight.on_landed:
            on_landed(flight)
        if ready is not None:
            self._table.unpin(ready)


_MAX_JOINS = 8  # of flights that others began and that failed, before an item gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """One page that a reader wants."""

    key: PageKey
    metadata: PageMetadata | None = None  # needed if there are sources
    sources: tuple[RemoteSource, ...] = ()  # best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """What became of one item. grant None: a miss, with a cause if something failed."""

    item_index: int
    grant: Grant | None = None
    source: Source | None = None
    error: KvPoolError | None = None


@dataclass(slots=True, eq=False)
class _Item:
    """Progress of one item."""

    index: int
    wanted: PageRequest
    keyspace: Keyspace | None  # None: the session has not named it, and the page is refused
    seal_tried: bool = False
    disk_tried: bool = False
    tried: set[RemoteSource] = field(default_factory=set)
    joins: int = 0
    finished: bool = False
    waiting: bool = False  # counts in the session's window
    error: KvPoolError | None = None


def count_acquired(metrics: PageStoreMetrics, acquired: Sequence[Acquired]) -> None:
    """Count items that were answered together."""
    size_bytes: dict[Source, list[int]] = {}
    missed: Counter[str] = Counter()
    for one in acquired:
        if one.grant is not None and one.source is not None:
            size_bytes.setdefault(one.source, []).append(one.grant.slot.page.page_bytes)
        else:
            missed[one.error.reason if one.error is not None else "ABSENT"] += 1
    for source, sizes in size_bytes.items():
        metrics.acquired_pages.labels(source.value).inc(len(sizes))
        metrics.acquired_bytes.labels(source.value).inc(sum(sizes))
    for reason, count in missed.items():
        metrics.missed_pages.labels(reason).inc(count)


OnAcquired = Callable[[Sequence[Acquired], bool], None]
"""Gets items as they are answered, each once; True with the last ones. Called on the loop."""


class Acquisition:
    """One request of one session. It ends when all items are answered, at its deadline, or with its session."""

    def __init__(
        self,
        peer: PeerSession,
        items: Sequence[PageRequest],
        table: PageTable,
        flights: Flights,
        metrics: PageStoreMetrics,
        on_acquired: OnAcquired,
        cause: object | None = None,
    ) -> None:
        """cause: trace of the request."""
        self._cause = cause
        self._session = peer.session
        self._items = [_Item(index, one, peer.keyspace(one.key.keyspace)) for index, one in enumerate(items)]
        self._table = table
        self._flights = flights
        self._metrics = metrics
        self._on_acquired = on_acquired
        self._ready: list[Acquired] = []
        self._open_count = len(self._items)
        self._flush_scheduled = False
        self._deadline: asyncio.TimerHandle | None = None

    def start(self, wait_s: float) -> None:
        """Serve what is here at once and begin to fetch the rest."""
        if not self._items:
            self._on_acquired((), True)
        for item in self._items:
            if item.keyspace is None:  # not searched for: it may be another tenant's
                item.error = KeyspaceUnknown(f"the session has not named keyspace {item.wanted.key.keyspace.hex()}")
                self._finish(item, None, Source.STAGING)
            else:
                self._advance(item, Source.STAGING)
        if self._open_count:
            self._deadline = asyncio.get_running_loop().call_later(wait_s, self._expire, wait_s)
        self._flush()

    def cancel(self) -> None:
        """The session is over: nothing is granted any more."""
        self._give_up(SessionUnknown("the session has ended"))

    # Inside

    def _advance(self, item: _Item, found_at: Source) -> None:
        """Lease the page, or take the next way to get it, or call it a miss."""
        key = item.wanted.key
        answer = self._table.acquire(self._session, key)
        if isinstance(answer, Grant):
            self._finish(item, answer, found_at)
        elif answer is not None:
            item.error = answer
            self._finish(item, None, found_at)
        elif not self._may_come(item):
            self._finish(item, None, found_at)
        elif (busy := self._table.read_window(self._session)) is not None:
            item.error = busy
            self._finish(item, None, found_at)
        else:
            item.waiting = True
            self._session.waiting += 1
            self._flight(item).on_landed.append(lambda landed: self._landed(item, landed))

    def _may_come(self, item: _Item) -> bool:
        """Whether there is a way left to get the page."""
        wanted = item.wanted
        if self._flights.find(wanted.key) is not None:
            return item.joins < _MAX_JOINS
        if not item.seal_tried and self._table.find(wanted.key) is not None:
            return True  # not sealed, else it would have been leased
        if not item.disk_tried and self._flights.disk_metadata(wanted.key) is not None:
            return True
        return any(source not in item.tried for source in wanted.sources)

    def _flight(self, item: _Item) -> Flight:
        """Join the page's flight, or begin the next one; only after `_may_come`."""
        wanted, keyspace = item.wanted, item.keyspace
        under_way = self._flights.find(wanted.key)
        if under_way is not None:
            item.joins += 1
            return under_way
        assert keyspace is not None  # else the page was refused
        unsealed = None if item.seal_tried else self._table.find(wanted.key)
        if unsealed is not None:
            item.seal_tried = True
            return self._flights.seal(unsealed, keyspace)
        size_bytes = keyspace.page_bytes(wanted.key.shard)
        on_disk = None if item.disk_tried else self._flights.disk_metadata(wanted.key)
        if on_disk is not None:
            item.disk_tried = True
            return self._flights.promote(PageRecord(wanted.key, size_bytes, on_disk), keyspace, self._cause)
        sources = [source for source in wanted.sources if source not in item.tried]
        assert wanted.metadata is not None  # sent with the sources
        record = PageRecord(wanted.key, size_bytes, wanted.metadata)
        flight = self._flights.pull(record, keyspace, sources, self._cause)
        item.tried.add(sources[0])
        flight.on_landed.append(lambda landed: item.tried.update(landed.tried))
        return flight

    def _landed(self, item: _Item, flight: Flight) -> None:
        if item.finished:
            return
        self._stop_waiting(item)
        if flight.error is not None:
            item.error = flight.error
        self._advance(item, flight.source)

    def _finish(self, item: _Item, grant: Grant | None, source: Source) -> None:
        item.finished = True
        self._stop_waiting(item)
        self._open_count -= 1
        if grant is not None:
            self._ready.append(Acquired(item_index=item.index, grant=grant, source=source))
        else:
            self._ready.append(Acquired(item_index=item.index, error=item.error))
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _stop_waiting(self, item: _Item) -> None:
        if item.waiting:
            item.waiting = False
            self._session.waiting -= 1

    def _expire(self, wait_s: float) -> None:
        self._give_up(DeadlineExceeded(f"the page was not ready within {wait_s:g} s"))

    def _give_up(self, error: KvPoolError) -> None:
        for item in self._items:
            if not item.finished:
                item.error = error
                self._finish(item, None, Source.STAGING)
        self._flush()

    def _flush(self) -> None:
        self._flush_scheduled = False
        if not self._ready:
            return
        ready, self._ready = self._ready, []
        count_acquired(self._metrics, ready)
        final = not self._open_count
        if final and self._deadline is not None:
            self._deadline.cancel()
        if self._session.state is SessionState.LIVE:
            self._on_acquired(ready, final)


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
