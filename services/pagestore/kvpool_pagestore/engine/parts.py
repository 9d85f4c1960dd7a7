"""What the engine is put together from."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.clock import Clock
from kvpool.core.page import PageKey
from kvpool.core.policy import StagingMode, WritePolicy, option_of
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool_pagestore.config import PageStoreConfig
from kvpool_pagestore.core.chain_links import ChainLinks
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.page_table import ArenaLimits
from kvpool_pagestore.core.policy import NodePolicy, PolicyBook
from kvpool_pagestore.core.writeback import WriteBackLimits
from kvpool_pagestore.engine.context import EngineContext, Tiers
from kvpool_pagestore.engine.copies import CopyPlanner, PagePusher
from kvpool_pagestore.engine.disk_tier import DiskTier
from kvpool_pagestore.engine.fetch import Flights
from kvpool_pagestore.engine.local_pages import LocalPages
from kvpool_pagestore.engine.pulls import PullCaller, PullLimits, Pulls
from kvpool_pagestore.engine.replication import ReplicationLimits
from kvpool_pagestore.engine.retention import RetentionManager
from kvpool_pagestore.engine.sessions import SessionTimes
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


def arena_limits(config: PageStoreConfig, first_segment_id: int) -> ArenaLimits:
    return ArenaLimits(
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


def make_retention(
    config: PageStoreConfig,
    parts: EngineParts,
    policies: PolicyBook,
    keyspaces: KeyspaceBook,
    tiers: Tiers,
    context: EngineContext,
) -> RetentionManager:
    tier_bytes = parts.disk_live_bytes if tiers.disk is not None else config.arena_bytes
    pinned_bytes = int(config.max_pinned_share * tier_bytes)
    table = tiers.staging.table
    return RetentionManager(policies, keyspaces, table, tiers.disk, context.metrics, context.clock, pinned_bytes)


def session_times(config: PageStoreConfig) -> SessionTimes:
    return SessionTimes(
        max_sessions=config.max_sessions,
        max_leases=config.max_leases,
    )


def make_disk_map(
    parts: EngineParts, keyspaces: KeyspaceBook, links: ChainLinks, context: EngineContext
) -> DiskMap | None:
    if (store := parts.store) is None:
        return None

    def charged_bytes(key: PageKey) -> int:
        keyspace = keyspaces.find(key.keyspace)
        assert keyspace is not None  # remembered before the first page of it was written
        return store.charged_bytes(keyspace.page_bytes(key.shard))

    return DiskMap(charged_bytes, context.events, context.clock.wall_us, links)


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
    context: EngineContext,
) -> CopyPlanner:
    workers, timeout_s = parts.workers.push or parts.workers.pull, config.push_timeout_ms / 1e3
    pusher = PagePusher(local, parts.peers, workers, context, timeout_s, config.pull_stall_ms / 1e3)
    return CopyPlanner(parts.placement, pusher, local, policies, config.replication_factor, context.clock)


def disk_tier(
    parts: EngineParts, store: PageStore, disk_map: DiskMap, keyspaces: KeyspaceBook, context: EngineContext
) -> DiskTier:
    workers = parts.workers
    return DiskTier(store, parts.disk_live_bytes, disk_map, keyspaces, workers.read, workers.write, context)


def make_flights(
    config: PageStoreConfig, parts: EngineParts, tiers: Tiers, policies: PolicyBook, context: EngineContext
) -> Flights:
    limits = PullLimits(
        stall_s=config.pull_stall_ms / 1e3,
        hedge_s=config.hedge_ms / 1e3,
        streams_per_peer=config.pull_streams_per_peer,
        moving_streams=config.pull_threads,
    )
    staging = tiers.staging
    caller = PullCaller(parts.peers, parts.workers.pull, staging.space, config.pull_timeout_ms / 1e3, context.tracer)
    pulls = Pulls(limits, staging, caller, parts.index, context)
    return Flights(staging, tiers.disk, pulls, policies, context)
