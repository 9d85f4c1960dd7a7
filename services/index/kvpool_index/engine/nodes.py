"""Nodes and their leases: granted by the store, looked up in a table that is kept fresh."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from kvpool.core.clock import Clock
from kvpool.core.cluster import UNNUMBERED, LiveNode, NodeInfo, NodeKind, NodeLease, NodeLoad, RegistrationAttempt
from kvpool.core.errors import KvPoolError, Overloaded, StoreUnavailable
from kvpool.core.placement import place
from kvpool_index.config import IndexConfig
from kvpool_index.core.nodes import NodeRecord, NodeTable, Renewal, check_registration
from kvpool_index.engine.keyspaces import PolicyService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import NodeDirectory, NodeGrant

_log = logging.getLogger(__name__)

# A report about an unknown node is reason to ask the store, but clients can make such ids up.
_UNKNOWN_NODE_REFRESH_S: Final = 0.25
_GONE_ORDINALS_MAX: Final = 65536


@dataclass(frozen=True, slots=True)
class _Change:
    node_id: bytes
    incarnation: int
    registered: NodeRecord | None = None  # None: the lease has ended
    asked_at_s: float = 0.0


class NodeService:
    """Registers nodes and knows who is alive."""

    def __init__(self, directory: NodeDirectory, config: IndexConfig, clock: Clock, metrics: IndexMetrics) -> None:
        self._directory = directory
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self.table = NodeTable()
        self._refreshed_at_s = float("-inf")
        self._refreshing: asyncio.Future[None] | None = None
        self._gone_ordinals: set[int] = set()
        # Registrations and ends that this replica served since it last asked for a snapshot.
        self._changes: list[_Change] = []

    async def register(
        self, info: NodeInfo, last_incarnation: int, attempt: RegistrationAttempt = UNNUMBERED
    ) -> NodeLease:
        """Grant a lease. Raises InvalidRequest, StaleIncarnation."""
        check_registration(info, last_incarnation, attempt)
        if self.table.record(info.node_id) is None and len(self.table) >= self._config.max_nodes:
            raise Overloaded(f"{len(self.table)} nodes are known, as many as max_nodes of the index allows")
        ttl_ms, asked_at_s = self._config.lease_ttl_ms, self._clock.monotonic_s()
        grant = await self._directory.register(
            info, last_incarnation=last_incarnation, lease_ttl_ms=ttl_ms, attempt=attempt
        )
        if grant.took_over:
            self._metrics.node_events.labels("taken_over").inc()
            _log.warning("node %s at %s took over a live lease of another process", info.node_id.hex(), info.endpoint)
        if not grant.is_repeat:  # else its facts may be old ones
            self._registered(info, grant, ttl_ms, asked_at_s)
        return NodeLease(
            incarnation=grant.incarnation,
            lease_ttl_ms=ttl_ms,
            renew_interval_ms=self._config.renew_interval_ms,
            announce_epoch=grant.announce_epoch,
        )

    def _registered(self, info: NodeInfo, grant: NodeGrant, ttl_ms: int, asked_at_s: float) -> None:
        record = NodeRecord(
            info=replace(info, incarnation=grant.incarnation),
            load=NodeLoad(),
            ordinal=grant.ordinal,
            alive=True,
            ended=False,
            lease_remaining_ms=ttl_ms,
        )
        self._changes.append(_Change(info.node_id, grant.incarnation, record, asked_at_s))
        self.table.put(record, asked_at_s)
        self._metrics.node_events.labels("registered").inc()

    async def renew(self, renewals: Sequence[Renewal]) -> list[KvPoolError | None]:
        """Return for each lease None, LeaseLost or StaleIncarnation. Raises StoreUnavailable, Overloaded."""
        asked_at_s, config = self._clock.monotonic_s(), self._config
        timed = [
            replace(one, lease_ttl_ms=config.idle_lease_ttl_ms if one.load is None else config.lease_ttl_ms)
            for one in renewals
        ]
        refusals = await self._directory.renew(timed)
        for one, refusal in zip(timed, refusals, strict=True):
            if refusal is None:
                self.table.renewed(one.node_id, one.incarnation, one.load, asked_at_s + one.lease_ttl_ms / 1000)
        return refusals

    async def end(self, node_id: bytes, incarnation: int, process_id: bytes = b"") -> None:
        """End a lease; idempotent. Raises StaleIncarnation for that of another process."""
        await self._directory.end(node_id, incarnation, process_id)
        record = self.table.live_record(node_id, self._clock.monotonic_s())
        if record is not None and record.info.incarnation == incarnation:
            self._changes.append(_Change(node_id, incarnation))
            self.table.forget(node_id)
            self._metrics.node_events.labels("ended").inc()

    async def live_nodes(self, kind: NodeKind | None) -> list[LiveNode]:
        """Live nodes by node id, as the store has them now."""
        await self.refresh()
        nodes = self.table.live_nodes(self._clock.monotonic_s())
        return [node for node in nodes if kind is None or node.info.kind == kind]

    async def registered_nodes(self) -> list[NodeInfo]:
        """Nodes by node id that have not ended their lease, nor been declared dead, which the event log would say."""
        await self.refresh()
        return self.table.registered_infos()

    async def record(self, node_id: bytes) -> NodeRecord | None:
        """Return the record of a node that has not ended its lease; reads the store if there is none here.

        A node that ended it holds nothing: what it left is removed with other dead locations.
        """
        record = self.table.record(node_id)
        if record is None or record.ended:
            if self._clock.monotonic_s() - self._refreshed_at_s >= _UNKNOWN_NODE_REFRESH_S:
                await self.refresh()
            record = self.table.record(node_id)
        return record if record is not None and not record.ended else None

    def live_nodes_now(self) -> list[LiveNode]:
        """Live nodes by node id, as this replica knows them."""
        return self.table.live_nodes(self._clock.monotonic_s())

    def place(self, keyspace: bytes, chain_head: bytes, host_id: str, count: int) -> list[NodeInfo]:
        """Nodes for new chunks, best first."""
        alive = self.table.live_infos(self._clock.monotonic_s(), NodeKind.PAGESTORE)
        return place(alive, keyspace=keyspace, chain_head=chain_head, host_id=host_id, count=count)

    def live_node_now(self) -> Callable[[int], NodeInfo | None]:
        """Return a look-up of live nodes by ordinal as of now."""
        now_s = self._clock.monotonic_s()
        return lambda ordinal: self.table.live_by_ordinal(ordinal, now_s)

    async def learn(self, ordinals: Iterable[int]) -> None:
        """Refresh the table if an ordinal is not known here: it is new, or gone for good.

        The store is asked once for each, so that what dead nodes left behind costs nothing until it is cleaned up.
        """
        unknown = {ordinal for ordinal in ordinals if not self.table.knows_ordinal(ordinal)} - self._gone_ordinals
        if not unknown:
            return
        await self.refresh()
        if len(self._gone_ordinals) > _GONE_ORDINALS_MAX:
            self._gone_ordinals.clear()
        self._gone_ordinals |= {ordinal for ordinal in unknown if not self.table.knows_ordinal(ordinal)}

    async def refresh(self) -> None:
        """Read all nodes from the store as they are after this call began. Calls at the same time share reads."""
        under_way = self._refreshing
        if under_way is not None:
            with suppress(StoreUnavailable, Overloaded):  # the next read reports it
                await asyncio.shield(under_way)
        if self._refreshing is None or self._refreshing is under_way:
            self._refreshing = asyncio.ensure_future(self._read_all())
            self._refreshing.add_done_callback(self._refresh_ended)
        await asyncio.shield(self._refreshing)

    async def run(self) -> None:
        """Keep the table fresh until cancelled, and declare nodes dead whose lease ran out."""
        was_up = True
        while True:
            try:
                await self.refresh()
                await self._declare_dead()
            except (StoreUnavailable, Overloaded) as error:
                self._metrics.store_up.set(0)
                if was_up:
                    _log.warning("the store is out of reach; matches are refused until it is back: %s", error)
                was_up = False
                self._count_nodes()  # leases run out all the same
            else:
                self._metrics.store_up.set(1)
                if not was_up:
                    _log.info("the store is back")
                was_up = True
            await asyncio.sleep(self._config.refresh_interval_s)

    async def _read_all(self) -> None:
        asked_at_s = self._clock.monotonic_s()
        self._changes.clear()
        for _ in self.table.replacing(await self._directory.snapshot(), asked_at_s):
            await asyncio.sleep(0)  # matches have their turn
        # An answer that is older than a registration served here would hide the new node until the next read.
        for change in self._changes:
            self._apply_again(change)
        self._refreshed_at_s = asked_at_s
        self._count_nodes()

    def _apply_again(self, change: _Change) -> None:
        """Apply a change to the table, unless the snapshot has a newer incarnation, registered at another replica."""
        known = self.table.record(change.node_id)
        if known is not None and known.info.incarnation > change.incarnation:
            return
        if change.registered is not None:
            self.table.put(change.registered, change.asked_at_s)
        else:
            self.table.forget(change.node_id)

    def _refresh_ended(self, read: "asyncio.Future[None]") -> None:
        if self._refreshing is read:
            self._refreshing = None
        if not read.cancelled():
            read.exception()  # also when every caller has left; those who wait get it themselves

    async def _declare_dead(self) -> None:
        """Declare overdue nodes dead, and forget those that have been gone for long."""
        forget_after_ms = self._config.node_forget_ms
        for info in self.table.departed(forget_after_ms):
            died = await self._directory.declare_dead(info.node_id, info.incarnation, forget_after_ms=forget_after_ms)
            if died:
                self._metrics.node_events.labels("died").inc()
                _log.warning("node %s at %s did not renew its lease", info.node_id.hex(), info.endpoint)

    def _count_nodes(self) -> None:
        counts, oldest_ms = self.table.counts(self._clock.monotonic_s())
        # A node's figure is as old as its last renewal, at most.
        bound_ms = oldest_ms + self._config.renew_interval_ms if oldest_ms else 0
        self._metrics.staleness_bound.set(bound_ms / 1e3)
        for kind in NodeKind:
            self._metrics.live_nodes.labels(kind.name.lower()).set(counts.get(kind, 0))


_GATHER_S: Final = 0.05
_WAITING_MAX: Final = 1 << 17  # renewals that wait for the store at once

Refusals = list[KvPoolError | None]
"""For each renewal None, or the error that refused it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """What holds for leases that were renewed; idle: of nodes without a load."""

    lease_ttl_ms: int
    renew_interval_ms: int
    idle_lease_ttl_ms: int
    idle_renew_interval_ms: int
    policy_version: int


@dataclass(slots=True, eq=False)
class _Waiting:
    renewals: Sequence[Renewal]
    answer: asyncio.Future[tuple[Refusals, LeaseTerms]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class LeaseService:
    """Gathers renewals for the store, and says how long a lease lives."""

    def __init__(self, nodes: NodeService, policies: PolicyService, config: IndexConfig) -> None:
        self._nodes = nodes
        self._policies = policies
        self._config = config
        self._waiting: list[_Waiting] = []
        self._waiting_count = 0
        self._task: asyncio.Task[None] | None = None

    async def renew(self, renewals: Sequence[Renewal]) -> tuple[Refusals, LeaseTerms]:
        """Why each was refused, and what holds for the others. Raises StoreUnavailable."""
        if self._waiting_count + len(renewals) > _WAITING_MAX:
            raise Overloaded(f"{self._waiting_count} renewals of leases wait for the store")
        waiting = _Waiting(renewals)
        self._waiting.append(waiting)
        self._waiting_count += len(renewals)
        if self._task is None:
            self._task = asyncio.create_task(self._renew_waiting(), name="renew-leases")
        return await waiting.answer

    async def close(self) -> None:
        """Stop renewing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _renew_waiting(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(_GATHER_S)
                waiting, self._waiting, self._waiting_count = self._waiting, [], 0
                await self._renew(waiting)
        finally:
            self._task = None
            for each in self._waiting:
                each.answer.cancel()

    async def _renew(self, waiting: Sequence[_Waiting]) -> None:
        try:
            version = await self._policies.version()
            refusals = await self._nodes.renew([one for each in waiting for one in each.renewals])
        except Exception as error:
            for each in waiting:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        config, at = self._config, 0
        terms = LeaseTerms(
            lease_ttl_ms=config.lease_ttl_ms,
            renew_interval_ms=config.renew_interval_ms,
            idle_lease_ttl_ms=config.idle_lease_ttl_ms,
            idle_renew_interval_ms=config.idle_lease_ttl_ms // 3,
            policy_version=version,
        )
        for each in waiting:
            if not each.answer.done():  # else its stream has ended
                each.answer.set_result((refusals[at : at + len(each.renewals)], terms))
            at += len(each.renewals)
