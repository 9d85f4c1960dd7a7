"""Pages of this node on their way to others: held or read back window by window, never more than a few windows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvpool.core.cluster import NodeInfo
from kvpool.core.errors import KvPoolError, PageCorrupt, QuotaExceeded, ServiceUnavailable
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey
from kvpool_pagestore.core.keyspaces import Keyspace
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.core.slots import Slot
from kvpool_pagestore.engine_disk import DiskTier
from kvpool_pagestore.engine_sealing import Sealing
from kvpool_pagestore.engine_space import ArenaSpace
from kvpool_pagestore.engine_tasks import EngineTasks
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.ports import PeerPages, PushItem, RemoteSource, Workers

_log = logging.getLogger(__name__)

_WINDOW_PAGES = 16
_WINDOW_BYTES = 64 << 20


class Purpose(Enum):
    """Why a page is copied to another node: a label of metrics."""

    REPLICA = "replica"
    HOT = "hot"
    DRAIN = "drain"
    REBALANCE = "rebalance"


_MOVES = (Purpose.DRAIN, Purpose.REBALANCE)  # the page is the target's then, and its pin goes with it


@dataclass(slots=True)
class CopyReport:
    """What became of pages that were to be copied. gone: they were no longer here, which is nobody's fault."""

    copied: list[PageKey] = field(default_factory=list)
    copied_bytes: int = 0
    gone: list[PageKey] = field(default_factory=list)
    failed: dict[PageKey, KvPoolError] = field(default_factory=dict)

    def add(self, other: CopyReport) -> None:
        self.copied += other.copied
        self.copied_bytes += other.copied_bytes
        self.gone += other.gone
        self.failed.update(other.failed)


@dataclass(slots=True)
class _Window:
    """Pages of one stream, their bytes held: slots are pinned, the rest was read from disk."""

    items: list[PushItem] = field(default_factory=list)
    pinned: list[Slot] = field(default_factory=list)


class PageMover:
    """Copies pages to other nodes. Slots are pinned and bytes read only once there is a stream to send them on."""

    def __init__(
        self,
        ledger: PageTable,
        space: ArenaSpace,
        sealing: Sealing,
        disk: DiskTier | None,
        peers: PeerPages,
        pushers: Workers,
        tasks: EngineTasks,
        metrics: PageStoreMetrics,
        timeout_s: float,
    ) -> None:
        self._ledger = ledger
        self._space = space
        self._sealing = sealing
        self._disk = disk
        self._peers = peers
        self._pushers = pushers
        self._tasks = tasks
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._streams = asyncio.Semaphore(pushers.threads)

    async def copy(
        self,
        target: NodeInfo,
        keyspace: Keyspace,
        keys: Sequence[PageKey],
        *,
        durable: bool,
        purpose: Purpose,
    ) -> CopyReport:
        """Give pages to a node; ends early when one of its windows fails as a whole, its other pages unsent.

        durable: a page counts as copied only once it is on the target's disk.
        """
        report = CopyReport()
        window_pages = max(1, min(_WINDOW_PAGES, _WINDOW_BYTES // max(1, keyspace.page_bytes(0))))
        for start in range(0, len(keys), window_pages):
            part = keys[start : start + window_pages]
            # Also when the caller is cancelled the thread goes on reading; slots are held until it has ended.
            sent = await self._tasks.finish(self._copy_window(target, keyspace, part, durable, purpose), "push-pages")
            report.add(sent)
            self._count(sent, purpose)
            if sent.failed and not sent.copied:
                error = next(iter(sent.failed.values()))
                report.failed.update((key, error) for key in keys[start + window_pages :])
                break
        return report

    # Inside

    async def _copy_window(
        self, target: NodeInfo, keyspace: Keyspace, keys: Sequence[PageKey], durable: bool, purpose: Purpose
    ) -> CopyReport:
        report = CopyReport()
        async with self._streams:
            window = _Window()
            try:
                for key in keys:
                    await self._hold(window, keyspace, key, report)
                items = window.items if purpose in _MOVES else [_unpinned(item) for item in window.items]
                if items:
                    await self._push(target, keyspace, items, durable, report)
                # A target that may pin no more still takes the page: moved without its pin is better than lost.
                refused = [item for item in items if isinstance(report.failed.get(item.key), QuotaExceeded)]
                again = [_unpinned(item) for item in refused if item.metadata.pinned_until_us]
                for item in again:
                    del report.failed[item.key]
                if again:
                    await self._push(target, keyspace, again, durable, report)
            finally:
                for slot in window.pinned:
                    self._ledger.unpin(slot)
        return report

    async def _hold(self, window: _Window, keyspace: Keyspace, key: PageKey, report: CopyReport) -> None:
        slot = self._ledger.find(key)
        if slot is not None:
            self._ledger.pin(slot)
            window.pinned.append(slot)
            (error,) = await self._sealing.seal([slot])
            if error is not None:
                report.failed[key] = error
                return
            window.items.append(PushItem(key=key, page=self._space.view(slot), metadata=slot.page.metadata))
            return
        metadata = self._disk.map.metadata(key) if self._disk is not None and key in self._disk else None
        if self._disk is None or metadata is None:
            report.gone.append(key)
            return
        # Beside the arena: what moves away must not push out what readers want.
        buffer = memoryview(bytearray(keyspace.page_bytes(key.shard)))
        error = await self._disk.read(key, keyspace, buffer)
        if error is None:
            window.items.append(PushItem(key=key, page=buffer, metadata=metadata))
        elif key in self._disk:
            report.failed[key] = error
        else:
            report.gone.append(key)

    async def _push(
        self, target: NodeInfo, keyspace: Keyspace, items: Sequence[PushItem], durable: bool, report: CopyReport
    ) -> None:
        errors: list[KvPoolError | None] = [ServiceUnavailable(f"{target.bulk_endpoint} did not answer")] * len(items)

        def push() -> None:
            reach("pagestore.push.start")
            where = RemoteSource(
                node_id=target.node_id, incarnation=target.incarnation, bulk_endpoint=target.bulk_endpoint
            )
            self._peers.push(
                where,
                keyspace.spec,
                items,
                self._timeout_s,
                require_durable=durable,
                on_page=errors.__setitem__,
            )
            reach("pagestore.push.end")

        try:
            await self._pushers.run(push)
        except KvPoolError as refused:  # no room in the queue, or closing
            errors = [refused] * len(items)
        for item, error in zip(items, errors, strict=True):
            if error is None:
                report.copied.append(item.key)
                report.copied_bytes += len(item.page)
            else:
                report.failed[item.key] = error
                if isinstance(error, PageCorrupt):
                    self._suspect(keyspace, item.key)

    def _suspect(self, keyspace: Keyspace, key: PageKey) -> None:
        """The receiver says that the bytes are damaged: ours may be."""
        _log.error("page %s fails verification at the node it was copied to, and is looked at again here", key)
        self._ledger.drop(key)
        if self._disk is not None and key in self._disk:
            self._tasks.start(self._disk.recheck(key, keyspace), "recheck-disk")

    def _count(self, sent: CopyReport, purpose: Purpose) -> None:
        self._metrics.moved_pages.labels(purpose.value).inc(len(sent.copied))
        self._metrics.moved_bytes.labels(purpose.value).inc(sent.copied_bytes)
        for error in sent.failed.values():
            self._metrics.move_failures.labels(purpose.value, error.reason).inc()


def _unpinned(item: PushItem) -> PushItem:
    """A pin is one node's: copies come and go without it."""
    if not item.metadata.pinned_until_us:
        return item
    return replace(item, metadata=replace(item.metadata, pinned_until_us=0))
