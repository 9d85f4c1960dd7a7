"""Copies of chunks on other nodes: who has them, who should, and bringing them there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvpool.core.clock import Clock
from kvpool.core.cluster import LiveNode, NodeInfo
from kvpool.core.errors import ServiceUnavailable, StaleIncarnation
from kvpool.core.page import PageKey
from kvpool_pagestore.core.copies import HeldChunk, Holder, consecutive, missing
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.engine_held import HeldPages
from kvpool_pagestore.engine_moving import CopyReport, PageMover, Purpose
from kvpool_pagestore.ports_movement import Placement

_NODES_FRESH_S = 1.0

Wanted = tuple[HeldChunk, int]
"""A chunk and those of its shards that are to be copied."""


class Copying:
    """What replication, draining and rebalancing share. Use on one event loop."""

    def __init__(
        self, placement: Placement, mover: PageMover, held: HeldPages, keyspaces: KeyspaceBook, clock: Clock
    ) -> None:
        self.placement = placement
        self.held = held
        self._mover = mover
        self._keyspaces = keyspaces
        self._clock = clock
        self._nodes: Sequence[LiveNode] = ()
        self._nodes_until_s = float("-inf")
        self._sent_bytes: dict[bytes, int] = {}  # by node, since its load was last asked for

    async def nodes(self, *, fresh: bool = False) -> Sequence[LiveNode]:
        """The live pagestores, at most a second old, or as of now. Raises StoreUnavailable and the like."""
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
        """Whether a node takes so much without giving up older pages, as far as is known; one that just came may."""
        load = next((one.load for one in self._nodes if one.info.node_id == node.node_id), None)
        if load is None or not durable or not load.arena_capacity_bytes:
            return True
        return load.disk_free_bytes - self._sent_bytes.get(node.node_id, 0) >= size_bytes

    async def holders(self, chunks: Sequence[HeldChunk]) -> dict[HeldChunk, list[Holder]]:
        """Who else holds chunks, as the index knows now: one question for all of them.

        Raises StoreUnavailable and the like.
        """
        runs = [run for group in by_group(chunks) for run in consecutive(group)]
        holders = await self.placement.holders(runs) if runs else []
        return dict(zip((chunk for run in runs for chunk in run), holders, strict=True))

    async def copy(self, target: NodeInfo, wanted: Sequence[Wanted], purpose: Purpose) -> CopyReport:
        """Give pages of one keyspace to a node; durable ones become durable there before they count."""
        report = CopyReport()
        for durable in (True, False):
            keys: list[PageKey] = [
                key for chunk, shards in wanted if chunk.durable is durable for key in chunk.keys(shards)
            ]
            keyspace = self._keyspaces.find(keys[0].keyspace) if keys else None
            if keyspace is not None:
                report.add(await self._mover.copy(target, keyspace, keys, durable=durable, purpose=purpose))
        if any(isinstance(error, ServiceUnavailable | StaleIncarnation) for error in report.failed.values()):
            self._nodes_until_s = float("-inf")  # it may have gone
        sent = self._sent_bytes.get(target.node_id, 0)
        self._sent_bytes[target.node_id] = sent + report.copied_bytes
        return report

    def bytes_of(self, wanted: Sequence[Wanted]) -> int:
        """Exact bytes of those pages."""
        total = 0
        for chunk, shards in wanted:
            keyspace = self._keyspaces.find(chunk.keyspace)
            if keyspace is not None:
                total += sum(keyspace.page_bytes(key.shard) for key in chunk.keys(shards))
        return total


def lacking(chunks: Sequence[HeldChunk], holders: dict[HeldChunk, list[Holder]], node_id: bytes) -> list[Wanted]:
    """What a node lacks of chunks."""
    wanted = ((chunk, missing(chunk, holders.get(chunk, ()), node_id)) for chunk in chunks)
    return [(chunk, shards) for chunk, shards in wanted if shards]


def by_group(chunks: Iterable[HeldChunk]) -> list[list[HeldChunk]]:
    """Chunks with those of their chain group."""
    groups: dict[tuple[bytes, bytes], list[HeldChunk]] = {}
    for chunk in chunks:
        groups.setdefault((chunk.keyspace, chunk.group_head_hash), []).append(chunk)
    return list(groups.values())
