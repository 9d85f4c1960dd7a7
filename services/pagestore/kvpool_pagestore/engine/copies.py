"""Copies of pages on other nodes: which nodes get them, and sending window by window.

Few pages are pinned or in memory at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvpool.core.cancel import CancelToken
from kvpool.core.clock import Clock
from kvpool.core.cluster import LiveNode, NodeInfo, RemoteSource
from kvpool.core.errors import (
    DeadlineExceeded,
    KvPoolError,
    PageCorrupt,
    QuotaExceeded,
    ServiceUnavailable,
    StaleIncarnation,
    Stopped,
)
from kvpool.core.fault_points import reach
from kvpool.core.page import PageKey
from kvpool_pagestore.core.keyspaces import Keyspace
from kvpool_pagestore.core.policy import PolicyBook
from kvpool_pagestore.core.replication import (
    HeldChunk,
    Holder,
    consecutive,
    missing,
    others,
    pick,
    ranked,
    takes_durable,
)
from kvpool_pagestore.engine.context import EngineContext
from kvpool_pagestore.engine.local_pages import HeldPage, LocalPages
from kvpool_pagestore.ports import NoPlacement, PageWrite, PeerPages, Placement, Workers

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
        self, target: NodeInfo, keyspace: Keyspace, items: Sequence[PageWrite], durable: bool, report: CopyReport
    ) -> None:
        errors: list[KvPoolError | None] = [ServiceUnavailable(f"{target.bulk_endpoint} did not answer")] * len(items)

        stop, loop = CancelToken(), asyncio.get_running_loop()
        # A durable answer waits for the peer's disk.
        stall_s = max(self._stall_s, self._timeout_s / 2) if durable else self._stall_s
        watch: asyncio.TimerHandle | None = None

        def moved() -> None:
            nonlocal watch
            if watch is not None:
                watch.cancel()
            watch = loop.call_later(stall_s, stop.cancel)

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


def _unpinned(item: PageWrite) -> PageWrite:
    """A pin is one node's: copies come and go without it."""
    if not item.metadata.pinned_until_us:
        return item
    return replace(item, metadata=replace(item.metadata, pinned_until_us=0))


_NODES_FRESH_S = 1.0

Wanted = tuple[HeldChunk, int]
"""A chunk and those of its shards that are to be copied."""


class CopyPlanner:
    """Decides which nodes get copies of chunks, and has them sent. Use on one event loop."""

    def __init__(
        self,
        placement: Placement,
        pusher: PagePusher,
        local: LocalPages,
        policies: PolicyBook,
        default_factor: int,
        clock: Clock,
    ) -> None:
        """default_factor: nodes that hold each page of a keyspace whose policy does not say how many."""
        self.placement = placement
        self.local = local
        self.is_alone = isinstance(placement, NoPlacement)
        self._pusher = pusher
        self._policies = policies
        self._default_factor = default_factor
        self._clock = clock
        self._nodes: Sequence[LiveNode] = ()
        self._nodes_until_s = float("-inf")
        self._sent_bytes: dict[bytes, int] = {}  # by node, since it reported its load last

    def factor(self, keyspace: bytes) -> int:
        """Return how many nodes should hold each page of a keyspace."""
        return self._policies.policy(keyspace).replication_factor or self._default_factor

    def replicated_keyspaces(self) -> set[bytes]:
        """Return the keyspaces whose pages should be on more nodes than one."""
        return {keyspace for keyspace in self.local.keyspaces() if self.factor(keyspace) > 1}

    def lacks_copies(self, chunk: HeldChunk, holders: Sequence[Holder]) -> bool:
        """Return whether a chunk is on fewer nodes than its keyspace wants."""
        me = self.placement.me()
        return me is not None and len(others(chunk, holders, me.node_id)) + 1 < self.factor(chunk.keyspace)

    async def ensure_copies(self, chunks: Sequence[HeldChunk], copies: int = 0) -> KvPoolError | None:
        """Bring chunks of one group to as many nodes as they should be on; return why that failed, if it did.

        copies: in all, at least. Too few nodes are not a failure: a later sweep tries again. Raises StoreUnavailable.
        """
        me = self.placement.me()
        if me is None or not chunks:
            return None
        factor = max(copies, self.factor(chunks[0].keyspace))
        nodes = await self.nodes()
        holders = await self.holders(chunks)
        candidates = ranked(nodes, me, chunks[0].keyspace, chunks[0].group_head_hash)
        without_disk = {node.info.node_id for node in nodes if not takes_durable(node)}
        targets: dict[bytes, list[HeldChunk]] = {}
        for chunk in chunks:
            present = others(chunk, holders[chunk], me.node_id)
            excluded = {node.node_id for node in present} | (without_disk if chunk.durable else set())
            hosts = {me.host_id} | {node.host_id for node in present}
            left = [node for node in candidates if node.node_id not in excluded]
            for node in pick(left, factor - 1 - len(present), hosts):
                targets.setdefault(node.node_id, []).append(chunk)
        by_id = {node.node_id: node for node in candidates}
        purpose = Purpose.HOT if copies else Purpose.REPLICA
        failure: KvPoolError | None = None
        for node_id, wanted in targets.items():
            report = await self.copy(by_id[node_id], lacking(wanted, holders, node_id), purpose)
            failure = next(iter(report.failed.values()), failure)
        return failure

    async def nodes(self, *, fresh: bool = False) -> Sequence[LiveNode]:
        """Return the live pagestores, at most a second old, or as of now. Raises StoreUnavailable and the like."""
        now_s = self._clock.monotonic_s()
        if fresh or now_s >= self._nodes_until_s:
            nodes = await self.placement.nodes()
            loads = {node.info.node_id: node.load for node in self._nodes}
            for node in nodes:
                if loads.get(node.info.node_id) != node.load:  # what was sent before is in the new figures
                    self._sent_bytes.pop(node.info.node_id, None)
            self._nodes, self._nodes_until_s = nodes, now_s + _NODES_FRESH_S
        return self._nodes

    def has_room(self, node: NodeInfo, size_bytes: int, *, durable: bool) -> bool:
        """Return whether a node takes so much without evicting older pages; one that has not reported its load does."""
        load = next((one.load for one in self._nodes if one.info.node_id == node.node_id), None)
        if load is None or not durable or not load.arena_capacity_bytes:
            return True
        return load.disk_free_bytes - self._sent_bytes.get(node.node_id, 0) >= size_bytes

    async def holders(self, chunks: Sequence[HeldChunk]) -> dict[HeldChunk, list[Holder]]:
        """Return the holders of chunks, asked of the index in one call.

        Raises StoreUnavailable and the like.
        """
        runs = [run for group in by_group(chunks) for run in consecutive(group)]
        holders = await self.placement.holders(runs) if runs else []
        return dict(zip((chunk for run in runs for chunk in run), holders, strict=True))

    async def copy(self, target: NodeInfo, wanted: Sequence[Wanted], purpose: Purpose) -> CopyReport:
        """Send pages of one keyspace to a node; durable ones become durable there before they count."""
        report = CopyReport()
        for durable in (True, False):
            keys: list[PageKey] = [
                key for chunk, shards in wanted if chunk.durable is durable for key in chunk.keys(shards)
            ]
            keyspace = self.local.keyspace(keys[0].keyspace) if keys else None
            if keyspace is not None:
                report.add(await self._pusher.copy(target, keyspace, keys, durable=durable, purpose=purpose))
        if any(isinstance(error, ServiceUnavailable | StaleIncarnation) for error in report.failed.values()):
            self._nodes_until_s = float("-inf")  # it may have gone
        sent = self._sent_bytes.get(target.node_id, 0)
        self._sent_bytes[target.node_id] = sent + report.copied_bytes
        return report

    def size_bytes(self, wanted: Iterable[Wanted]) -> int:
        """Return the exact bytes of those pages."""
        return self.local.size_bytes(key for chunk, shards in wanted for key in chunk.keys(shards))


def lacking(chunks: Sequence[HeldChunk], holders: dict[HeldChunk, list[Holder]], node_id: bytes) -> list[Wanted]:
    """Return the shards of chunks that a node lacks."""
    wanted = ((chunk, missing(chunk, holders.get(chunk, ()), node_id)) for chunk in chunks)
    return [(chunk, shards) for chunk, shards in wanted if shards]


def by_group(chunks: Iterable[HeldChunk]) -> list[list[HeldChunk]]:
    """Return chunks by their chain groups."""
    groups: dict[tuple[bytes, bytes], list[HeldChunk]] = {}
    for chunk in chunks:
        groups.setdefault((chunk.keyspace, chunk.group_head_hash), []).append(chunk)
    return list(groups.values())
