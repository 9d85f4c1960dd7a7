"""The pagestore's engine: everything that sessions, control calls and bulk streams may ask for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from kvpool.core.cluster import NodeLoad
from kvpool.core.errors import (
    Draining,
    InvalidRequest,
    KvPoolError,
    StaleIncarnation,
    StoreFault,
    StoreUnavailable,
)
from kvpool.core.fault_points import reach
from kvpool_pagestore.config import PageStoreConfig
from kvpool_pagestore.core.admission import AdmissionRules, TenantQuotas
from kvpool_pagestore.core.chain_links import ChainLinks
from kvpool_pagestore.core.events import (
    BytesHeld,
    ChunksLeft,
    DiskChanged,
    DiskHealthChanged,
    PageEvents,
    PagesArrived,
    PagesEvicted,
    PagesLeft,
    PagesRead,
    PagesUsed,
    PolicyChanged,
    StagingChanged,
    Subscription,
)
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.policy import PolicyBook
from kvpool_pagestore.engine.arena import ArenaSpace, Preparation, Quarantine
from kvpool_pagestore.engine.commits import Commits, Sealing
from kvpool_pagestore.engine.context import EngineContext, EngineTasks, Staging, Tiers
from kvpool_pagestore.engine.disk_tier import DiskTier, DurableValue
from kvpool_pagestore.engine.drain import Drain
from kvpool_pagestore.engine.fetch import Prefetch
from kvpool_pagestore.engine.inventory import Announcer, Inventory, Listing
from kvpool_pagestore.engine.local_pages import LocalPages
from kvpool_pagestore.engine.pages import PageCalls
from kvpool_pagestore.engine.parts import (
    EngineParts,
    arena_limits,
    disk_tier,
    make_copy_planner,
    make_disk_map,
    make_flights,
    make_retention,
    node_policy,
    replication_limits,
    session_times,
    write_back_limits,
)
from kvpool_pagestore.engine.policies import Policies, Quotas
from kvpool_pagestore.engine.removal import Clearing, Evicting
from kvpool_pagestore.engine.replication import ReplicationManager
from kvpool_pagestore.engine.sessions import PeerSession, PeerSessions, SessionRequest
from kvpool_pagestore.engine.spans import SpanCalls
from kvpool_pagestore.engine.writeback import WriteBack
from kvpool_pagestore.metrics import PageStoreMetrics, StoreGauges

_log = logging.getLogger(__name__)

_INCARNATION = "incarnation"
_GAUGES_TIMEOUT_S = 5.0
_LAST_LOOKS = 20  # for peers that leave just before us
_LAST_LOOK_S = 0.025
_STOP_PASSES_MAX = 5  # one after the other of which none made a page durable
_STOP_PASS_PAUSE_S = 0.2


class PageStoreEngine:
    """One node's pages. Create it and call it on one event loop."""

    def __init__(self, config: PageStoreConfig, parts: EngineParts, metrics: PageStoreMetrics) -> None:
        self._config = config
        self._keyspaces = KeyspaceBook(config.max_keyspaces)
        self._adopting = asyncio.Lock()
        policies = PolicyBook(node_policy(config, has_disk=parts.store is not None))
        self._announcer = Announcer(parts.index)
        self.events = PageEvents()
        self._admission = AdmissionRules()
        self._draining = False
        self._disk_live_bytes = parts.disk_live_bytes
        self.incarnation = 0
        self._tasks = EngineTasks()
        context = EngineContext(
            clock=parts.clock, tasks=self._tasks, events=self.events, metrics=metrics, tracer=parts.tracer
        )
        tiers = self._tiers = self._make_tiers(parts, policies, context)
        self.policies = Policies(policies, self._keyspaces, tiers, parts.index, context)
        self._clearing = Clearing(tiers, self._announcer, self.inventory)
        one_at_a_time = self._clearing.one_at_a_time
        self.evicting = Evicting(self._keyspaces, tiers, self._announcer, one_at_a_time, context)
        self._make_peers(parts, metrics)
        quotas = TenantQuotas.parse(config.tenant_quotas)
        self.quotas = Quotas(quotas, self._keyspaces, self._table, self._disk, context)
        self.retention = make_retention(config, parts, policies, self._keyspaces, tiers, context)
        self._make_calls(parts, policies, tiers, context)
        self._connect(metrics)

    def _make_tiers(self, parts: EngineParts, policies: PolicyBook, context: EngineContext) -> Tiers:
        """Where pages are."""
        workers, links = parts.workers, ChainLinks(self._keyspaces)
        disk_map = make_disk_map(parts, self._keyspaces, links, context)
        self._table = PageTable(
            arena_limits(self._config, parts.first_segment_id),
            self.events,
            self._admission,
            parts.clock.wall_us,
            disk_map,
            lambda keyspace: policies.plan(keyspace).staging_is_tier,
            links,
        )
        self._space = ArenaSpace(self._table, parts.arena, workers.verify, self._tasks, parts.clock)
        sealing = Sealing(self._space, self._keyspaces, workers.seal or workers.verify, context.metrics)
        staging = Staging(table=self._table, space=self._space, sealing=sealing)
        self._disk: DiskTier | None = None
        self._write_back: WriteBack | None = None
        if parts.store is not None and disk_map is not None:
            self._disk = disk_tier(parts, parts.store, disk_map, self._keyspaces, context)
            limits = write_back_limits(self._config)
            self._write_back = WriteBack(limits, staging, self._disk, policies, self._admission, context)
        return Tiers(staging=staging, disk=self._disk, write_back=self._write_back)

    def _make_peers(self, parts: EngineParts, metrics: PageStoreMetrics) -> None:
        """Sessions, and what becomes of the arena when they begin and end."""
        config, workers, table = self._config, parts.workers, self._table
        poll_s = config.quarantine_poll_ms / 1e3
        self._quarantine = Quarantine(table, self._space, parts.arena, workers.verify, parts.clock, poll_s)
        self.preparation = Preparation(
            config.prepared_bytes,
            config.arena_bytes,
            self._space,
            workers.prepare or workers.verify,
            self._quarantine,
            self._tasks,
            parts.clock,
        )
        self.sessions = PeerSessions(
            session_times(config), table, parts.arena, self._keyspaces, self._quarantine, metrics
        )

    def _connect(self, metrics: PageStoreMetrics) -> None:
        """List who may refuse pages, and who handles which event: the only place that joins these parts."""
        # In this order: who asks later is not asked for nothing. A pin is counted, and taken back by the caller if the
        # page does not come; a quota is met by giving pages up, so it is asked when nothing else can refuse the page.
        self._admission.set_rules(
            (self._keyspaces.refusal, self.drain.refusal, self.retention.refusal, self.quotas.refusal)
        )
        # Kinds are independent of each other: each handler changes its own part's state alone, except those that
        # begin work, which look at the page table, consistent by then. Of one kind, in this order.
        subscriptions: list[Subscription[Any]] = [
            # The next admission must see every byte: both count it before anything else can be asked.
            Subscription(BytesHeld, self._keyspaces.count),
            Subscription(BytesHeld, self.quotas.count),
            Subscription(PolicyChanged, self.quotas.take_policy),
            # Pages that leave are unpinned only after all that holds them has let go, so that a page which only moves
            # between tiers keeps its pin.
            Subscription(PagesArrived, self.retention.arrived),
            Subscription(PagesLeft, self.retention.left),
            Subscription(ChunksLeft, self.retention.chunks_left),
            Subscription(DiskChanged, self.quotas.disk_changed),
            # A copy is queued before the index can learn of the page: what the sweep reads there is then queued, too.
            Subscription(StagingChanged, self.replication.staging_changed),
            Subscription(StagingChanged, self._announcer.staging),
            Subscription(DiskChanged, self.replication.disk_changed),
            Subscription(DiskChanged, self._announcer.disk),
            # May make a page dirty and start its write.
            Subscription(PagesUsed, self.policies.write_used),
            Subscription(PagesRead, self.replication.pages_read),
            Subscription(
                PagesEvicted, lambda event: metrics.evicted_pages.labels(event.tier.name.lower()).inc(event.page_count)
            ),
        ]
        if self._disk is not None and self._write_back is not None:
            # Old copies are deleted before pages are written once more.
            subscriptions += (
                Subscription(DiskHealthChanged, self._disk.retry_deletions),
                Subscription(DiskHealthChanged, self._write_back.retry_failed),
            )
        self.events.subscribe(subscriptions)

    def _make_calls(self, parts: EngineParts, policies: PolicyBook, tiers: Tiers, context: EngineContext) -> None:
        """What sessions and other nodes ask for, on top of the tiers."""
        config, metrics, verifiers = self._config, context.metrics, parts.workers.verify
        local = self._local = LocalPages(tiers, self._keyspaces, context)
        planner = make_copy_planner(config, parts, local, policies, context)
        self.drain = Drain(planner, DurableValue(self._disk, "draining", self._tasks))
        served_nodes = DurableValue(self._disk, "settled-nodes", self._tasks)
        self.replication = ReplicationManager(replication_limits(config), planner, policies, served_nodes, context)
        flights = make_flights(config, parts, tiers, policies, context)
        commits = Commits(tiers, policies, self._keyspaces, verifiers, context)
        self.pages = PageCalls(tiers, flights, commits, self.retention, local, context)
        self.spans = SpanCalls(tiers, self.retention, self.pages, context)
        self.prefetch = Prefetch(self._table, flights, self._keyspaces, metrics, config.arena_bytes)
        self.listing = Listing(self._table, self._disk, self._keyspaces, self.replication.most_read, parts.clock)

    # Life

    async def load(self, old_sessions: Mapping[bytes, Mapping[int, int]]) -> int:
        """Take over what an earlier process left; its incarnation, 0 if unknown. Raises StoreFault.

        old_sessions: sizes, by id, of the segments that the peer of each may still map.
        """
        self._quarantine.adopt_old(old_sessions)
        if self._disk is None:
            return 0
        await self.policies.load()
        await self._disk.load()
        self.policies.repeat()  # the quotas of keyspaces that only the disk knew
        await self.quotas.enforce()
        await self.drain.load()
        await self.replication.load()
        value = await self._disk.load_value(_INCARNATION)
        return int.from_bytes(value, "little") if value is not None else 0

    async def adopt_incarnation(self, incarnation: int) -> None:
        """Serve under an incarnation from now on; it is durable before it is published. Raises StoreFault."""
        async with self._adopting:  # one after the other: what was adopted last is served, and on disk
            if self._disk is not None:
                reach("pagestore.register.granted")
                await self._disk.save_value(_INCARNATION, incarnation.to_bytes(8, "little"))
                reach("pagestore.incarnation.saved")
            self.incarnation = incarnation

    async def stop(self, drain_s: float) -> bool:
        """Take no new work, end sessions, make dirty pages durable. True if no peer can map the arena any more."""
        self._draining = True
        await self.preparation.stop()
        self.retention.stop()
        await self.replication.stop()
        await self.drain.stop()
        await self.sessions.stop()
        try:
            async with asyncio.timeout(drain_s):
                await self._flush_at_stop()
        except TimeoutError:
            _log.error("%d pages are lost with this process: no time left to write them", self.dirty_page_count)
        except KvPoolError as error:
            _log.error("%d pages are lost with this process: %s", self.dirty_page_count, error)
        return await self._end_quarantine()

    async def _flush_at_stop(self) -> None:
        """Make dirty pages durable, also those of a commit that was being verified and adds them only now.

        Raises StoreFault after some passes of which none made a page durable.
        """
        failed_passes = 0
        while self.dirty_page_count or (self._write_back is not None and self._write_back.has_postponed):
            durable_count, _ = await self._local.flush()
            failed_passes = 0 if durable_count else failed_passes + 1
            if failed_passes >= _STOP_PASSES_MAX:
                raise StoreFault("the disk tier takes none of them")
            if not durable_count:
                await asyncio.sleep(_STOP_PASS_PAUSE_S)

    async def close(self) -> None:
        """Wait for what runs and close the disk tier. Call after `stop`, with peers closed and no callers left."""
        await self.preparation.stop()
        if self._write_back is not None:
            self._write_back.stop()
        await self._tasks.drain()
        if self._disk is not None:
            await self._disk.close()

    # Calls

    def check_incarnation(self, expected: int) -> None:
        """0 means any. Raises StaleIncarnation, Draining."""
        if self._draining:
            raise Draining("the pagestore is shutting down")
        if expected not in (0, self.incarnation):
            raise StaleIncarnation(f"incarnation {self.incarnation} is running, {expected} was expected")

    async def open_session(self, request: SessionRequest, expected_incarnation: int) -> PeerSession:
        """Raises StaleIncarnation, Draining, TenantDenied, InvalidRequest, Overloaded."""
        self.check_incarnation(expected_incarnation)
        named = self.sessions.admit(request)  # before the index is asked of ids that no keyspace has
        await self.policies.learn([one.keyspace for one in named])
        return await self.sessions.open(request, named)

    def prepare(self, peer: PeerSession, share_bytes: int) -> tuple[list[int], bool]:
        """Assign prepared segments to a session's tenant, to be mapped ahead of use; see SegmentTable.assign.

        Returns all segments of the tenant, and whether asking again soon brings more. Raises SessionUnknown, and
        InvalidRequest if the session maps nothing.
        """
        peer.check_live()
        if not peer.token:
            raise InvalidRequest("prepare: the session was opened without wants_arena")
        if share_bytes < 0:
            raise InvalidRequest(f"prepare: share_bytes must be >= 0, got {share_bytes}")
        tenant = peer.session.tenant
        alone = all(one.tenant == tenant for one in self._keyspaces.all())
        segments = self._table.space.assign(tenant, share_bytes, alone=alone)
        is_enough = bool(share_bytes) and sum(one.size_bytes for one in segments) >= share_bytes
        return [one.segment_id for one in segments], self.preparation.goes_on and not is_enough

    async def flush(self, tenant: str, keyspace: bytes) -> tuple[int, int]:
        """Wait until what is dirty now is durable, and the index knows: pages that became durable, pages that failed.

        keyspace: empty means all of the tenant's. Raises StoreFault.
        """
        chosen = set(self._chosen(tenant, keyspace))
        counts = await self._write_back.flush(chosen) if self._write_back is not None else (0, 0)
        try:
            await self._announcer.wait_announced()
        except StoreUnavailable as error:
            _log.warning("flushed, but the index does not know yet: %s", error)
        return counts

    async def clear(self, tenant: str, keyspace: bytes) -> int:
        """Drop pages from staging, disk and index; how many. keyspace: empty means all of the tenant's."""
        return await self._tasks.finish(self._clearing.clear(self._chosen(tenant, keyspace)), "clear")

    @property
    def tiers(self) -> Tiers:
        """Every place where this node has pages, to look at; pages are changed by the engine's calls alone."""
        return self._tiers

    def gauges(self) -> StoreGauges:
        """What is true now."""
        table, space, disk = self._table, self._table.space, self._disk
        if disk is not None:
            disk.count_changes()
        return StoreGauges(
            arena_capacity_bytes=space.capacity_bytes,
            arena_segment_bytes=space.segment_total_bytes,
            arena_used_bytes=space.used_bytes,
            arena_quarantined_bytes=space.quarantined_bytes,
            arena_dirty_bytes=table.dirty_bytes,
            arena_prepared_bytes=self.preparation.prepared_bytes,
            arena_prepare_seconds=self.preparation.took_s,
            staging_pages=table.ready_count,
            arriving_pages=self.pages.flight_count,
            disk_capacity_bytes=self._config.disk_bytes if disk is not None else 0,
            disk_used_bytes=disk.used_bytes if disk is not None else 0,
            disk_pages=disk.map.page_count if disk is not None else 0,
            disk_writing_bytes=disk.promised_bytes if disk is not None else 0,
            disk_faulty=int(bool(self.disk_fault)),
            disk_state=int(disk.health.state) if disk is not None else 0,
            sessions=table.sessions.live_count,
            quarantined_sessions=len(table.sessions.ended),
            leases=sum(one.lease_count for one in table.sessions.live),
            pinned_bytes=self.retention.pinned_bytes,
            write_back_oldest_seconds=self._write_back.oldest_s if self._write_back is not None else 0.0,
            write_back_waiting_bytes=self._write_back.waiting_bytes if self._write_back is not None else 0,
            replica_queue_chunks=self.replication.waiting_chunks,
            draining=int(self.drain.refuses_pages),
        )

    @property
    def dirty_page_count(self) -> int:
        return self._write_back.dirty_count if self._write_back is not None else 0

    @property
    def disk_fault(self) -> str:
        """Why the disk tier is out of service; empty if it works or there is none."""
        return self._disk.fault if self._disk is not None else ""

    def load_figures(self) -> NodeLoad:
        """What a lease renewal reports."""
        gauges = self.gauges()
        return NodeLoad(
            arena_capacity_bytes=gauges.arena_capacity_bytes,
            arena_used_bytes=gauges.arena_used_bytes,
            disk_capacity_bytes=gauges.disk_capacity_bytes,
            disk_used_bytes=gauges.disk_used_bytes,
            page_count=gauges.staging_pages + gauges.disk_pages,
            disk_free_bytes=max(0, self._disk_live_bytes - self._disk.map.size_bytes) if self._disk else 0,
        )

    @property
    def inventory(self) -> Inventory:
        """What this node holds, as the index is to know it."""
        return Inventory(self._table, self._keyspaces)

    def read_gauges(self, loop: asyncio.AbstractEventLoop) -> StoreGauges:
        """`gauges` for another thread; `loop` is the engine's."""

        async def read() -> StoreGauges:
            return self.gauges()

        return asyncio.run_coroutine_threadsafe(read(), loop).result(_GAUGES_TIMEOUT_S)

    # Inside

    def _chosen(self, tenant: str, keyspace: bytes) -> list[bytes]:
        """The tenant's keyspaces, or the one named; none if it has no pages here or is another tenant's."""
        return [one.keyspace for one in self._keyspaces.of_tenant(tenant) if keyspace in (b"", one.keyspace)]

    async def _end_quarantine(self) -> bool:
        """Wait a moment for peers that are just going. True if none is left that may map the arena."""
        for _ in range(_LAST_LOOKS):
            if await self._quarantine.all_gone():
                break
            await asyncio.sleep(_LAST_LOOK_S)
        await self._quarantine.stop()
        return await self._quarantine.all_gone()
