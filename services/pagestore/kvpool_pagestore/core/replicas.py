"""Chain groups whose pages are to be copied to other nodes: bounded, and tried again with growing distance."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from kvpool.core.page import PageKey

GroupName = tuple[bytes, bytes]
"""Keyspace id and hash of the group's head."""


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
        """A page is to be copied. False if there is no room to remember it."""
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
        """A group that is due; the caller copies it. What comes of it meanwhile waits as a group of its own."""
        if not self._due or self._due[0][0] > now_s:
            return None
        name = heapq.heappop(self._due)[1]
        group = self._waiting.pop(name)
        self.chunk_count -= len(group.chunk_hashes)
        return group

    def failed(self, group: ReplicaGroup, now_s: float) -> bool:
        """It could not be copied: again later. False if there is no room to remember it."""
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
        """When `take` is worth asking again; None if nothing waits."""
        return self._due[0][0] if self._due else None

    def _wait(self, group: ReplicaGroup, due_s: float) -> ReplicaGroup:
        self._waiting[group.name] = group
        heapq.heappush(self._due, (due_s, group.name))
        return group
