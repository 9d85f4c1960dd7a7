"""Pages on their way into staging, from disk or from a peer: one flight per page, however many wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvpool.core.errors import ArenaFull, KvPoolError, PageCorrupt, StaleIncarnation
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey, verify
from kvpool_pagestore.core.keyspaces import Keyspace
from kvpool_pagestore.core.ledger import Ledger
from kvpool_pagestore.core.slots import PageRecord, Slot
from kvpool_pagestore.engine_disk import DiskTier
from kvpool_pagestore.engine_space import ArenaSpace
from kvpool_pagestore.engine_tasks import EngineTasks
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.ports import IndexLink, PageMetadata, PeerPages, PullItem, RemoteSource, Workers

_log = logging.getLogger(__name__)

_PULL_PAGES = 32  # pages of one pull


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
    landed: bool = False  # it arrived, verified; else see error
    error: KvPoolError | None = None


class Flights:
    """Starts flights and joins waiters to them."""

    def __init__(
        self,
        ledger: Ledger,
        space: ArenaSpace,
        disk: DiskTier | None,
        peers: PeerPages,
        index: IndexLink,
        pullers: Workers,
        tasks: EngineTasks,
        metrics: PageStoreMetrics,
        pull_timeout_s: float,
    ) -> None:
        self._ledger = ledger
        self._space = space
        self._disk = disk
        self._peers = peers
        self._index = index
        self._pullers = pullers
        self._tasks = tasks
        self._metrics = metrics
        self._pull_timeout_s = pull_timeout_s
        self._by_key: dict[PageKey, Flight] = {}
        self._to_pull: dict[tuple[RemoteSource, bytes], list[Flight]] = {}

    def find(self, key: PageKey) -> Flight | None:
        """The page's flight that is under way."""
        return self._by_key.get(key)

    def disk_metadata(self, key: PageKey) -> PageMetadata | None:
        """What is kept beside the page on disk; None if it is not there or the disk tier is out of service."""
        return self._disk.map.metadata(key) if self._disk is not None and not self._disk.fault else None

    def promote(self, record: PageRecord, keyspace: Keyspace) -> Flight:
        """Begin to read a page from disk."""
        flight = self._add(record, keyspace, Source.DISK)
        self._tasks.start(self._promote(flight), "promote")
        return flight

    def pull(self, record: PageRecord, keyspace: Keyspace, source: RemoteSource) -> Flight:
        """Begin to fetch a page from a peer; pages asked of one peer in one turn of the loop go together."""
        flight = self._add(record, keyspace, Source.REMOTE)
        if not self._to_pull:
            asyncio.get_running_loop().call_soon(self._start_pulls)
        self._to_pull.setdefault((source, record.key.keyspace), []).append(flight)
        return flight

    # Inside

    def _add(self, record: PageRecord, keyspace: Keyspace, source: Source) -> Flight:
        flight = Flight(record, keyspace, source)
        self._by_key[record.key] = flight
        return flight

    async def _promote(self, flight: Flight) -> None:
        assert self._disk is not None
        slot = await self._slot(flight)
        if isinstance(slot, ArenaFull):
            self._land(flight, None, slot)
            return
        error: KvPoolError | None = PageCorrupt(f"page {flight.record.key} was not read to its end")
        try:
            reach("pagestore.promote.read")
            error = await self._disk.read(flight.record.key, flight.keyspace, self._space.view(slot))
        finally:
            self._land(flight, slot, error)

    def _start_pulls(self) -> None:
        to_pull, self._to_pull = self._to_pull, {}
        for (source, _), flights in to_pull.items():
            for start in range(0, len(flights), _PULL_PAGES):
                self._tasks.start(self._pull(source, flights[start : start + _PULL_PAGES]), "pull")

    async def _pull(self, source: RemoteSource, flights: Sequence[Flight]) -> None:
        going: list[tuple[Flight, Slot]] = []
        for flight in flights:
            slot = await self._slot(flight)
            if isinstance(slot, ArenaFull):
                self._land(flight, None, slot)
            else:
                going.append((flight, slot))
        unsettled = dict(going)
        loop = asyncio.get_running_loop()

        def settle(flight: Flight, error: KvPoolError | None, hit: bool) -> None:
            slot = unsettled.pop(flight, None)
            if slot is not None:
                self._pulled(flight, slot, source, error, hit)

        def on_page(index: int, error: KvPoolError | None, hit: bool) -> None:  # on the pulling thread
            reach("pagestore.pull.received")
            flight, slot = going[index]
            if hit and error is None:
                error = _verify(flight, self._space.view(slot))
            loop.call_soon_threadsafe(settle, flight, error, hit)

        failure = KvPoolError(f"the pull from {source.bulk_endpoint} ended early")
        try:
            if going:
                await self._pullers.run(self._pull_blocking, source, going, on_page)
        except KvPoolError as error:
            failure = error
        finally:
            # Threads hand over by call_soon_threadsafe, in order: what the pull reported has been settled by now.
            for flight in list(unsettled):
                settle(flight, failure, False)

    def _pull_blocking(
        self,
        source: RemoteSource,
        going: Sequence[tuple[Flight, Slot]],
        on_page: Callable[[int, KvPoolError | None, bool], None],
    ) -> None:
        items = [PullItem(key=flight.record.key, destination=self._space.view(slot)) for flight, slot in going]
        self._peers.pull(source, going[0][0].keyspace.spec, items, self._pull_timeout_s, on_page)

    def _pulled(self, flight: Flight, slot: Slot, source: RemoteSource, error: KvPoolError | None, hit: bool) -> None:
        if isinstance(error, PageCorrupt):
            self._metrics.verification_failures.labels("peer").inc()
            _log.error("page %s from %s fails verification", flight.record.key, source.bulk_endpoint)
        if isinstance(error, PageCorrupt | StaleIncarnation) or (error is None and not hit):
            self._index.report_stale(flight.record.key, flight.record.metadata.group_head_hash, source)
        self._land(flight, slot, error, hit)

    async def _slot(self, flight: Flight) -> Slot | ArenaFull:
        return await self._space.find(
            flight.keyspace.tenant,
            flight.record.page_bytes,
            lambda: self._ledger.begin_fill(flight.keyspace.tenant, flight.record),
        )

    def _land(self, flight: Flight, slot: Slot | None, error: KvPoolError | None, hit: bool = True) -> None:
        """Settle the page, then serve everybody who waits, before anything else can take it away."""
        del self._by_key[flight.record.key]
        flight.error = error
        ready: Slot | None = None
        if slot is not None:
            ready = self._ledger.finish_fill(slot, verified=hit and error is None)
        flight.landed = ready is not None
        for on_landed in flight.on_landed:
            on_landed(flight)
        if ready is not None:
            self._ledger.unpin(ready)


def _verify(flight: Flight, page: memoryview) -> PageCorrupt | None:
    keyspace, key = flight.keyspace, flight.record.key
    fault = verify(page, key, keyspace.spec.codec, keyspace.payload_bytes(key.shard))
    return None if fault is None else PageCorrupt(f"page {key} from a peer: {fault}")
