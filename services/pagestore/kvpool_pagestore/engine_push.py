"""Sending pages to other nodes: window by window, so that few pages are pinned or in memory at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvpool.core.cluster import NodeInfo
from kvpool.core.errors import DeadlineExceeded, KvPoolError, PageCorrupt, QuotaExceeded, ServiceUnavailable, Stopped
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey
from kvpool_pagestore.core.keyspaces import Keyspace
from kvpool_pagestore.engine_context import EngineContext
from kvpool_pagestore.engine_local_pages import HeldPage, LocalPages
from kvpool_pagestore.engine_stop import StopSignal
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
    """What became of pages that were to be copied. gone: they were evicted here meanwhile, which is not a failure."""

    copied: list[PageKey] = field(default_factory=list)
    copied_bytes: int = 0
    gone: list[PageKey] = field(default_factory=list)
    failed: dict[PageKey, KvPoolError] = field(default_factory=dict)

    def add(self, other: CopyReport) -> None:
        self.copied += other.copied
        self.copied_bytes += other.copied_bytes
        self.gone += other.gone
        self.failed.update(other.failed)


class PagePusher:
    """Copies pages to other nodes. Slots are pinned and bytes read only once there is a stream to send them on."""

    def __init__(
        self,
        local: LocalPages,
        peers: PeerPages,
        workers: Workers,
        context: EngineContext,
        timeout_s: float,
        stall_s: float,
    ) -> None:
        """timeout_s: of one window. stall_s: a node that answers nothing for so long is given up."""
        self._local = local
        self._peers = peers
        self._workers = workers
        self._tasks, self._metrics = context.tasks, context.metrics
        self._timeout_s, self._stall_s = timeout_s, stall_s
        self._streams = asyncio.Semaphore(workers.threads)

    async def copy(
        self,
        target: NodeInfo,
        keyspace: Keyspace,
        keys: Sequence[PageKey],
        *,
        durable: bool,
        purpose: Purpose,
    ) -> CopyReport:
        """Send pages to a node; end early when a window fails as a whole, and report the rest as failed.

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
        held: list[HeldPage] = []
        async with self._streams:
            try:
                for key in keys:
                    page = await self._local.hold(keyspace, key)
                    if page is None:
                        report.gone.append(key)
                    elif isinstance(page, KvPoolError):
                        report.failed[key] = page
                    else:
                        held.append(page)
                items = [page.item if purpose in _MOVES else _unpinned(page.item) for page in held]
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
                for page in held:
                    self._local.release(page)
        return report

    async def _push(
        self, target: NodeInfo, keyspace: Keyspace, items: Sequence[PushItem], durable: bool, report: CopyReport
    ) -> None:
        errors: list[KvPoolError | None] = [ServiceUnavailable(f"{target.bulk_endpoint} did not answer")] * len(items)

        stop, loop = StopSignal(), asyncio.get_running_loop()
        watch: asyncio.TimerHandle | None = None

        def moved() -> None:
            nonlocal watch
            if watch is not None:
                watch.cancel()
            watch = loop.call_later(self._stall_s, stop.stop)

        def answered(index: int, error: KvPoolError | None) -> None:  # on the pushing thread
            errors[index] = error
            loop.call_soon_threadsafe(moved)

        def push() -> None:
            reach("pagestore.push.start")
            loop.call_soon_threadsafe(moved)
            where = RemoteSource(
                node_id=target.node_id, incarnation=target.incarnation, bulk_endpoint=target.bulk_endpoint
            )
            self._peers.push(
                where,
                keyspace.spec,
                items,
                self._timeout_s,
                require_durable=durable,
                on_page=answered,
                stop=stop,
            )
            reach("pagestore.push.end")

        try:
            await self._workers.run(push)
        except KvPoolError as refused:  # no room in the queue, or closing
            errors = [refused] * len(items)
        finally:
            if watch is not None:
                watch.cancel()
        for item, error in zip(items, errors, strict=True):
            if error is None:
                report.copied.append(item.key)
                report.copied_bytes += len(item.page)
            else:
                if isinstance(error, Stopped):
                    error = DeadlineExceeded(f"{target.bulk_endpoint} answered nothing for {self._stall_s:g} s")
                report.failed[item.key] = error
                if isinstance(error, PageCorrupt):
                    _log.error("page %s fails verification at the node it was copied to: verified again here", item.key)
                    self._local.start_recheck(keyspace, item.key)

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
