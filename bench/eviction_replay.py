"""What would a cache hit, by eviction policy and capacity?

Replays a trace of prefix requests against the pagestore's policy, LRU, or Belady's optimum, which knows the future.
Keys are numbers of blocks.

Run: python -m bench replay TRACE --capacity 5% [--policy gdsf|lru|belady] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Protocol

from bench.request_trace import Trace, read_trace
from bench.rig.results import write_result
from kvpool.core.byte_sizes import size_from_text
from kvpool_cli.errors import CommandFailed
from kvpool_pagestore.core.eviction import EvictionPolicy

GDSF, LRU, BELADY = POLICIES = ("gdsf", "lru", "belady")
DEFAULT = GDSF

Requests = Sequence[Sequence[int]]
"""The blocks of each request, from the head of its chain on."""


def blocks_from_text(text: str, unique_blocks: int, block_bytes: int) -> int:
    """Blocks of a capacity: "5000", "5%" of the trace's unique blocks, or "64GiB". Raises CommandFailed."""
    try:
        if text.endswith("%"):
            blocks = round(unique_blocks * float(text.removesuffix("%")) / 100)
        elif text.endswith("B"):
            if not block_bytes:
                raise CommandFailed(f"--capacity {text} is in bytes: say --block-bytes too")
            blocks = size_from_text(text.removesuffix("B") if text[:-1].isdecimal() else text) // block_bytes
        else:
            blocks = int(text)
    except (ValueError, OverflowError) as error:
        raise CommandFailed(f"--capacity {text} is neither blocks (5000), a share (5%) nor bytes (64GiB)") from error
    if blocks < 1:
        raise CommandFailed(f"--capacity {text} is less than one block")
    return blocks


class Cache(Protocol):
    """As much of an eviction policy as a replay needs."""

    def __len__(self) -> int: ...
    def __contains__(self, key: int) -> bool: ...
    def insert(self, key: int, parent: int | None = None) -> None: ...
    def evict(self) -> int | None: ...


class Lru:
    """Least recently used: the baseline."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: int) -> bool:
        return key in self._order

    def insert(self, key: int, parent: int | None = None) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def evict(self) -> int | None:
        return self._order.popitem(last=False)[0] if self._order else None


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


def replay(requests: Requests, policy: Cache, capacity: int, *, tail_first: bool = False) -> ReplayResult:
    """Hits of a cache of `capacity` blocks.

    A request hits its leading blocks that are inside. Then all its blocks are used, and those missing inserted.
    tail_first: use them from the last to the first, so that a policy based on recency evicts tails before heads;
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A result with what it was made of."""

    policy: str
    capacity_blocks: int
    unique_blocks: int
    result: ReplayResult
    elapsed_s: float

    def to_document(self) -> dict[str, Any]:
        """The document of `--json`."""
        return {
            "hit_rate": self.result.hit_rate,
            "hits": self.result.hits,
            "requests": self.result.requests,
            "block_references": self.result.block_references,
            "unique_blocks": self.unique_blocks,
            "capacity_blocks": self.capacity_blocks,
            "policy": self.policy,
            "elapsed_s": self.elapsed_s,
            "references_per_s": self.result.block_references / max(self.elapsed_s, 1e-9),
        }


def replay_trace(trace: Trace, policy: str, capacity: int, unique_blocks: int) -> Replayed:
    """The policy alone, timed."""
    begin_s = time.perf_counter()
    if policy == BELADY:
        result = belady(trace.requests, capacity)
    elif policy == LRU:
        result = replay(trace.requests, Lru(), capacity, tail_first=True)
    else:
        result = replay(trace.requests, EvictionPolicy(), capacity)
    return Replayed(
        policy=policy,
        capacity_blocks=capacity,
        unique_blocks=unique_blocks,
        result=result,
        elapsed_s=time.perf_counter() - begin_s,
    )


def render(replayed: Replayed) -> str:
    """A few lines for people."""
    result = replayed.result
    return "\n".join(
        [
            f"{replayed.policy} with {replayed.capacity_blocks} of {replayed.unique_blocks} different blocks",
            f"prefix hit rate {result.hit_rate:.4f} ({result.hits} of {result.block_references} blocks)",
            f"{result.block_references / max(replayed.elapsed_s, 1e-9):,.0f} block references a second",
        ]
    )


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("trace", metavar="TRACE", help="JSON lines with hash_ids; - is stdin")
    parser.add_argument(
        "--policy", choices=POLICIES, default=DEFAULT, help="gdsf is the pagestore's, belady knows the future"
    )
    parser.add_argument("--capacity", required=True, help="blocks (5000), a share of the different ones (5%%) or 64GiB")
    parser.add_argument("--block-bytes", type=size_from_text, default=0, help="of one block: for a capacity in bytes")
    parser.add_argument("--limit", type=int, default=0, help="only the first requests; 0: all")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout")


def run(arguments: argparse.Namespace) -> int:
    """Replay and print. Raises CommandFailed."""
    if arguments.block_bytes < 0 or arguments.limit < 0:
        raise CommandFailed("--block-bytes and --limit must be >= 0")
    trace = read_trace(arguments.trace, arguments.limit)
    unique_blocks = trace.unique_blocks
    capacity = blocks_from_text(arguments.capacity, unique_blocks, arguments.block_bytes)
    replayed = replay_trace(trace, arguments.policy, capacity, unique_blocks)
    write_result(replayed.to_document(), arguments.json, render(replayed))
    return 0
