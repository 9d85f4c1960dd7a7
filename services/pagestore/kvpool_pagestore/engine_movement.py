"""Everything that brings pages to other nodes, put together: replication, sweeps, draining."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kvpool.core.errors import Draining, KvPoolError
from kvpool.core.page import PageKey
from kvpool_pagestore.config import PageStoreConfig
from kvpool_pagestore.core.admission import AdmissionPurpose, AdmissionRequest
from kvpool_pagestore.core.events import DiskChanged, PagesRead, StagingChanged
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.policy import PolicyBook
from kvpool_pagestore.engine_copying import Copying
from kvpool_pagestore.engine_disk import DiskTier
from kvpool_pagestore.engine_drain import Drain
from kvpool_pagestore.engine_held import HeldPages
from kvpool_pagestore.engine_kept import KeptValue
from kvpool_pagestore.engine_moving import PageMover
from kvpool_pagestore.engine_parts import EngineParts
from kvpool_pagestore.engine_replication import Replication, ReplicationLimits
from kvpool_pagestore.engine_sealing import Sealing
from kvpool_pagestore.engine_space import ArenaSpace
from kvpool_pagestore.engine_sweep import Sweep, SweepLimits
from kvpool_pagestore.engine_tasks import EngineTasks
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.ports_movement import NoPlacement

_RETRY_FIRST_S = 0.5
_RETRY_LAST_S = 60.0


class Movement:
    """flush: makes what is dirty durable; it raises StoreFault."""

    def __init__(
        self,
        config: PageStoreConfig,
        parts: EngineParts,
        policies: PolicyBook,
        ledger: PageTable,
        space: ArenaSpace,
        sealing: Sealing,
        disk: DiskTier | None,
        keyspaces: KeyspaceBook,
        flush: Callable[[], Awaitable[object]],
        tasks: EngineTasks,
        metrics: PageStoreMetrics,
    ) -> None:
        self._policies = policies
        self._disk = disk
        self._keyspaces = keyspaces
        self._alone = isinstance(parts.placement, NoPlacement)
        self._default_factor = config.replication_factor
        timeout_s = config.push_timeout_ms / 1e3
        pushers = parts.workers.push or parts.workers.pull
        mover = PageMover(ledger, space, sealing, disk, parts.peers, pushers, tasks, metrics, timeout_s)
        clock = parts.clock
        copying = Copying(parts.placement, mover, HeldPages(ledger, disk, keyspaces), keyspaces, clock)
        limits = ReplicationLimits(
            queue_chunks=config.replica_queue_chunks,
            groups_at_once=2 * config.push_threads,
            linger_s=config.replica_linger_ms / 1e3,
            retry_first_s=_RETRY_FIRST_S,
            retry_last_s=_RETRY_LAST_S,
            hot_uses_per_minute=config.hot_uses_per_minute,
            hot_copies=config.hot_copies,
        )
        self.replication = Replication(limits, copying, self.factor, tasks, metrics, clock)
        sweeps = SweepLimits(
            interval_s=config.sweep_interval_ms / 1e3, rebalance_bytes_per_s=config.rebalance_bytes_per_s
        )
        settled = KeptValue(disk, "settled-nodes", tasks)
        self.sweep = Sweep(sweeps, copying, self.replication, self.factor, self._drop, self._replicated, settled, clock)
        drain_kept = KeptValue(disk, "draining", tasks)
        self.drain = Drain(copying, flush, lambda: ledger.writer_bytes > ledger.dirty_bytes, drain_kept)

    def disk_changed(self, changed: DiskChanged) -> None:
        """Replicate what became durable."""
        if changed.present and not self._alone:
            for key, group_head_hash in changed.pages:
                self.replication.stored(key, group_head_hash)

    def staging_changed(self, changed: StagingChanged) -> None:
        """Replicate what came to staging and never goes to disk."""
        key, metadata = changed.record.key, changed.record.metadata
        if changed.present and not self._alone and self._policies.plan(key.keyspace).write_at_uses is None:
            self.replication.stored(key, metadata.group_head_hash)

    def pages_read(self, read: PagesRead) -> None:
        """Count what makes a chunk hot."""
        if not self._alone:
            for record in read.records:
                self.replication.used(record.key, record.metadata.group_head_hash)

    def refusal(self, request: AdmissionRequest) -> KvPoolError | None:
        """An AdmissionRule: nothing new is stored while the node is drained."""
        if request.purpose is AdmissionPurpose.STORE and self.drain.refuses_pages:
            return Draining("this pagestore is being drained")
        return None

    def factor(self, keyspace: bytes) -> int:
        """Nodes that should hold each page of a keyspace."""
        return self._policies.policy(keyspace).replication_factor or self._default_factor

    async def load(self) -> None:
        """Take over what an earlier process had begun. Raises StoreFault."""
        if not self._alone:
            await self.drain.load()
            await self.sweep.load()

    def start(self) -> None:
        """Begin to look after copies. Call once the node serves."""
        if not self._alone:
            self.sweep.start()
            self.drain.start()

    async def stop(self) -> None:
        """Begin nothing more."""
        self.replication.stop()
        await self.sweep.stop()
        await self.drain.stop()

    def _replicated(self) -> set[bytes]:
        """Keyspaces that want more copies than one."""
        return {one.keyspace for one in self._keyspaces.all() if self.factor(one.keyspace) > 1}

    def _drop(self, keys: Sequence[PageKey]) -> None:
        """Others hold them on disk: here they go from disk. A copy in staging stays as long as it is used."""
        if self._disk is not None and keys:
            self._disk.discard(keys)
