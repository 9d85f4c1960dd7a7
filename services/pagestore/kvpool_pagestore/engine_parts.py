"""What the engine is put together from."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.clock import Clock
from kvpool.core.policy import StagingMode, WritePolicy, option_of
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool_pagestore.config import PageStoreConfig
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.ledger import Ledger, LedgerLimits
from kvpool_pagestore.core.policy import NodePolicy, PolicyBook
from kvpool_pagestore.core.quota import TenantQuotas
from kvpool_pagestore.core.writeback import WriteBackLimits
from kvpool_pagestore.engine_copy_planner import CopyPlanner
from kvpool_pagestore.engine_disk import DiskTier
from kvpool_pagestore.engine_flights import Flights
from kvpool_pagestore.engine_local_pages import LocalPages
from kvpool_pagestore.engine_locations import Announcer
from kvpool_pagestore.engine_pulls import PullCaller, PullLimits, Pulls
from kvpool_pagestore.engine_push import PagePusher
from kvpool_pagestore.engine_quota import Quotas
from kvpool_pagestore.engine_replication import ReplicationLimits
from kvpool_pagestore.engine_retention import Retained
from kvpool_pagestore.engine_sealing import Sealing
from kvpool_pagestore.engine_sessions import SessionTimes
from kvpool_pagestore.engine_space import ArenaSpace
from kvpool_pagestore.engine_tasks import EngineTasks
from kvpool_pagestore.engine_writeback import WriteBack
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.ports import NO_PLACEMENT, Arena, IndexLink, PageStore, PeerPages, Placement, Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkers:
    """Threads for blocking calls, apart so that none of them waits for another kind."""

    verify: Workers
    read: Workers
    write: Workers
    pull: Workers
    push: Workers | None = None  # None: pages are sent by the threads that pull
    seal: Workers | None = None  # None: by the threads that verify
    prepare: Workers | None = None  # None: the arena's memory is put in place by the threads that verify


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What the engine works with. store: None means no disk tier; an opened one otherwise."""

    arena: Arena
    store: PageStore | None
    disk_live_bytes: int  # page bytes that may be live on disk within the configured capacity
    peers: PeerPages
    index: IndexLink
    workers: EngineWorkers
    clock: Clock
    first_segment_id: int
    placement: Placement = NO_PLACEMENT
    tracer: Tracer = NO_TRACER


def ledger_limits(config: PageStoreConfig, first_segment_id: int) -> LedgerLimits:
    return LedgerLimits(
        arena_bytes=config.arena_bytes,
        segment_bytes=config.segment_bytes,
        first_segment_id=first_segment_id,
        writer_bytes=config.writer_bytes,
        grace_s=config.quarantine_grace_ms / 1e3,
    )


def write_back_limits(config: PageStoreConfig) -> WriteBackLimits:
    return WriteBackLimits(
        batch_pages=config.batch_pages,
        batch_bytes=config.batch_bytes,
        linger_s=config.linger_ms / 1e3,
        max_batches=config.write_threads,
        retry_first_s=config.write_retry_ms / 1e3,
        retry_last_s=config.write_retry_max_ms / 1e3,
        bytes_per_s=config.write_back_bytes_per_s,
    )


def node_policy(config: PageStoreConfig, *, has_disk: bool) -> NodePolicy:
    return NodePolicy(
        write_policy=option_of(WritePolicy, config.write_policy),
        staging=option_of(StagingMode, config.staging),
        selective_min_uses=config.selective_min_uses,
        selective_min_tokens=config.selective_min_tokens,
        has_disk=has_disk,
    )


def make_retained(
    config: PageStoreConfig,
    parts: EngineParts,
    policies: PolicyBook,
    keyspaces: KeyspaceBook,
    ledger: Ledger,
    disk: DiskTier | None,
    metrics: PageStoreMetrics,
) -> Retained:
    tier_bytes = parts.disk_live_bytes if disk is not None else config.arena_bytes
    pinned_bytes = int(config.max_pinned_share * tier_bytes)
    return Retained(policies, keyspaces, ledger, disk, metrics, parts.clock, pinned_bytes)


def make_quotas(
    config: PageStoreConfig,
    keyspaces: KeyspaceBook,
    ledger: Ledger,
    disk: DiskTier | None,
    write_back: WriteBack | None,
    tasks: EngineTasks,
    metrics: PageStoreMetrics,
) -> Quotas:
    return Quotas(TenantQuotas.parse(config.tenant_quotas), keyspaces, ledger, disk, write_back, tasks, metrics)


def session_times(config: PageStoreConfig) -> SessionTimes:
    return SessionTimes(
        max_sessions=config.max_sessions,
        max_leases=config.max_leases,
    )


def replication_limits(config: PageStoreConfig) -> ReplicationLimits:
    return ReplicationLimits(
        queue_chunks=config.replica_queue_chunks,
        groups_at_once=2 * config.push_threads,
        linger_s=config.replica_linger_ms / 1e3,
        hot_uses_per_minute=config.hot_uses_per_minute,
        hot_copies=config.hot_copies,
        sweep_interval_s=config.sweep_interval_ms / 1e3,
        rebalance_bytes_per_s=config.rebalance_bytes_per_s,
    )


def make_copy_planner(
    config: PageStoreConfig,
    parts: EngineParts,
    local: LocalPages,
    policies: PolicyBook,
    tasks: EngineTasks,
    metrics: PageStoreMetrics,
) -> CopyPlanner:
    workers, timeout_s = parts.workers.push or parts.workers.pull, config.push_timeout_ms / 1e3
    pusher = PagePusher(local, parts.peers, workers, tasks, metrics, timeout_s)
    return CopyPlanner(parts.placement, pusher, local, policies, config.replication_factor, parts.clock)


def disk_tier(
    config: PageStoreConfig,
    parts: EngineParts,
    store: PageStore,
    keyspaces: KeyspaceBook,
    announcer: Announcer,
    tasks: EngineTasks,
    metrics: PageStoreMetrics,
) -> DiskTier:
    workers = parts.workers
    tier = DiskTier(store, parts.disk_live_bytes, keyspaces, announcer, workers.read, workers.write, tasks, metrics)
    tier.map.now_us = parts.clock.wall_us
    return tier


def make_flights(
    config: PageStoreConfig,
    parts: EngineParts,
    ledger: Ledger,
    space: ArenaSpace,
    sealing: Sealing,
    disk: DiskTier | None,
    policies: PolicyBook,
    tasks: EngineTasks,
    metrics: PageStoreMetrics,
) -> Flights:
    limits = PullLimits(
        stall_s=config.pull_stall_ms / 1e3,
        hedge_s=config.hedge_ms / 1e3,
        streams_per_peer=config.pull_streams_per_peer,
        moving_streams=config.pull_threads,
    )
    caller = PullCaller(parts.peers, parts.workers.pull, space, config.pull_timeout_ms / 1e3, parts.tracer)
    pulls = Pulls(limits, ledger, space, caller, parts.index, tasks, metrics, parts.clock)
    return Flights(ledger, space, sealing, disk, pulls, policies, tasks, parts.tracer)
