"""Which chunks should be copied to which nodes: copies there are, chunks that wait to be copied, chunks read often.

No I/O; time is passed in.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvpool.core.cluster import LiveNode, NodeInfo
from kvpool.core.grid import ShardGrid
from kvpool.core.page import PageKey
from kvpool.core.placement import place
from kvpool_pagestore.core.keyspaces import chunk_pages

_HALF_LIFE_S = 60.0
# Of uses at a steady rate r, halving every minute, the sum settles at r * 60 / ln 2: so many minutes' worth.
_MINUTES = 1.4427
_LOOKED_AT = 4096  # chunks used last: what is used most is among them, and looking takes 2 ms

GroupName = tuple[bytes, bytes]
"""Keyspace id and hash of the group's head."""


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
        return chunk_pages(self.keyspace, self.chunk_hash, self.shards & shards)


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
    """Return the nodes that stay and have copies of all of the chunk's pages."""
    return [
        one.node
        for one in holders
        if one.node.node_id != my_id and not one.node.draining and not chunk.lacking(one.held(chunk))
    ]


def is_safe_without(my_id: bytes, others: Iterable[NodeInfo], placed: Collection[bytes], factor: int) -> bool:
    """Return whether a node may give up its copy without fewer than `factor` being left, whatever the others do.

    Nodes that hold a copy outside of its placement decide by their ids: a node counts those that keep it by placement,
    and those with lower ids. Two of them that count each other would both give it up.
    """
    return sum(node.node_id in placed or node.node_id < my_id for node in others) >= factor


def missing(chunk: HeldChunk, holders: Iterable[Holder], node_id: bytes) -> int:
    """Return the shards of the chunk that a node lacks."""
    return next((chunk.lacking(one.held(chunk)) for one in holders if one.node.node_id == node_id), chunk.shards)


def takes_durable(node: LiveNode) -> bool:
    """Return whether a node has a disk; of one that has not reported its load yet that is assumed."""
    return node.load.disk_capacity_bytes > 0 or not node.load.arena_capacity_bytes


def ranked(nodes: Sequence[LiveNode], me: NodeInfo, keyspace: bytes, head: bytes) -> list[NodeInfo]:
    """Return the other nodes that take new pages, in the order of placement, those of this host last."""
    infos = [one.info for one in nodes if one.info.node_id != me.node_id and one.info.bulk_endpoint]
    placed = place(infos, keyspace=keyspace, chain_head=head, host_id="", count=len(infos))
    return sorted(placed, key=lambda node: node.host_id == me.host_id)


def pick(candidates: Iterable[NodeInfo], count: int, used_hosts: Collection[str]) -> list[NodeInfo]:
    """Return the first `count`, each on a host of its own as long as there are such hosts."""
    chosen: list[NodeInfo] = []
    hosts = set(used_hosts)
    left = list(candidates)
    for fresh_host in (True, False):
        for node in list(left):
            if len(chosen) < count and (not fresh_host or node.host_id not in hosts):
                chosen.append(node)
                hosts.add(node.host_id)
                left.remove(node)
    return chosen


def consecutive(chunks: Iterable[HeldChunk]) -> list[list[HeldChunk]]:
    """Return chunks of one group as runs, each of which one query to the index can name."""
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


@dataclass(slots=True, eq=False)
class ReplicaGroup:
    """What of one chain group is to be copied."""

    name: GroupName
    chunk_hashes: set[bytes] = field(default_factory=set)
    copies: int = 0  # in all, at least; 0: as many as the keyspace wants
    failures: int = 0


class ReplicaQueue:
    """Groups by the time at which they are due. Time is passed in.

    max_chunks: what waits at most; more is refused, and found again by a sweep over what is stored.
    """

    def __init__(self, *, max_chunks: int, linger_s: float, retry_first_s: float, retry_last_s: float) -> None:
        self._max_chunks = max_chunks
        self._linger_s = linger_s
        self._retry_first_s = retry_first_s
        self._retry_last_s = retry_last_s
        self._waiting: dict[GroupName, ReplicaGroup] = {}
        self._due: list[tuple[float, GroupName]] = []  # a heap; one entry for each waiting group
        self.chunk_count = 0

    def add(self, key: PageKey, group_head_hash: bytes, now_s: float, copies: int = 0) -> bool:
        """Queue a page to be copied. Return False if there is no room to remember it."""
        name = (key.keyspace, group_head_hash)
        group = self._waiting.get(name)
        if group is not None and key.chunk_hash in group.chunk_hashes:
            group.copies = max(group.copies, copies)
            return True
        if self.chunk_count >= self._max_chunks:
            return False
        if group is None:
            group = self._wait(ReplicaGroup(name), now_s + self._linger_s)
        group.chunk_hashes.add(key.chunk_hash)
        group.copies = max(group.copies, copies)
        self.chunk_count += 1
        return True

    def take(self, now_s: float) -> ReplicaGroup | None:
        """Take a group that is due, to copy it. Pages of it that come meanwhile wait as a group of their own."""
        if not self._due or self._due[0][0] > now_s:
            return None
        name = heapq.heappop(self._due)[1]
        group = self._waiting.pop(name)
        self.chunk_count -= len(group.chunk_hashes)
        return group

    def failed(self, group: ReplicaGroup, now_s: float) -> bool:
        """Queue a group that could not be copied for a later try. Return False if there is no room to remember it."""
        if self.chunk_count + len(group.chunk_hashes) > self._max_chunks:
            return False
        delay_s = min(self._retry_last_s, self._retry_first_s * 2.0 ** min(group.failures, 32))
        known = self._waiting.get(group.name)
        if known is None:
            known = self._wait(ReplicaGroup(group.name), now_s + delay_s)
        known.failures = max(known.failures, group.failures + 1)
        known.copies = max(known.copies, group.copies)
        self.chunk_count += len(group.chunk_hashes - known.chunk_hashes)
        known.chunk_hashes |= group.chunk_hashes
        return True

    def next_due_s(self) -> float | None:
        """Return when the next group is due; None if none waits."""
        return self._due[0][0] if self._due else None

    def _wait(self, group: ReplicaGroup, due_s: float) -> ReplicaGroup:
        self._waiting[group.name] = group
        heapq.heappush(self._due, (due_s, group.name))
        return group


class HotChunks:
    """Uses of chunks, of which old ones count less and less. Time is passed in.

    uses_per_minute: from which rate on a chunk is hot; 0: none is. capacity: chunks counted; the longest unused go.
    """

    def __init__(self, *, uses_per_minute: int, capacity: int) -> None:
        self._threshold = uses_per_minute * _MINUTES / 2  # reached within a minute of the rate
        self._capacity = capacity
        self._uses: OrderedDict[bytes, tuple[float, float, bool]] = OrderedDict()  # count, as of when, reported

    @property
    def enabled(self) -> bool:
        return self._threshold > 0

    def used(self, chunk: bytes, now_s: float) -> bool:
        """Count one use. True when the chunk has just become hot; again only after it cooled to half of that."""
        count, at_s, reported = self._uses.pop(chunk, (0.0, now_s, False))
        count = count * 0.5 ** ((now_s - at_s) / _HALF_LIFE_S) + 1.0
        if count < self._threshold / 2:
            reported = False
        hot = count >= self._threshold and not reported
        self._uses[chunk] = (count, now_s, reported or hot)
        if len(self._uses) > self._capacity:
            self._uses.popitem(last=False)
        return hot

    def most_used(self, count: int, now_s: float) -> list[tuple[bytes, float]]:
        """Chunks used most now, of those used last, with their uses a minute; the most used first."""
        rates = (
            (uses * 0.5 ** ((now_s - at_s) / _HALF_LIFE_S) / _MINUTES, chunk)
            for chunk, (uses, at_s, _) in islice(reversed(self._uses.items()), _LOOKED_AT)
        )
        return [(chunk, rate) for rate, chunk in heapq.nlargest(count, rates)]
