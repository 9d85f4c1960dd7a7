"""Copies of chunks on other nodes: who has them, who should, and bringing them there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvpool.core.clock import Clock
from kvpool.core.cluster import LiveNode, NodeInfo
from kvpool.core.errors import KvPoolError, ServiceUnavailable, StaleIncarnation
from kvpool.core.page import PageKey
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
from kvpool_pagestore.engine_local_pages import LocalPages
from kvpool_pagestore.engine_push import CopyReport, PagePusher, Purpose
from kvpool_pagestore.ports import NoPlacement, Placement

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
