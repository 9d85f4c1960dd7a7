"""Replication in the background: what became durable here is brought to as many nodes as its keyspace wants."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.core.clock import Clock
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey
from kvpool_pagestore.core.copies import HeldChunk, Holder, others, pick, ranked, takes_durable
from kvpool_pagestore.core.hotness import HotChunks
from kvpool_pagestore.core.replicas import GroupName, ReplicaGroup, ReplicaQueue
from kvpool_pagestore.engine_copying import Copying, lacking
from kvpool_pagestore.engine_moving import Purpose
from kvpool_pagestore.engine_tasks import EngineTasks
from kvpool_pagestore.metrics import PageStoreMetrics

_log = logging.getLogger(__name__)

_HOT_COUNTED = 65_536  # chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationLimits:
    """Bounds of replication."""

    queue_chunks: int
    groups_at_once: int
    linger_s: float
    retry_first_s: float
    retry_last_s: float
    hot_uses_per_minute: int
    hot_copies: int


class Replication:
    """Without work it does not run at all. factor: copies of each page that a keyspace wants, 1 or more."""

    def __init__(
        self,
        limits: ReplicationLimits,
        copying: Copying,
        factor: Callable[[bytes], int],
        tasks: EngineTasks,
        metrics: PageStoreMetrics,
        clock: Clock,
    ) -> None:
        self._limits = limits
        self._copying = copying
        self._factor = factor
        self._tasks = tasks
        self._metrics = metrics
        self._clock = clock
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

    @property
    def waiting_chunks(self) -> int:
        """Chunks that wait to be copied."""
        return self._queue.chunk_count

    def stored(self, key: PageKey, group_head_hash: bytes) -> None:
        """A page came to where it stays: to disk, or to staging if it never goes to disk."""
        if self._factor(key.keyspace) > 1:
            self._add(key, group_head_hash)

    def used(self, key: PageKey, group_head_hash: bytes) -> None:
        """A reader got a page."""
        if self._hot.enabled and self._hot.used(key.keyspace + key.chunk_hash, self._clock.monotonic_s()):
            self._add(key, group_head_hash, self._limits.hot_copies)

    def most_read(self, count: int) -> list[tuple[bytes, float]]:
        """Chunks (keyspace id + hash) whose pages are leased most now, with leases a minute; none where none count."""
        return self._hot.most_used(count, self._clock.monotonic_s())

    def stop(self) -> None:
        """Begin no more copies; those under way end by themselves."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    async def ensure(self, chunks: Sequence[HeldChunk], copies: int = 0) -> KvPoolError | None:
        """Bring chunks of one group to as many nodes as they should be on; why that failed, if it did.

        copies: in all, at least. Too few nodes are no failure: a sweep comes back to it. Raises StoreUnavailable.
        """
        me = self._copying.placement.me()
        if me is None or not chunks:
            return None
        factor = max(copies, self._factor(chunks[0].keyspace))
        nodes = await self._copying.nodes()
        holders = await self._copying.holders(chunks)
        candidates = ranked(nodes, me, chunks[0].keyspace, chunks[0].group_head_hash)
        without_disk = {node.info.node_id for node in nodes if not takes_durable(node)}
        targets: dict[bytes, list[HeldChunk]] = {}
        for chunk in chunks:
            present = others(chunk, holders[chunk], me.node_id)
            had = {node.node_id for node in present}
            hosts = {me.host_id} | {node.host_id for node in present}
            had = had if not chunk.durable else had | without_disk
            left = [node for node in candidates if node.node_id not in had]
            for node in pick(left, factor - 1 - len(present), hosts, lambda _: True):
                targets.setdefault(node.node_id, []).append(chunk)
        by_id = {node.node_id: node for node in candidates}
        purpose = Purpose.HOT if copies else Purpose.REPLICA
        failure: KvPoolError | None = None
        for node_id, wanted in targets.items():
            report = await self._copying.copy(by_id[node_id], lacking(wanted, holders, node_id), purpose)
            failure = next(iter(report.failed.values()), failure)
        return failure

    def short(self, chunk: HeldChunk, holders: Sequence[Holder]) -> bool:
        """Whether a chunk has fewer copies than its keyspace wants."""
        me = self._copying.placement.me()
        return me is not None and len(others(chunk, holders, me.node_id)) + 1 < self._factor(chunk.keyspace)

    # Inside

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
            if group.name in self._running:  # what came meanwhile waits for its turn
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
                for held in self._copying.held.chunk(keyspace + chunk_hash)
                if held.group_head_hash == group.name[1]
            ]
            if self._copying.placement.me() is None:
                error = KvPoolError("this node is not registered with the index")
            else:
                error = await self.ensure(chunks, group.copies)
        except KvPoolError as raised:
            error = raised
        finally:
            self._running.discard(group.name)
        if error is not None:
            _log.info("%d chunks were not copied yet: %s", len(group.chunk_hashes), error)
            self._queue.failed(group, self._clock.monotonic_s())
        self._pump()
