"""A slow walk over all that is stored: heals lost copies, and brings new nodes their share.

Each node looks at its own pages only, at a time of its own, and one chain group at a time; so many nodes that notice
one event neither begin at once nor copy the same pages.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvpool.core.clock import Clock
from kvpool.core.cluster import LiveNode, NodeInfo
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey
from kvpool.core.placement import place
from kvpool_pagestore.core.copies import HeldChunk, Holder, is_safe_without, others, takes_durable
from kvpool_pagestore.core.pace import Pace
from kvpool_pagestore.engine_copying import Copying, Wanted, by_group, lacking
from kvpool_pagestore.engine_kept import KeptValue
from kvpool_pagestore.engine_moving import Purpose
from kvpool_pagestore.engine_replication import Replication
from kvpool_pagestore.engine_tasks import background, cancelled

_log = logging.getLogger(__name__)

_SLICE_CHUNKS = 256
_PAUSE_S = 0.01  # between two slices: a walk over a million chunks is in no hurry
_ANNOUNCED_TRIES = 20
_ID_BYTES = 16
_SETTLED_MAX = (
    4096  # nodes, beyond which those that are gone are forgotten: should one be back, a walk finds what it has
)
_ANNOUNCED_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLimits:
    """When the walk begins, and how much it may move."""

    interval_s: float
    rebalance_bytes_per_s: int  # to one new node, from all others together; 0: new nodes get nothing


class Sweep:
    """Runs between `start` and `stop`. drop: forgets pages of this node, which others hold by then."""

    def __init__(
        self,
        limits: SweepLimits,
        copying: Copying,
        replication: Replication,
        factor: Callable[[bytes], int],
        drop: Callable[[Sequence[PageKey]], None],
        replicated: Callable[[], Collection[bytes]],
        kept: KeptValue,
        clock: Clock,
    ) -> None:
        """`replicated` names the keyspaces that want more copies than one; `factor` how many one wants.

        kept: ids of the nodes that had their share, so that a restart goes on with those that had not.
        """
        self._limits = limits
        self._copying = copying
        self._replication = replication
        self._factor = factor
        self._drop = drop
        self._replicated = replicated
        self._kept = kept
        self._clock = clock
        self._pace = Pace(limits.rebalance_bytes_per_s) if limits.rebalance_bytes_per_s else None
        self._known: set[bytes] | None = None  # nodes that have had their share, or were there before us
        self._unsettled: set[bytes] = set()  # nodes that did not take all of their share in this walk
        self._random = random.Random()
        self._task: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Which nodes had their share from an earlier process. Raises StoreFault."""
        kept = await self._kept.load() if self._pace is not None else b""
        if kept:
            self._known = {kept[start : start + _ID_BYTES] for start in range(0, len(kept), _ID_BYTES)}

    def start(self) -> None:
        self._task = background(self._run(), "sweep")

    async def stop(self) -> None:
        task, self._task = self._task, None
        await cancelled(task)

    async def sweep(self) -> None:
        """One walk. Raises StoreUnavailable and the like."""
        me = self._copying.placement.me()
        if me is None or me.draining:
            return
        nodes = [node for node in await self._copying.nodes() if takes_durable(node)]
        ids = {node.info.node_id for node in nodes if not node.info.draining}
        if self._known is None:
            await self._settle(ids)
        assert self._known is not None
        joined = ids - self._known if self._pace is not None else set()
        self._unsettled.clear()
        replicated = self._replicated()
        if joined or replicated:
            for bucket in await self._copying.held.buckets(None if joined else replicated):
                for start in range(0, len(bucket), _SLICE_CHUNKS):
                    names = bucket[start : start + _SLICE_CHUNKS]
                    await self._look(names, me, nodes, joined, replicated)
        if not ids - self._unsettled <= self._known:
            await self._settle(self._known | (ids - self._unsettled))

    # Inside

    async def _settle(self, ids: set[bytes]) -> None:
        if len(ids) > _SETTLED_MAX:
            ids = ids & {node.info.node_id for node in await self._copying.nodes()}
        self._known = ids
        if self._pace is not None:
            await self._kept.save(b"".join(sorted(self._known)))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._limits.interval_s * self._random.uniform(0.5, 1.5))
            try:
                await self.sweep()
            except KvPoolError as error:
                _log.warning("looking after copies is put off: %s", error)

    async def _look(
        self,
        names: Sequence[bytes],
        me: NodeInfo,
        nodes: Sequence[LiveNode],
        joined: set[bytes],
        replicated: Collection[bytes],
    ) -> None:
        """Look at some chunks: one question to the index for those that should have copies."""
        groups = by_group(chunk for name in names for chunk in self._copying.held.chunk(name))
        if joined:
            for group in groups:
                await asyncio.sleep(0)  # placement takes a millisecond among a thousand nodes
                await self._rebalance(group, me, nodes, joined)
        wanted = [group for group in groups if group[0].keyspace in replicated]
        holders = await self._copying.holders([chunk for group in wanted for chunk in group])
        for group in wanted:
            await self._heal(group, holders)
        await asyncio.sleep(_PAUSE_S)

    async def _heal(self, group: Sequence[HeldChunk], holders: Mapping[HeldChunk, Sequence[Holder]]) -> None:
        short = [chunk for chunk in group if self._replication.short(chunk, holders[chunk])]
        error = await self._replication.ensure(short) if short else None
        if error is not None:
            _log.info("%d chunks have too few copies: %s", len(short), error)

    async def _rebalance(
        self, group: Sequence[HeldChunk], me: NodeInfo, nodes: Sequence[LiveNode], joined: set[bytes]
    ) -> None:
        """Bring a group to a new node whose it is by placement now, and forget it here if there are enough copies."""
        durable = [chunk for chunk in group if chunk.durable]
        if not durable or self._pace is None:
            return
        first, factor = durable[0], max(1, self._factor(durable[0].keyspace))
        infos = [node.info for node in nodes]
        placed = place(infos, keyspace=first.keyspace, chain_head=first.group_head_hash, host_id="", count=factor)
        for target in placed:
            if target.node_id not in joined or target.node_id == me.node_id:
                continue
            wanted = lacking(durable, await self._copying.holders(durable), target.node_id)
            senders = max(1, len({info.node_id for info in infos} - joined))
            if not await self._paced_copy(target, wanted, senders):
                self._unsettled.add(target.node_id)  # the next walk brings what is missing
                return
        if me.node_id not in {node.node_id for node in placed}:
            await self._forget(durable, me, factor, {node.node_id for node in placed}, joined)

    async def _paced_copy(self, target: NodeInfo, wanted: Sequence[Wanted], senders: int) -> bool:
        """Whether the node took all of it. The rate is what it gets from all `senders` together."""
        assert self._pace is not None
        for one in wanted:
            await asyncio.sleep(self._pace.wait_s(senders * self._copying.bytes_of([one]), self._clock.monotonic_s()))
            report = await self._copying.copy(target, [one], Purpose.REBALANCE)
            if report.failed:
                return False
        return True

    async def _forget(
        self, chunks: Sequence[HeldChunk], me: NodeInfo, factor: int, placed: set[bytes], joined: set[bytes]
    ) -> None:
        """Only what the index, too, knows of enough others, a new node among them: durable there, and to be found."""
        targets = placed & joined
        if not targets:
            return
        for attempt in range(_ANNOUNCED_TRIES):
            holders = await self._copying.holders(chunks)
            safe = [
                chunk
                for chunk in chunks
                if is_safe_without(me.node_id, others(chunk, holders[chunk], me.node_id), placed, factor)
                and any(node.node_id in targets for node in others(chunk, holders[chunk], me.node_id))
            ]
            if len(safe) == len(chunks) or attempt == _ANNOUNCED_TRIES - 1:
                break
            await asyncio.sleep(_ANNOUNCED_PAUSE_S)
        self._drop([key for chunk in safe for key in chunk.keys(chunk.shards)])
