"""The forest of chains that a cache holds, kept in columns: a large disk has a million chunks."""

from __future__ import annotations

from typing import Any, Generic

from kvpool.core.eviction.port import K

NONE = -1
# Flags of a node; one with only PRESENT may be a victim when it has no children.
PRESENT = 1  # inside; else it only stands for a parent of which children are inside
HELD = 2
PINNED = 4
QUEUED = 8  # a queue has an entry for it as it is now
MAX_HITS = 255


class ChainNodes(Generic[K]):
    """Nodes by number. A node whose key is not inside is kept while it has children, and no longer.

    About 150 bytes a node, beside the key, the dictionary's entry for it, and the number in it. The columns are lists:
    arrays would take a third of that, but Python reads them more slowly, and this is done dozens of times for each use.
    """

    def __init__(self) -> None:
        self.number_of: dict[K, int] = {}
        self.present_count = 0
        self.keys: list[K | None] = []
        self.parent: list[int] = []
        self.children: list[int] = []  # inside, or with children themselves
        self.forks: list[int] = []  # children that it has ever had, while it was inside
        self.depth: list[int] = []
        self.last_use: list[int] = []
        self.hits: list[int] = []
        self.heat: list[float] = []  # hits along the path from the head, as far as they are this path's own
        self.reach: list[int] = []  # length of the longest chain known to go on here since its last use; 0: its depth
        self.rank: list[int] = []  # class of the reuse model
        self.shelf: list[int] = []
        self.flags: list[int] = []
        self._free: list[int] = []
        counts = (self.children, self.forks, self.depth, self.last_use, self.hits, self.reach)
        self._columns: tuple[list[Any], ...] = (*counts, self.heat, self.rank, self.shelf, self.flags)

    def find(self, key: K) -> int:
        """The number of a key that is inside, or NONE."""
        node = self.number_of.get(key, NONE)
        return node if node >= 0 and self.flags[node] & PRESENT else NONE

    def add(self, node: int, key: K, parent: K | None, above: int) -> int:
        """Bring a key inside, below its parent, which need not be inside; its number.

        node, above: numbers of the key and of its parent so far, or NONE.
        """
        if node < 0:
            node = self._new(key)
        if parent is not None and self.parent[node] < 0:  # else it stood for a parent until now, and has its own
            if above < 0:
                above = self._new(parent)
                self.flags[above] = 0
            self.parent[node] = above
            self.children[above] += 1
            self.depth[node] = self.depth[above] + 1
        self.flags[node] = PRESENT
        self.present_count += 1
        return node

    def drop(self, node: int) -> int:
        """Take a key out. Its parent's number if that is inside and without children now, else NONE."""
        self.flags[node] = 0
        self.present_count -= 1
        if self.children[node]:
            return NONE  # stays to stand for itself
        while True:
            above = self.parent[node]
            key = self.keys[node]
            assert key is not None
            del self.number_of[key]
            self.keys[node] = None
            self.last_use[node] = NONE  # no entry of any queue fits it
            self._free.append(node)
            if above < 0:
                return NONE
            left = self.children[above] = self.children[above] - 1
            if left:
                return NONE
            if self.flags[above] & PRESENT:
                return above
            node = above

    # Inside

    def _new(self, key: K) -> int:
        if self._free:
            node = self._free.pop()
            self.keys[node] = key
            self.parent[node] = NONE
            self.children[node] = self.forks[node] = self.depth[node] = self.reach[node] = self.hits[node] = 0
            self.heat[node] = 0.0
        else:
            node = len(self.keys)
            self.keys.append(key)
            self.parent.append(NONE)
            for column in self._columns:
                column.append(0)
        self.number_of[key] = node
        return node
