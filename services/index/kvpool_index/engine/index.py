"""What the servicer calls: the parts of the engine, wired."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvpool.core.clock import Clock
from kvpool.core.cluster import (
    UNNUMBERED,
    ChainMatch,
    ChainQuery,
    IndexEvent,
    IndexInfo,
    LiveNode,
    NodeInfo,
    NodeKind,
    NodeLease,
    RegistrationAttempt,
    RouteAnswer,
    StaleLocation,
)
from kvpool.core.errors import Draining, InvalidRequest, StoreUnavailable
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.location_digest import SplitGroup
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool_index.config import IndexConfig
from kvpool_index.core.nodes import Renewal
from kvpool_index.engine.announce import AnnounceService, AnnounceStream, ReconcileService
from kvpool_index.engine.dead_locations import DeadLocations
from kvpool_index.engine.keyspaces import KeyspaceService, KnownKeyspace, OpenedKeyspace, PolicyService, SecretOf
from kvpool_index.engine.log_reader import LogReader
from kvpool_index.engine.match import MatchService, RouteService
from kvpool_index.engine.nodes import LeaseService, LeaseTerms, NodeService, Refusals
from kvpool_index.engine.watch import WatchService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import IndexStore, LocationStore

_MAX_PLACED_NODES = 16


class OpenStreams:
    """The tasks that serve streams now, to be ended when the service drains: they would otherwise outlast any grace."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining = asyncio.Event()

    @asynccontextmanager
    async def track(self) -> AsyncIterator[None]:
        """Around the whole handler of a stream, in the call's own task. Raises Draining once `end_all` was called."""
        task = asyncio.current_task()
        if self._draining.is_set() or task is None:
            raise Draining("the index is shutting down")
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._draining.is_set():
                raise
            task.uncancel()
            raise Draining("the index is shutting down; what was not acknowledged is to be sent again") from None
        finally:
            self._tasks.discard(task)

    def end_all(self) -> None:
        """End all streams with Draining, and refuse new ones."""
        self._draining.set()
        for task in self._tasks:
            task.cancel()


class GroupListings:
    """Lists the chain groups of keyspaces, one keyspace at a time: callers that wait share the listing that comes next.

    So many receivers that start afresh together cost the store two listings.
    """

    def __init__(self, store: LocationStore) -> None:
        self._store = store
        self._next: dict[bytes, asyncio.Task[bytes]] = {}  # by keyspace, that has not begun to read
        self._tasks: set[asyncio.Task[bytes]] = set()
        self._one_at_a_time = asyncio.Lock()

    async def heads(self, keyspace: bytes) -> bytes:
        """Return the heads of the groups that had a chunk when this was called, joined."""
        listing = self._next.get(keyspace)
        if listing is None:
            listing = self._next[keyspace] = asyncio.create_task(self._list(keyspace), name="list-groups")
            self._tasks.add(listing)
            listing.add_done_callback(self._end)
        return await asyncio.shield(listing)

    async def close(self) -> None:
        """End all."""
        for listing in self._tasks:
            listing.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _list(self, keyspace: bytes) -> bytes:
        async with self._one_at_a_time:
            del self._next[keyspace]  # those who ask from now on need a later one
            # Part by part: an object for each of millions of groups would take five times the memory.
            return b"".join([b"".join(some) async for some in self._store.group_heads(keyspace)])

    def _end(self, listing: asyncio.Task[bytes]) -> None:
        self._tasks.discard(listing)
        if not listing.cancelled():
            listing.exception()  # that of one whose callers have all left goes to no caller


class IndexEngine:
    """The index. Every call may raise StoreUnavailable; tenants are those of the authenticated caller."""

    def __init__(
        self,
        *,
        store: IndexStore,
        config: IndexConfig,
        clock: Clock,
        metrics: IndexMetrics,
        secret_of: SecretOf,
        version: str,
        tracer: Tracer = NO_TRACER,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.config, self.tracer = config, tracer
        self.streams = OpenStreams()
        self._store = store
        self._version = version
        self._metrics = metrics
        if store.redis is not None:
            metrics.add_redis(store.redis)
        self._keyspaces = KeyspaceService(
            store.keyspaces,
            store.policies,
            secret_of,
            max_keyspaces=config.max_keyspaces,
            idle_s=config.keyspace_idle_s,
        )
        self._policies = PolicyService(store.keyspaces, store.policies, store.nodes)
        self._nodes = NodeService(store.nodes, config, clock, metrics)
        self._leases = LeaseService(self._nodes, self._policies, config)
        self._dead = DeadLocations(
            store.locations, self._nodes, self._keyspaces, metrics, interval_s=config.sweep_interval_s
        )
        self._matches = MatchService(store, self._nodes, self._keyspaces, config, self._dead, metrics, tracer)
        self._routes = RouteService(self._matches, self._nodes, self._keyspaces, config)
        self._announcements = AnnounceService(store.locations, store.events, self._nodes, self._keyspaces, metrics)
        self._reconciliation = ReconcileService(store.locations, self._announcements, store.nodes, metrics)
        self._listings = GroupListings(store.locations)
        self._watches = WatchService(store.events, self._nodes, self._keyspaces, config, metrics, clock, uniform)

    @property
    def watch_reader(self) -> LogReader:
        """The reader of the event log."""
        return self._watches.reader

    def background_work(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Named coroutines that must run as long as the service does."""
        return [
            ("look-after-store", self._store.run()),
            ("refresh-nodes", self._nodes.run()),
            ("remove-dead", self._dead.run_removals()),
            ("sweep", self._dead.run_sweeps()),
        ]

    async def sweep(self) -> int:
        """Remove now what nodes that are gone for good left behind; the number of entries. See DeadLocations."""
        return await self._dead.sweep()

    def drain(self) -> None:
        """End all open streams; their callers go on with another replica."""
        self.streams.end_all()

    async def close(self) -> None:
        """End what the engine has started itself."""
        await self._watches.close()
        await self._listings.close()
        await self._leases.close()

    async def open_keyspace(self, tenant: str, name: str, spec: KeyspaceSpec) -> OpenedKeyspace:
        """Bind a name to a spec. Raises InvalidRequest, KeyspaceMismatch."""
        return await self._keyspaces.open(tenant, name, spec)

    async def list_keyspaces(self, tenant: str) -> list[KnownKeyspace]:
        """Return the tenant's keyspaces by name."""
        return await self._keyspaces.of_tenant(tenant)

    async def register_node(
        self, info: NodeInfo, last_incarnation: int, attempt: RegistrationAttempt = UNNUMBERED
    ) -> NodeLease:
        """Grant a lease. Raises InvalidRequest, StaleIncarnation."""
        return await self._nodes.register(info, last_incarnation, attempt)

    async def set_policy(self, tenant: str, name: str, policy: KeyspacePolicy) -> VersionedPolicy:
        """Replace a keyspace's policy. Raises KeyspaceUnknown, InvalidRequest."""
        return await self._policies.set(tenant, name, policy)

    async def policies_of(self, keyspaces: Sequence[bytes]) -> dict[bytes, VersionedPolicy]:
        """Return the policies of those keyspaces that have one, by keyspace."""
        return await self._policies.of(keyspaces)

    async def keyspace_policies(self, keyspaces: Sequence[bytes]) -> tuple[list[VersionedPolicy], int]:
        """Return the policies of those keyspaces that have one, and the version of all policies."""
        return await self._policies.get(keyspaces)

    async def restore_policies(
        self, tenant: str, node_id: bytes, incarnation: int, kept: Sequence[tuple[bytes, VersionedPolicy]]
    ) -> None:
        """Restore what the store has lost. kept: with the encoding of each. Raises InvalidRequest, LeaseLost."""
        await self._policies.restore(tenant, node_id, incarnation, kept)

    async def renew_leases(self, renewals: Sequence[Renewal]) -> tuple[Refusals, LeaseTerms]:
        """Renew leases; see LeaseService."""
        return await self._leases.renew(renewals)

    async def end_lease(self, node_id: bytes, incarnation: int, process_id: bytes = b"") -> None:
        """End a lease; idempotent. Raises StaleIncarnation."""
        await self._nodes.end(node_id, incarnation, process_id)

    async def list_nodes(self, kind: NodeKind | None) -> list[LiveNode]:
        """Return live nodes by node id."""
        return await self._nodes.live_nodes(kind)

    async def open_announce(
        self, node_id: bytes, incarnation: int, announce_epoch: int, process_id: bytes = b""
    ) -> AnnounceStream:
        """Open an announce stream, which fences the node's earlier ones. Raises StaleIncarnation, LeaseLost."""
        fence = await self._store.nodes.open_stream(node_id, incarnation, announce_epoch, process_id)
        return self._announcements.open(fence, self._reconciliation)

    async def reconcile_digests(
        self,
        tenant: str,
        node_id: bytes,
        incarnation: int,
        first_range: int,
        range_count: int,
        encodings: Sequence[bytes],
    ) -> tuple[list[int], int]:
        """Digests and the announce sequence they cover. Raises InvalidRequest, LeaseLost, StaleIncarnation.

        encodings: of keyspaces that the store is to know again; those of other tenants are skipped.
        """
        if encodings:
            await self._store.nodes.ordinal(node_id, incarnation)  # only a node that holds its lease restores any
            await self._keyspaces.restore(tenant, encodings)
        return await self._reconciliation.digests(node_id, incarnation, first_range, range_count)

    async def split_groups(
        self, node_id: bytes, incarnation: int, number: int, continuation: bytes
    ) -> tuple[list[SplitGroup], bytes, int]:
        """See ReconcileService.split_groups. Raises InvalidRequest, LeaseLost, StaleIncarnation."""
        return await self._reconciliation.split_groups(node_id, incarnation, number, continuation)

    async def match(self, tenant: str, query: ChainQuery) -> ChainMatch:
        """Raises InvalidRequest, KeyspaceUnknown."""
        return await self._matches.match(tenant, query)

    async def match_several(self, tenant: str, queries: Sequence[ChainQuery]) -> list[ChainMatch]:
        """The same for chains of one keyspace; see MatchService."""
        return await self._matches.match_several(tenant, queries)

    async def route(self, tenant: str, query: ChainQuery, *, with_unmatched: bool, count: int) -> RouteAnswer:
        """Rank hosts by what they have of a chain. Raises InvalidRequest, KeyspaceUnknown."""
        return await self._routes.route(tenant, query, with_unmatched=with_unmatched, count=count)

    async def place(self, tenant: str, keyspace: bytes, chain_head: bytes, host_id: str, count: int) -> list[NodeInfo]:
        """Raises InvalidRequest, KeyspaceUnknown."""
        if not 0 <= count <= _MAX_PLACED_NODES:
            raise InvalidRequest(f"count must be 0 to {_MAX_PLACED_NODES}, got {count}")
        await self._keyspaces.get(tenant, keyspace)
        return self._nodes.place(keyspace, chain_head, host_id, count or 1)

    async def report_stale(self, tenant: str, stale: Sequence[StaleLocation]) -> list[bool]:
        """Remove stale locations; returns per item whether it was there."""
        return await self._announcements.report_stale(tenant, stale)

    async def chain_groups(self, tenant: str, keyspace: bytes) -> bytes:
        """Return the heads of all groups of a keyspace that have a chunk, joined. Raises KeyspaceUnknown."""
        await self._keyspaces.get(tenant, keyspace)
        return await self._listings.heads(keyspace)

    async def drop_keyspace(self, tenant: str, keyspace: bytes, node_id: bytes) -> int:
        """Remove a keyspace's locations; returns the number of chunks that lost one. Raises KeyspaceUnknown."""
        return await self._announcements.drop(tenant, keyspace, node_id)

    def watch(
        self, tenant: str, after_position: str, keyspace: bytes, *, for_replica: bool = False, peer: str = ""
    ) -> AsyncGenerator[IndexEvent, None]:
        """Close the iterator to end the watch. Raises InvalidRequest, KeyspaceUnknown, Overloaded."""
        return self._watches.watch(tenant, after_position, keyspace, for_replica=for_replica, peer=peer)

    async def info(self) -> IndexInfo:
        """Return limits and versions, and whether the store can be reached."""
        try:
            await self._store.ping()
            reachable = True
        except StoreUnavailable:
            reachable = False
        return IndexInfo(
            version=self._version,
            store=self._store.kind,
            max_match_chunks=self.config.max_match_chunks,
            max_match_questions=self.config.max_match_questions,
            max_batch_items=self.config.max_batch_items,
            lease_ttl_ms=self.config.lease_ttl_ms,
            store_reachable=reachable,
        )
