"""Reading: each page of a request is leased as soon as it is in staging, wherever it has to come from."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import DeadlineExceeded, KeyspaceUnknown, KvPoolError, SessionUnknown
from kvpool.core.page import PageKey
from kvpool_pagestore.core.keyspaces import Keyspace
from kvpool_pagestore.core.page_table import Grant, PageTable
from kvpool_pagestore.core.sessions import Session, SessionState
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.engine_flights import Flight, Flights, Source
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.ports import RemoteSource

_MAX_JOINS = 8  # of flights that others began and that failed, before an item gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireItem:
    """One page that a reader wants. keyspace: None if the session has not named it; then the page is refused."""

    key: PageKey
    keyspace: Keyspace | None
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
    wanted: AcquireItem
    seal_tried: bool = False
    disk_tried: bool = False
    tried: set[RemoteSource] = field(default_factory=set)
    joins: int = 0
    finished: bool = False
    waiting: bool = False  # counts in the session's window
    error: KvPoolError | None = None


def count_acquired(metrics: PageStoreMetrics, acquired: Sequence[Acquired]) -> None:
    """Count what settled together."""
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
"""Gets items as they settle, each once; True with the last ones. Called on the loop."""


class Acquisition:
    """One request of one session. It ends when all items have settled, at its deadline, or with its session."""

    def __init__(
        self,
        session: Session,
        items: Sequence[AcquireItem],
        table: PageTable,
        flights: Flights,
        metrics: PageStoreMetrics,
        on_acquired: OnAcquired,
        cause: object | None = None,
    ) -> None:
        """cause: trace of the request."""
        self._cause = cause
        self._session = session
        self._items = [_Item(index, wanted) for index, wanted in enumerate(items)]
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
            if item.wanted.keyspace is None:  # never looked for: it may be another tenant's
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
        wanted = item.wanted
        under_way = self._flights.find(wanted.key)
        if under_way is not None:
            item.joins += 1
            return under_way
        assert wanted.keyspace is not None
        unsealed = None if item.seal_tried else self._table.find(wanted.key)
        if unsealed is not None:
            item.seal_tried = True
            return self._flights.seal(unsealed, wanted.keyspace)
        size_bytes = wanted.keyspace.page_bytes(wanted.key.shard)
        on_disk = None if item.disk_tried else self._flights.disk_metadata(wanted.key)
        if on_disk is not None:
            item.disk_tried = True
            return self._flights.promote(PageRecord(wanted.key, size_bytes, on_disk), wanted.keyspace, self._cause)
        sources = [source for source in wanted.sources if source not in item.tried]
        assert wanted.metadata is not None  # sent with the sources
        record = PageRecord(wanted.key, size_bytes, wanted.metadata)
        flight = self._flights.pull(record, wanted.keyspace, sources, self._cause)
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
