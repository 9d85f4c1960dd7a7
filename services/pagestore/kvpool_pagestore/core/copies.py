"""How many copies of a chunk's pages there are, and which nodes should get more. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvpool.core.cluster import LiveNode, NodeInfo
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.page import PageKey
from kvpool.core.placement import place


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldChunk:
    """Shards of one chunk that this node holds. durable: they are on its disk, else in its staging tier only."""

    keyspace: bytes
    chunk_hash: bytes
    chunk_index: int
    group_head_hash: bytes
    shards: int
    durable: bool
    grid: ShardGrid = field(compare=False)  # the keyspace's

    def lacking(self, present: int) -> int:
        """Shards that are missing beside these; 0 if these have all layers and heads of the chunk's, in any split."""
        return 0 if self.grid.covers(present, self.shards) else self.shards & ~present

    def keys(self, shards: int) -> list[PageKey]:
        """Those pages of the chunk that a bitmap names."""
        return [PageKey(self.keyspace, self.chunk_hash, shard) for shard in shards_in(self.shards & shards)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One live node and what it holds of one chunk."""

    node: NodeInfo
    disk_shards: int
    staging_shards: int

    def held(self, chunk: HeldChunk) -> int:
        """Shards that count as copies of the chunk's: of durable pages only durable copies."""
        return self.disk_shards if chunk.durable else self.disk_shards | self.staging_shards


def others(chunk: HeldChunk, holders: Iterable[Holder], my_id: bytes) -> list[NodeInfo]:
    """Nodes that stay and have copies of all that the chunk's pages have."""
    return [
        one.node
        for one in holders
        if one.node.node_id != my_id and not one.node.draining and not chunk.lacking(one.held(chunk))
    ]


def is_safe_without(my_id: bytes, others: Iterable[NodeInfo], placed: Collection[bytes], factor: int) -> bool:
    """Whether a node may give up its copy without fewer than `factor` being left, whatever the others do.

    Nodes that hold a copy outside of its placement decide by their ids: a node counts those that keep it by placement,
    and those with lower ids. Two of them that count each other would both give it up.
    """
    return sum(node.node_id in placed or node.node_id < my_id for node in others) >= factor


def missing(chunk: HeldChunk, holders: Iterable[Holder], node_id: bytes) -> int:
    """Shards of the chunk that a node lacks."""
    return next((chunk.lacking(one.held(chunk)) for one in holders if one.node.node_id == node_id), chunk.shards)


def takes_durable(node: LiveNode) -> bool:
    """Return whether a node has a disk; of one that has not reported its load yet that is assumed."""
    return node.load.disk_capacity_bytes > 0 or not node.load.arena_capacity_bytes


def ranked(nodes: Sequence[LiveNode], me: NodeInfo, keyspace: bytes, head: bytes) -> list[NodeInfo]:
    """The other nodes that take new pages, in the order of placement, those of this host last."""
    infos = [one.info for one in nodes if one.info.node_id != me.node_id and one.info.bulk_endpoint]
    placed = place(infos, keyspace=keyspace, chain_head=head, host_id="", count=len(infos))
    return sorted(placed, key=lambda node: node.host_id == me.host_id)


def pick(
    candidates: Sequence[NodeInfo], count: int, used_hosts: Collection[str], takes: Callable[[NodeInfo], bool]
) -> list[NodeInfo]:
    """The first `count` that take pages, each on a host of its own as long as there are such hosts."""
    chosen: list[NodeInfo] = []
    hosts = set(used_hosts)
    left = [node for node in candidates if takes(node)]
    for fresh_host in (True, False):
        for node in list(left):
            if len(chosen) < count and (not fresh_host or node.host_id not in hosts):
                chosen.append(node)
                hosts.add(node.host_id)
                left.remove(node)
    return chosen


def consecutive(chunks: Iterable[HeldChunk]) -> list[list[HeldChunk]]:
    """Chunks of one group as runs that one question to the index can be about."""
    runs: list[list[HeldChunk]] = []
    for chunk in sorted(chunks, key=lambda one: (one.durable, one.chunk_index, one.chunk_hash)):
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and last.chunk_index + 1 == chunk.chunk_index
            and last.shards == chunk.shards
            and last.durable == chunk.durable
        ):
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs
