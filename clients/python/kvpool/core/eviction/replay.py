"""Replay of a trace of prefix requests against a policy, or against Belady's optimum. Keys are numbers of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvpool.core.eviction.port import EvictionPolicy

Requests = Sequence[Sequence[int]]
"""The blocks of each request, from the head of its chain on."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay counted."""

    requests: int
    block_references: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """Blocks found in a prefix of their request, of all blocks asked for."""
        return self.hits / self.block_references if self.block_references else 0.0


def replay(requests: Requests, policy: EvictionPolicy[int], capacity: int, *, tail_first: bool = False) -> ReplayResult:
    """Hits of a cache of `capacity` blocks.

    A request hits its leading blocks that are inside. Then all its blocks are used, and those missing inserted.
    tail_first: use them from the last to the first, so that a policy that goes by recency gives up tails before heads;
    it is for policies that do not know of chains.
    """
    hits = 0
    references = 0
    for blocks in requests:
        references += len(blocks)
        for block in blocks:
            if block not in policy:
                break
            hits += 1
        numbers = range(len(blocks) - 1, -1, -1) if tail_first else range(len(blocks))
        for number in numbers:
            policy.insert(blocks[number], blocks[number - 1] if number else None)
        for _ in range(len(policy) - capacity):
            policy.evict()
    return ReplayResult(len(requests), references, hits)


def belady(requests: Requests, capacity: int) -> ReplayResult:
    """Hits of the cache that knows the future: the block that is asked for again last, or never, goes first."""
    next_use = _next_uses(requests)
    inside: dict[int, int] = {}  # block -> index of its next request
    furthest: list[tuple[int, int]] = []  # (-next request, block), with entries that are out of date
    hits = references = 0
    for number, blocks in enumerate(requests):
        references += len(blocks)
        for block in blocks:
            if block not in inside:
                break
            hits += 1
        # Of blocks that are asked for again together, the deeper ones go first: hits are counted from the head.
        for depth, block in enumerate(blocks):
            inside[block] = next_use[number][depth]
            heappush(furthest, (-inside[block] * _DEPTHS - depth, block))
        while len(inside) > capacity:
            rank, block = heappop(furthest)
            if inside.get(block) == -rank // _DEPTHS:
                del inside[block]
    return ReplayResult(len(requests), references, hits)


_DEPTHS = 1 << 20  # more than a request has blocks


def _next_uses(requests: Requests) -> list[list[int]]:
    never = len(requests)
    upcoming: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        found.append([upcoming.get(block, never) for block in requests[number]])
        for block in requests[number]:
            upcoming[block] = number
    found.reverse()
    return found
