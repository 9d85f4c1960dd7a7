"""Pages on their way to readers, from disk or from a peer into staging: one flight per page, however many wait for it.

A page in staging that is not sealed has a flight too, for readers that do not trust the arena: it waits to be sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvpool.core.errors import KvPoolError, PageCorrupt, PageMissing
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey
from kvpool.core.tracing import BYTES, TIER
from kvpool_pagestore.core.events import PagesArrived
from kvpool_pagestore.core.keyspaces import Keyspace
from kvpool_pagestore.core.policy import PolicyBook
from kvpool_pagestore.core.slots import PageRecord, Slot
from kvpool_pagestore.engine_context import EngineContext, Staging
from kvpool_pagestore.engine_disk import DiskTier
from kvpool_pagestore.engine_pulls import Pulled, Pulls
from kvpool_pagestore.ports import PageMetadata, RemoteSource


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

        def settled(page: Pulled, slot: Slot | None, error: KvPoolError | None, hit: bool) -> None:
            self._land(flight, slot, error, hit)

        pulled = Pulled(record, keyspace, list(dict.fromkeys(sources)), settled, tried=flight.tried, cause=cause)
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
        """Settle the page, then serve everybody who waits, before anything else can take it away."""
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
