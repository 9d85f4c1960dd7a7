"""What would a full pool find of prompts of a model with sliding windows beside full attention?

Replays traces of prefix requests. Each block of a request is a chunk of the group with full attention and one of each
group with a window. A prompt goes on from the deepest boundary before which all chunks of the first group are there,
and of the others those that the window reaches. Only they are read then; what follows is computed and stored.

    chain     chunks of windows as all others: none goes before the chunks after it
    alone     each by itself
    as now    likewise, and those that the prompt has passed by two windows rank as what LRU would give up next, unless
              they are known from before (services/pagestore: core/chain_links.py)

Run: python -m bench.window_eviction TRACE [--json FILE] [--limit 6000]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.eviction_traces import SYNTHETIC, Requests, trace_arguments, write_rates
from bench.request_trace import read_trace
from kvpool_pagestore.core.chain_links import KEPT_WINDOWS
from kvpool_pagestore.core.eviction import EvictionPolicy

RULES = ("chain", "alone", "as now")
SHARES = (0.02, 0.05, 0.10, 0.25)
_SEED = 1
_FULL = 0  # the number of that group


@dataclass(frozen=True, slots=True)
class Shape:
    """window_blocks: that a window reaches. window_groups: so many beside one with full attention, equally large."""

    window_blocks: int
    window_groups: int


SHAPES = {"5 of 6 layers, 1,024 tokens (Gemma 3)": Shape(2, 5), "half of the layers, 512 tokens": Shape(1, 1)}


class Pool:
    """Chunks of all groups, by the pagestore's policy, up to so many. The groups with windows always have the same
    chunks, so one key stands for all of them."""

    def __init__(self, shape: Shape, capacity: int, rule: str) -> None:
        self._shape, self._capacity, self._rule = shape, capacity, rule
        self._policy: EvictionPolicy[int] = EvictionPolicy()
        self._used = 0

    def find(self, blocks: Sequence[int]) -> int:
        """Blocks before the deepest boundary from which a prompt can go on."""
        boundary = run = 0
        for number, block in enumerate(blocks):
            if 2 * block not in self._policy:
                break
            run = run + 1 if 2 * block + 1 in self._policy else 0
            if run >= min(self._shape.window_blocks, number + 1):
                boundary = number + 1
        return boundary

    def use(self, blocks: Sequence[int], boundary: int) -> None:
        """Read what the boundary needs, compute and store the rest, and give up what is too much."""
        window = self._shape.window_blocks
        for number, block in enumerate(blocks):
            self._insert(2 * block, 2 * blocks[number - 1] if number else None, is_unlikely=False)
        for number in (*range(max(0, boundary - window), boundary), *range(boundary, len(blocks))):
            before = 2 * blocks[number - 1] + 1 if number and self._rule == "chain" else None
            is_passed = number >= boundary and number < len(blocks) - KEPT_WINDOWS * window
            self._insert(2 * blocks[number] + 1, before, is_unlikely=is_passed and self._rule == "as now")
        while self._used > self._capacity and (victim := self._policy.evict()) is not None:
            self._used -= self._size(victim)

    def _insert(self, key: int, before: int | None, *, is_unlikely: bool) -> None:
        if key not in self._policy:
            self._used += self._size(key)
        self._policy.insert(key, before, domain=key % 2, is_unlikely=is_unlikely)

    def _size(self, key: int) -> int:
        return 1 if key % 2 == _FULL else self._shape.window_groups


def hit_rate(requests: Requests, shape: Shape, capacity: int, rule: str) -> float:
    """Blocks that need not be computed, of all blocks asked for."""
    pool, found = Pool(shape, capacity, rule), 0
    for blocks in requests:
        boundary = pool.find(blocks)
        found += boundary
        pool.use(blocks, boundary)
    return found / sum(map(len, requests))


def measure(requests: Requests, shape: Shape) -> dict[str, list[float]]:
    """Hit rates by rule at each of SHARES of what all different blocks take."""
    unique = len({block for blocks in requests for block in blocks})
    sizes = [max(1, round(unique * (1 + shape.window_groups) * share)) for share in SHARES]
    return {rule: [round(hit_rate(requests, shape, size, rule), 4) for size in sizes] for rule in RULES}


def main() -> int:
    arguments = trace_arguments("bench.window_eviction", (__doc__ or "").split("\n")[0])
    traces = {"recorded": read_trace(arguments.trace, arguments.limit).requests}
    traces |= {name: make(random.Random(_SEED)) for name, make in SYNTHETIC.items()}
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, shape in SHAPES.items():
        for trace, requests in traces.items():
            rates = found.setdefault(name, {})[trace] = measure(requests, shape)
            print(f"{name}, {trace}", *(f"  {rule}: {rates[rule]}" for rule in RULES), sep="\n", flush=True)
    write_rates("bench.window_eviction", arguments, shares_of_all_chunks=SHARES, hit_rates=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
