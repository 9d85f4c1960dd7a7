"""Ends of chains that may go, in a queue for each priority, domain and rank."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic

import numpy as np

from kvpool.core.eviction.chain_nodes import NONE, PRESENT, QUEUED, ChainNodes
from kvpool.core.eviction.place_values import AGE_BUCKETS, EDGES, age_bucket
from kvpool.core.eviction.port import K

_READY = PRESENT | QUEUED  # and neither held nor pinned
_SLACK = 64
_TAKES_A_CHOICE = 2
"""Chains of which ends are taken from a queue before the queues are compared again."""

_NODE_BITS = 32
_NODE = (1 << _NODE_BITS) - 1
_NEVER = 1 << 62
_NEXT_AGES = [*np.ceil(EDGES[1:AGE_BUCKETS]).astype(int).tolist(), _NEVER]
"""By age bucket, the age at which the next one begins."""


class ChainQueues(Generic[K]):
    """Entries are left where they are when a node changes; `take` throws out those that fit their node no more."""

    def __init__(self, nodes: ChainNodes[K], rank_count: int) -> None:
        self._nodes = nodes
        self._rank_count = rank_count
        self._shelves: list[tuple[int, Hashable]] = []  # priority, domain
        self._shelf_of: dict[tuple[int, Hashable], int] = {}
        self._queues: list[list[list[int]]] = []  # by shelf and rank: heaps of last use, then node, in one number
        self._limits: list[list[int]] = []  # entries of a queue before it is cleaned
        self._by_priority: list[list[int]] = []  # shelves, the lowest priority first
        # By shelf and rank: what the place of the first entry is worth, and until which use of the cache that holds.
        self._worth: list[list[float]] = []
        self._worth_until: list[list[int]] = []
        self._values: Sequence[Sequence[float]] = ()
        self._run: tuple[int, int] = (0, 0)
        self._run_left = 0
        self._next = NONE  # what the last victim's place went to, not offered yet
        self._next_use = 0

    def shelf(self, priority: int, domain: Hashable) -> int:
        """The number of a shelf."""
        known = self._shelf_of.get((priority, domain))
        if known is not None:
            return known
        number = len(self._shelves)
        self._shelves.append((priority, domain))
        self._shelf_of[priority, domain] = number
        self._queues.append([[] for _ in range(self._rank_count)])
        self._limits.append([_SLACK] * self._rank_count)
        self._worth.append([inf] * self._rank_count)
        self._worth_until.append([0] * self._rank_count)
        priorities = sorted({its_priority for its_priority, _ in self._shelves})
        self._by_priority = [
            [at for at, (its_priority, _) in enumerate(self._shelves) if its_priority == one] for one in priorities
        ]
        return number

    def other_priority(self, shelf: int, priority: int) -> int:
        """The shelf of the same domain and another priority."""
        return self.shelf(priority, self._shelves[shelf][1])

    def offer(self, node: int, rank: int) -> None:
        """An end of a chain. One that is held or pinned is let go of when its turn comes."""
        nodes = self._nodes
        if nodes.flags[node] & QUEUED and nodes.rank[node] == rank:
            return
        nodes.flags[node] |= QUEUED
        nodes.rank[node] = rank
        shelf = nodes.shelf[node]
        queue = self._queues[shelf][rank]
        if len(queue) >= self._limits[shelf][rank]:
            queue[:] = [entry for entry in queue if self._is_current(entry, shelf, rank)]
            heapify(queue)
            self._limits[shelf][rank] = 2 * len(queue) + _SLACK
        entry = nodes.last_use[node] << _NODE_BITS | node
        heappush(queue, entry)
        if queue[0] == entry:
            self._worth_until[shelf][rank] = 0

    def expose(self, node: int, rank: int, child_use: int) -> None:
        """A node has no children any more; the last one was used at `child_use`."""
        nodes = self._nodes
        last_use = nodes.last_use[node]
        is_queued = nodes.flags[node] & QUEUED  # since before it had the child
        if self._run_left and not is_queued and last_use <= child_use and (nodes.shelf[node], rank) == self._run:
            # Its child was the longest unused of this queue, so it would come to its head: spare it the way there.
            if self._next >= 0:
                self._offer_next()
            nodes.rank[node] = rank
            self._next, self._next_use = node, last_use
        else:
            self.offer(node, rank)

    def take(self, domains: Collection[Hashable] | None, values: Sequence[Sequence[float]], now: int) -> int:
        """The next victim, no longer offered, or NONE.

        values: what a place is worth, by rank and age bucket.
        """
        nodes = self._nodes
        if self._run_left and domains is None and len(self._by_priority) == 1:
            node = self._next
            if node >= 0:
                self._next = NONE
                if nodes.last_use[node] == self._next_use:
                    if nodes.flags[node] == PRESENT and not nodes.children[node]:
                        return node
                    self.offer(node, nodes.rank[node])
            self._run_left -= 1
            if self._head(*self._run) >= 0:
                return self._pop(*self._run)
        if self._next >= 0:
            self._offer_next()
        for shelves in self._by_priority:
            while (lowest := self._lowest(shelves, domains, values, now)) is not None:
                queue = self._queues[lowest[0]][lowest[1]]
                entry = queue[0]
                if self._head(*lowest) >= 0 and queue[0] == entry:
                    self._run = lowest
                    self._run_left = _TAKES_A_CHOICE - 1
                    return self._pop(*lowest)
        return NONE

    def _lowest(
        self, shelves: Sequence[int], domains: Collection[Hashable] | None, values: Sequence[Sequence[float]], now: int
    ) -> tuple[int, int] | None:
        """Shelf and rank of the first entry that is worth least. It may be out of date: `_head` throws it out then."""
        if values is not self._values:
            self._values = values
            for until in self._worth_until:
                until[:] = [0] * self._rank_count
        least = inf
        found: tuple[int, int] | None = None
        for shelf in shelves:
            if domains is not None and self._shelves[shelf][1] not in domains:
                continue
            if min(self._worth_until[shelf]) <= now:
                self._value(shelf, now)
            value = min(self._worth[shelf])
            if value < least:
                least, found = value, (shelf, self._worth[shelf].index(value))
        return found

    # Inside

    def _value(self, shelf: int, now: int) -> None:
        """Bring up to date what the first entries of a shelf are worth."""
        until, worth = self._worth_until[shelf], self._worth[shelf]
        for rank, queue in enumerate(self._queues[shelf]):
            if until[rank] <= now:
                if queue:
                    last_use = queue[0] >> _NODE_BITS
                    bucket = age_bucket(now - last_use)
                    worth[rank] = self._values[rank][bucket]
                    until[rank] = last_use + _NEXT_AGES[bucket]
                else:
                    worth[rank], until[rank] = inf, _NEVER

    def _offer_next(self) -> None:
        node, self._next = self._next, NONE
        if node >= 0 and self._nodes.last_use[node] == self._next_use:
            self.offer(node, self._nodes.rank[node])

    def _head(self, shelf: int, rank: int) -> int:
        """The longest unused end of a chain in the queue, or NONE."""
        queue = self._queues[shelf][rank]
        nodes = self._nodes
        while queue:
            node = queue[0] & _NODE
            if nodes.last_use[node] == queue[0] >> _NODE_BITS and self._is_current(queue[0], shelf, rank):
                if nodes.flags[node] == _READY and not nodes.children[node]:
                    return node
                nodes.flags[node] &= ~QUEUED  # offered again when it may go
            heappop(queue)
            self._worth_until[shelf][rank] = 0
        return NONE

    def _pop(self, shelf: int, rank: int) -> int:
        node = heappop(self._queues[shelf][rank]) & _NODE
        self._worth_until[shelf][rank] = 0
        self._nodes.flags[node] &= ~QUEUED
        return node

    def _is_current(self, entry: int, shelf: int, rank: int) -> bool:
        """Whether the entry is that of its node as it is now."""
        nodes = self._nodes
        node = entry & _NODE
        return (
            nodes.last_use[node] == entry >> _NODE_BITS
            and nodes.rank[node] == rank
            and nodes.shelf[node] == shelf
            and nodes.flags[node] & QUEUED != 0
        )
