"""Replication in the background: new pages are copied to other nodes, and a slow sweep restores lost copies.

What becomes durable here is queued by chain group and copied to as many nodes as its keyspace wants; what is read often
gets more copies. The sweep walks over all that is stored: it heals lost copies, and brings new nodes their share. Each
node looks at its own pages only, at a time of its own, and one chain group at a time; so many nodes that notice one
event neither begin at once nor copy the same pages.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvpool.core.cluster import LiveNode, NodeInfo
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey
from kvpool.core.placement import place
from kvpool_pagestore.core.events import DiskChanged, PagesRead, StagingChanged
from kvpool_pagestore.core.policy import PolicyBook
from kvpool_pagestore.core.replication import (
    GroupName,
    HeldChunk,
    Holder,
    HotChunks,
    ReplicaGroup,
    ReplicaQueue,
    is_safe_without,
    others,
    takes_durable,
)
from kvpool_pagestore.core.writeback import Pace
from kvpool_pagestore.engine.context import EngineContext, background, cancelled
from kvpool_pagestore.engine.copies import CopyPlanner, Purpose, Wanted, by_group, lacking
from kvpool_pagestore.engine.disk_tier import DurableValue

_log = logging.getLogger(__name__)

_HOT_COUNTED = 65_536  # chunks
_SLICE_CHUNKS = 256
_PAUSE_S = 0.01  # between two slices: a walk over a million chunks is in no hurry
_ANNOUNCED_TRIES = 20
_ANNOUNCED_PAUSE_S = 0.1
_ID_BYTES = 16
# Nodes that had their share, at most: beyond that, those that are gone are forgotten, and a walk that meets one of them
# again finds what it has.
_SERVED_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationLimits:
    """Bounds of replication and of the sweep."""

    queue_chunks: int
    groups_at_once: int
    linger_s: float
    hot_uses_per_minute: int
    hot_copies: int
    sweep_interval_s: float
    rebalance_bytes_per_s: int  # to one new node, from all others together; 0: new nodes get nothing
    retry_first_s: float = 0.5
    retry_last_s: float = 60.0


class ReplicationManager:
    """Keeps as many copies of this node's pages on other nodes as their keyspaces want. Idle without other nodes."""

    def __init__(
        self,
        limits: ReplicationLimits,
        planner: CopyPlanner,
        policies: PolicyBook,
        served_nodes: DurableValue,
        context: EngineContext,
    ) -> None:
        """served_nodes: keeps the ids of nodes that had their share, so that a restart goes on with the others."""
        self._limits = limits
        self._planner = planner
        self._policies = policies
        self._served_nodes = served_nodes
        self._tasks, self._metrics, self._clock = context.tasks, context.metrics, context.clock
        self._queue = ReplicaQueue(
            max_chunks=limits.queue_chunks,
            linger_s=limits.linger_s,
            retry_first_s=limits.retry_first_s,
            retry_last_s=limits.retry_last_s,
        )
        self._hot = HotChunks(uses_per_minute=limits.hot_uses_per_minute, capacity=_HOT_COUNTED)
        self._running: set[GroupName] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._pace = Pace(limits.rebalance_bytes_per_s) if limits.rebalance_bytes_per_s else None
        self._served: set[bytes] | None = None  # nodes that have had their share, or were there before this one
        self._unserved: set[bytes] = set()  # nodes that did not take all of their share in this walk
        self._random = random.Random()
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def waiting_chunks(self) -> int:
        """Chunks that wait to be copied."""
        return self._queue.chunk_count

    def most_read(self, count: int) -> list[tuple[bytes, float]]:
        """Return the chunks (keyspace id + hash) whose pages are leased most now, with leases a minute."""
        return self._hot.most_used(count, self._clock.monotonic_s())

    # Events of pages

    def disk_changed(self, changed: DiskChanged) -> None:
        """Queue what became durable here."""
        if changed.present:
            for key, group_head_hash in changed.pages:
                self._stored(key, group_head_hash)

    def staging_changed(self, changed: StagingChanged) -> None:
        """Queue what became visible in staging: the place to copy it from if its keyspace never writes to disk."""
        if not changed.present or self._planner.is_alone:
            return
        for record in changed.records:
            if self._policies.plan(record.key.keyspace).write_at_uses is None:
                self._stored(record.key, record.metadata.group_head_hash)

    def pages_read(self, read: PagesRead) -> None:
        """Count what makes a chunk hot."""
        if self._planner.is_alone or not self._hot.enabled:
            return
        for record in read.records:
            key = record.key
            if self._hot.used(key.keyspace + key.chunk_hash, self._clock.monotonic_s()):
                self._add(key, record.metadata.group_head_hash, self._limits.hot_copies)

    # Life

    async def load(self) -> None:
        """Read which nodes had their share from an earlier process. Raises StoreFault."""
        if self._pace is None or self._planner.is_alone:
            return
        saved = await self._served_nodes.load()
        if saved:
            self._served = {saved[start : start + _ID_BYTES] for start in range(0, len(saved), _ID_BYTES)}

    def start(self) -> None:
        """Begin to sweep. Call once the node serves."""
        if not self._planner.is_alone:
            self._sweeping = background(self._sweep_forever(), "sweep")

    async def stop(self) -> None:
        """Begin no more copies; those under way end by themselves."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        task, self._sweeping = self._sweeping, None
        await cancelled(task)

    async def sweep(self) -> None:
        """Walk once over all that is stored. Raises StoreUnavailable and the like."""
        me = self._planner.placement.me()
        if me is None or me.draining:
            return
        nodes = [node for node in await self._planner.nodes() if takes_durable(node)]
        ids = {node.info.node_id for node in nodes if not node.info.draining}
        if self._served is None:
            await self._save_served(ids)
        assert self._served is not None
        joined = ids - self._served if self._pace is not None else set()
        self._unserved.clear()
        replicated = self._planner.replicated_keyspaces()
        if joined or replicated:
            for bucket in await self._planner.local.buckets(None if joined else replicated):
                for names in bucket.parts(_SLICE_CHUNKS):
                    await self._sweep_slice(names, me, nodes, joined, replicated)
        if not ids - self._unserved <= self._served:
            await self._save_served(self._served | (ids - self._unserved))

    # The queue

    def _stored(self, key: PageKey, group_head_hash: bytes) -> None:
        if not self._planner.is_alone and self._planner.factor(key.keyspace) > 1:
            self._add(key, group_head_hash)

    def _add(self, key: PageKey, group_head_hash: bytes, copies: int = 0) -> None:
        if not self._queue.add(key, group_head_hash, self._clock.monotonic_s(), copies):
            self._metrics.move_failures.labels(Purpose.REPLICA.value, "OVERLOADED").inc()
        self._pump()

    def _pump(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stopped:
            return
        now_s = self._clock.monotonic_s()
        while len(self._running) < self._limits.groups_at_once and (group := self._queue.take(now_s)) is not None:
            if group.name in self._running:  # it is being copied: what came since waits
                self._queue.failed(group, now_s)
                continue
            self._running.add(group.name)
            self._tasks.start(self._replicate(group), "replicate")
        due_s = self._queue.next_due_s()
        if due_s is not None and len(self._running) < self._limits.groups_at_once:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - now_s), self._pump)

    async def _replicate(self, group: ReplicaGroup) -> None:
        error: KvPoolError | None = None
        try:
            keyspace = group.name[0]
            chunks = [
                held
                for chunk_hash in group.chunk_hashes
                for held in self._planner.local.chunk(keyspace + chunk_hash)
                if held.group_head_hash == group.name[1]
            ]
            if self._planner.placement.me() is None:
                error = KvPoolError("this node is not registered with the index")
            else:
                error = await self._planner.ensure_copies(chunks, group.copies)
        except KvPoolError as raised:
            error = raised
        finally:
            self._running.discard(group.name)
        if error is not None:
            _log.info("%d chunks were not copied yet: %s", len(group.chunk_hashes), error)
            self._queue.failed(group, self._clock.monotonic_s())
        self._pump()

    # The sweep

    async def _save_served(self, ids: set[bytes]) -> None:
        if len(ids) > _SERVED_MAX:
            ids = ids & {node.info.node_id for node in await self._planner.nodes()}
        self._served = ids
        if self._pace is not None:
            await self._served_nodes.save(b"".join(sorted(self._served)))

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._limits.sweep_interval_s * self._random.uniform(0.5, 1.5))
            try:
                await self.sweep()
            except KvPoolError as error:
                _log.warning("the sweep over copies failed and is tried again: %s", error)

    async def _sweep_slice(
        self,
        names: Sequence[bytes],
        me: NodeInfo,
        nodes: Sequence[LiveNode],
        joined: set[bytes],
        replicated: Collection[bytes],
    ) -> None:
        """Look at some chunks: one query to the index for those that should have copies."""
        groups = by_group(chunk for name in names for chunk in self._planner.local.chunk(name))
        if joined:
            for group in groups:
                await asyncio.sleep(0)  # placement takes a millisecond among a thousand nodes
                await self._rebalance(group, me, nodes, joined)
        wanted = [group for group in groups if group[0].keyspace in replicated]
        holders = await self._planner.holders([chunk for group in wanted for chunk in group])
        for group in wanted:
            await self._heal(group, holders)
        await asyncio.sleep(_PAUSE_S)

    async def _heal(self, group: Sequence[HeldChunk], holders: Mapping[HeldChunk, Sequence[Holder]]) -> None:
        short = [chunk for chunk in group if self._planner.lacks_copies(chunk, holders[chunk])]
        error = await self._planner.ensure_copies(short) if short else None
        if error is not None:
            _log.info("%d chunks have too few copies: %s", len(short), error)

    async def _rebalance(
        self, group: Sequence[HeldChunk], me: NodeInfo, nodes: Sequence[LiveNode], joined: set[bytes]
    ) -> None:
        """Bring a group to a new node that placement names for it now; forget it here if there are enough copies."""
        durable = [chunk for chunk in group if chunk.durable]
        if not durable or self._pace is None:
            return
        first, factor = durable[0], max(1, self._planner.factor(durable[0].keyspace))
        infos = [node.info for node in nodes]
        placed = place(infos, keyspace=first.keyspace, chain_head=first.group_head_hash, host_id="", count=factor)
        for target in placed:
            if target.node_id not in joined or target.node_id == me.node_id:
                continue
            wanted = lacking(durable, await self._planner.holders(durable), target.node_id)
            senders = max(1, len({info.node_id for info in infos} - joined))
            if not await self._paced_copy(target, wanted, senders):
                self._unserved.add(target.node_id)  # the next walk brings what is missing
                return
        if me.node_id not in {node.node_id for node in placed}:
            await self._forget(durable, me, factor, {node.node_id for node in placed}, joined)

    async def _paced_copy(self, target: NodeInfo, wanted: Sequence[Wanted], senders: int) -> bool:
        """Return whether the node took all of it. The rate is what it gets from all `senders` together."""
        assert self._pace is not None
        for one in wanted:
            await asyncio.sleep(self._pace.wait_s(senders * self._planner.size_bytes([one]), self._clock.monotonic_s()))
            report = await self._planner.copy(target, [one], Purpose.REBALANCE)
            if report.failed:
                return False
        return True

    async def _forget(
        self, chunks: Sequence[HeldChunk], me: NodeInfo, factor: int, placed: set[bytes], joined: set[bytes]
    ) -> None:
        """Drop from disk what the index, too, knows on enough others, a new node among them."""
        targets = placed & joined
        if not targets:
            return
        for attempt in range(_ANNOUNCED_TRIES):
            holders = await self._planner.holders(chunks)
            safe = [
                chunk
                for chunk in chunks
                if is_safe_without(me.node_id, others(chunk, holders[chunk], me.node_id), placed, factor)
                and any(node.node_id in targets for node in others(chunk, holders[chunk], me.node_id))
            ]
            if len(safe) == len(chunks) or attempt == _ANNOUNCED_TRIES - 1:
                break
            await asyncio.sleep(_ANNOUNCED_PAUSE_S)
        self._planner.local.discard_durable([key for chunk in safe for key in chunk.keys(chunk.shards)])
