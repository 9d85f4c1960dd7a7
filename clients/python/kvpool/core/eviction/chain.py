"""Chain-aware eviction: only ends of chains go, and of these the one whose place brings the fewest hits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Generic

from kvpool.core.eviction.chain_nodes import HELD, MAX_HITS, NONE, PINNED, PRESENT, QUEUED, ChainNodes
from kvpool.core.eviction.chain_queues import ChainQueues
from kvpool.core.eviction.ghosts import GhostTable
from kvpool.core.eviction.port import PLAIN, K, Retention
from kvpool.core.eviction.retention import RetentionBook
from kvpool.core.eviction.reuse import ReuseModel

_HEATS = 7
"""Classes of heat: below 1/4, 1/2, 1, 2, 4 and 8 hits on the average key of the path, and above. Steps of two, because
that changes the chance of reuse by about half; few, because each has to be learned."""
_LENGTHS = 3  # classes of the length of the chain: below _MIDDLING_LENGTH, below four times that, and above
_MIDDLING_LENGTH = 32
_RANKS = _HEATS * (1 + _LENGTHS)  # of keys that never had a child, and of others by length
_GHOSTS = 2
"""Ghost cells for each key inside. More remember longer; beyond twice the cache little came of it, at 9 bytes each."""
_SAME_USE_SHARE = 128
"""Uses within a 128th of a turnover of the cache are one: several shards of a chunk, and a lookup and its load."""
_OLD_HITS = 64
"""A note of a ghost is its hits, at most this many less one, and beside them whether it ever had a child."""
_FIRST_REBUILD_USES = 256
_MIN_REBUILD_USES = 8192  # between two, later on: the model costs some milliseconds


class ChainPolicy(Generic[K]):
    """Never gives up a key while one of its descendants is inside, whatever the order in which they came.

    Which end of a chain goes: each key has a rank, made of the hits on its path per key (its heat), of the length of
    its chain, and of whether it ever had a child. Of each rank a model learns online how likely reuse is at which age,
    and the longest unused ends of all ranks are compared by what their place is worth by that. Keys that come back
    after they were given up are known by ghosts and keep their hits.

    A path's heat is diluted where chains part, or a popular system prompt would recommend every prompt that begins
    with it. What a rank means for reuse is nowhere assumed: it is learned, so that the policy fits traffic in which
    long chains come back rarely (chat) as well as one in which they do so often (agents).
    """

    def __init__(self) -> None:
        self._nodes: ChainNodes[K] = ChainNodes()
        self._queues: ChainQueues[K] = ChainQueues(self._nodes, _RANKS)
        self._model: ReuseModel[K] = ReuseModel(_RANKS, _HEATS)
        self._ghosts = GhostTable()
        self._book: RetentionBook[K] = RetentionBook()
        self._retained = self._book.retentions
        self._domain: Hashable = None  # of the key that came last, and its shelf
        self._shelf = self._queues.shelf(0, None)
        self._previous = NONE  # the node that was used last
        self._watched: list[K] = []  # of the request that goes on, those that the model watches
        self._newest = NONE  # the same while it has no place in the queues yet
        self._uses = 0
        self._rebuild_at = _FIRST_REBUILD_USES

    def __len__(self) -> int:
        return self._nodes.present_count

    def __contains__(self, key: K) -> bool:
        node = self._nodes.number_of.get(key, NONE)
        return node >= 0 and self._nodes.flags[node] & PRESENT != 0

    def insert(self, key: K, parent: K | None = None, *, domain: Hashable = None, retention: Retention = PLAIN) -> None:
        nodes = self._nodes
        node = nodes.number_of.get(key, NONE)
        if node >= 0 and nodes.flags[node] & PRESENT:
            self._use(node, key)
            if retention is not PLAIN or self._retained:
                self.retain(key, retention)
            return
        above = NONE if parent is None else nodes.number_of.get(parent, NONE)
        note = self._ghosts.take(key)
        newest = self._newest
        if above >= 0 and (note is None or not nodes.forks[above]):
            nodes.forks[above] += 1
            if nodes.forks[above] == 1 and above != newest:
                self._has_child(above)
        self._uses = now = self._uses + 1
        if now >= self._rebuild_at:
            self._rebuild()
        if above != self._previous and self._watched:
            self._end_request()
        node = nodes.add(node, key, parent, above)
        if newest >= 0 and not nodes.children[newest]:  # most get a child at once
            self._offer(newest)
        self._newest = self._previous = node
        nodes.last_use[node] = now
        if note is not None:
            nodes.hits[node] = note % _OLD_HITS + 1
            nodes.forks[node] = note // _OLD_HITS
        elif nodes.children[node]:  # it stood for itself while it was away
            nodes.hits[node], nodes.forks[node] = 0, 1
        self._warm(node, above)
        if retention is not PLAIN:
            self._book.note(key, retention)
            if self._book.pinned(key):
                nodes.flags[node] |= PINNED
        if self._retained:
            nodes.shelf[node] = self._queues.shelf(self._book.priority(key), domain)
        else:
            if domain is not self._domain:
                self._domain, self._shelf = domain, self._queues.shelf(0, domain)
            nodes.shelf[node] = self._shelf
        model = self._model
        if key in model.watched:
            self._watched.append(key)
        elif model.pass_over:
            model.pass_over -= 1
        else:
            model.pass_over = model.stride - 1
            self._watched.append(key)

    def restore(
        self, key: K, parent: K | None = None, *, domain: Hashable = None, retention: Retention = PLAIN
    ) -> None:
        nodes = self._nodes
        known = nodes.number_of.get(key, NONE)
        if retention is not PLAIN or (known >= 0 and nodes.flags[known] & PRESENT):
            self.insert(key, parent, domain=domain, retention=retention)
            return
        above = NONE if parent is None else nodes.number_of.get(parent, NONE)
        node = nodes.add(known, key, parent, above)
        nodes.last_use[node] = self._uses
        nodes.shelf[node] = self._queues.shelf(0, domain)
        nodes.forks[node] = 1  # not known to be a dead end: as most keys are
        if not nodes.children[node]:
            self._offer(node)

    def touch(self, key: K) -> None:
        node = self._nodes.find(key)
        if node >= 0:
            self._use(node, key)

    def hold(self, key: K) -> None:
        node = self._nodes.find(key)
        if node >= 0:
            self._nodes.flags[node] |= HELD

    def release(self, key: K) -> None:
        node = self._nodes.find(key)
        if node >= 0:
            self._nodes.flags[node] &= ~HELD
            if node != self._newest and not self._nodes.children[node]:
                self._offer(node)

    def retain(self, key: K, retention: Retention) -> None:
        node = self._nodes.find(key)
        if node >= 0 and (retention != PLAIN or self._retained):
            self._book.note(key, retention)
            self._settle(node, key)

    def remove(self, key: K) -> None:
        node = self._nodes.find(key)
        if node >= 0:
            if node == self._newest:
                self._newest = NONE
            self._take_out(node, key)

    def evict(
        self, now_us: int = 0, *, domains: Collection[Hashable] | None = None, spare: Callable[[K], bool] | None = None
    ) -> K | None:
        nodes = self._nodes
        if self._retained:
            for changed in self._book.advance(now_us):
                self._settle(nodes.find(changed), changed)
        if self._newest >= 0:
            self._offer_newest()
        spared: list[int] = []
        found: K | None = None
        while (node := self._queues.take(domains, self._model.values, self._uses)) >= 0:
            key = nodes.keys[node]
            assert key is not None
            if spare is None or not spare(key):
                if self._ghosts.cell_count < _GHOSTS * nodes.present_count:
                    self._ghosts.resize(_GHOSTS * nodes.present_count)
                hits = nodes.hits[node]
                note = hits if hits < _OLD_HITS else _OLD_HITS - 1
                self._ghosts.put(key, note + _OLD_HITS if nodes.forks[node] else note)
                self._take_out(node, key)
                found = key
                break
            spared.append(node)
        for node in spared:
            self._offer(node)
        return found

    # Inside

    def _use(self, node: int, key: K) -> None:
        nodes = self._nodes
        if self._uses - nodes.last_use[node] < nodes.present_count // _SAME_USE_SHARE:
            return
        self._uses = now = self._uses + 1
        if now >= self._rebuild_at:
            self._rebuild()
        above = nodes.parent[node]
        if above != self._previous and self._watched:
            self._end_request()
        if self._newest >= 0 and self._newest != node:
            self._offer_newest()
        self._newest = self._previous = node
        nodes.flags[node] &= ~QUEUED
        nodes.last_use[node] = now
        nodes.reach[node] = 0
        if nodes.hits[node] < MAX_HITS:
            nodes.hits[node] += 1
        self._warm(node, above)
        if key in self._model.watched:
            self._watched.append(key)

    def _rebuild(self) -> None:
        key_count = self._nodes.present_count
        self._model.rebuild(self._uses, key_count)
        self._rebuild_at = self._uses + max(min(self._uses, _MIN_REBUILD_USES), key_count // 2)

    def _has_child(self, node: int) -> None:
        """It got the first child that it ever had."""
        key = self._nodes.keys[node]
        if key is not None and key in self._model.watched:
            self._model.reclassify(key, self._rank_of(node))

    def _offer_newest(self) -> None:
        """No child came to the key that was used last."""
        node, self._newest = self._newest, NONE
        if not self._nodes.children[node]:
            self._offer(node)

    def _offer(self, node: int) -> None:
        self._queues.offer(node, self._rank_of(node))

    def _end_request(self) -> None:
        """Now it is known how long the chain is that the watched keys were used for."""
        nodes = self._nodes
        length = nodes.depth[self._previous] + 1
        for key in self._watched:
            node = nodes.find(key)
            if node < 0:  # it went already, or only stands for a parent
                self._model.use(key, self._uses, 0)
                continue
            if length > nodes.reach[node]:
                nodes.reach[node] = length
            self._model.use(key, nodes.last_use[node], self._rank_of(node))
        self._watched.clear()

    def _warm(self, node: int, above: int) -> None:
        """Bring its heat up to date from that of the node above it."""
        nodes = self._nodes
        heat: float = nodes.hits[node]
        if above >= 0:
            # One child of a parent is the turn that went on, another the end that it left behind; a third is a fork.
            forks = nodes.forks[above]
            heat += nodes.heat[above] / (forks - 1) if forks > 2 else nodes.heat[above]
        nodes.heat[node] = heat

    def _rank_of(self, node: int) -> int:
        """The class of a key for the model."""
        nodes = self._nodes
        depth = nodes.depth[node] + 1
        rank = int(4 * nodes.heat[node] / depth).bit_length()
        if rank >= _HEATS:
            rank = _HEATS - 1
        if not nodes.forks[node]:
            return rank
        length = nodes.reach[node]
        if length < depth:
            length = depth
        if length < _MIDDLING_LENGTH:
            return rank + _HEATS
        return rank + (2 * _HEATS if length < 4 * _MIDDLING_LENGTH else 3 * _HEATS)

    def _settle(self, node: int, key: K) -> None:
        """Its pin or priority is another one."""
        nodes = self._nodes
        nodes.flags[node] &= ~(PINNED | QUEUED)
        if self._book.pinned(key):
            nodes.flags[node] |= PINNED
        nodes.shelf[node] = self._queues.other_priority(nodes.shelf[node], self._book.priority(key))
        if node != self._newest and not nodes.children[node]:
            self._offer(node)

    def _take_out(self, node: int, key: K) -> None:
        if self._retained:
            self._book.forget(key)
        nodes = self._nodes
        last_use = nodes.last_use[node]
        above = nodes.drop(node)
        if above >= 0:
            length = nodes.reach[node] or nodes.depth[node] + 1
            if length >= _MIDDLING_LENGTH and length > nodes.reach[above]:
                nodes.reach[above] = length
            self._queues.expose(above, self._rank_of(above), last_use)
