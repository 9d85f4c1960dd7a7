"""What the servicer calls: the parts of the engine, wired."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvpool.core.clock import Clock
from kvpool.core.cluster import IndexInfo, NodeInfo
from kvpool.core.errors import Draining, InvalidRequest, StoreUnavailable
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool_index.config import IndexConfig
from kvpool_index.engine.announce import AnnounceService, AnnounceStream, ReconcileService
from kvpool_index.engine.dead_locations import DeadLocations
from kvpool_index.engine.keyspaces import KeyspaceService, PolicyService, SecretOf
from kvpool_index.engine.match import MatchService, RouteService
from kvpool_index.engine.nodes import LeaseService, NodeService
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
        if store.redis is not None:
            metrics.add_redis(store.redis)
        self.keyspaces = KeyspaceService(
            store.keyspaces,
            store.policies,
            secret_of,
            max_keyspaces=config.max_keyspaces,
            idle_s=config.keyspace_idle_s,
        )
        self.policies = PolicyService(store.keyspaces, store.policies, store.nodes)
        self.nodes = NodeService(store.nodes, config, clock, metrics)
        self.leases = LeaseService(self.nodes, self.policies, config)
        self.dead_locations = DeadLocations(
            store.locations, self.nodes, self.keyspaces, metrics, interval_s=config.sweep_interval_s
        )
        self.matches = MatchService(store, self.nodes, self.keyspaces, self.dead_locations, metrics, tracer)
        self.routes = RouteService(self.matches, self.nodes, self.keyspaces, config)
        self.announcements = AnnounceService(store.locations, store.events, self.nodes, self.keyspaces, metrics)
        self.reconciliation = ReconcileService(store.locations, self.announcements, store.nodes, metrics)
        self._listings = GroupListings(store.locations)
        self.watches = WatchService(store.events, self.nodes, self.keyspaces, config, metrics, clock, uniform)

    def background_work(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Named coroutines that must run as long as the service does."""
        return [
            ("look-after-store", self._store.run()),
            ("refresh-nodes", self.nodes.run()),
            ("remove-dead", self.dead_locations.run_removals()),
            ("sweep", self.dead_locations.run_sweeps()),
        ]

    async def close(self) -> None:
        """End what the engine has started itself."""
        await self.watches.close()
        await self._listings.close()
        await self.leases.close()

    async def open_announce(
        self, node_id: bytes, incarnation: int, announce_epoch: int, process_id: bytes = b""
    ) -> AnnounceStream:
        """Open an announce stream, which fences the node's earlier ones. Raises StaleIncarnation, LeaseLost."""
        fence = await self._store.nodes.open_stream(node_id, incarnation, announce_epoch, process_id)
        return self.announcements.open(fence, self.reconciliation)

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
            await self.keyspaces.restore(tenant, encodings)
        return await self.reconciliation.digests(node_id, incarnation, first_range, range_count)

    async def place(self, tenant: str, keyspace: bytes, chain_head: bytes, host_id: str, count: int) -> list[NodeInfo]:
        """Raises InvalidRequest, KeyspaceUnknown."""
        if not 0 <= count <= _MAX_PLACED_NODES:
            raise InvalidRequest(f"count must be 0 to {_MAX_PLACED_NODES}, got {count}")
        await self.keyspaces.get(tenant, keyspace)
        return self.nodes.place(keyspace, chain_head, host_id, count or 1)

    async def chain_groups(self, tenant: str, keyspace: bytes) -> bytes:
        """Return the heads of all groups of a keyspace that have a chunk, joined. Raises KeyspaceUnknown."""
        await self.keyspaces.get(tenant, keyspace)
        return await self._listings.heads(keyspace)

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
