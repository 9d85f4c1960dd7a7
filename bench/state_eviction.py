"""Should the eviction of full attention and of recurrent states know of each other, in models that have both?

Replays traces of prefix requests. Two blocks of a request are a chunk of 1,024 tokens; its last block, which is not
full, is not stored. Each chunk has a key of full attention and, if the shape says so, one of windows. States are stored
at the end of each step of a prefill and of each prompt, one key for each group of recurrent layers. A prompt goes on
from the deepest boundary at which all states are, with all chunks of full attention before it and those of windows that
it reaches. Only these are read then; what follows is computed and stored.

    as now     the pagestore's policy: groups apart, states stand alone (services/pagestore: core/chain_links.py)
    orphans    likewise, and when a chunk of full attention goes, states and windows of its boundary go next
    both       likewise, and when a state goes, those of other groups and all behind the deepest state left go next
    ends       as now, but states inside of a prompt rank as passed windows do until they are used
    future     what a pool without end would read last, or never, goes first: near the most that can be found

Run: python -m bench.state_eviction TRACE [--json FILE] [--limit 6000]
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from bench.eviction_traces import SYNTHETIC, Requests, trace_arguments, write_rates
from bench.request_trace import read_trace
from kvpool_pagestore.core.chain_links import KEPT_WINDOWS
from kvpool_pagestore.core.eviction import EvictionPolicy
from kvpool_pagestore.core.retained import PLAIN, Retention

AS_NOW, ORPHANS, BOTH, ENDS, FUTURE = RULES = ("as now", "orphans", "both", "ends", "future")
DISK, STAGING = TIERS = ("disk", "staging")
RULES_OF = {DISK: RULES, STAGING: (AS_NOW, ORPHANS, BOTH)}
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
TRACES = ("chat", "system prompts", "agents", "documents", "mixture", "changing")
_SEED = 1
_NOW_US = 1
WORTHLESS = Retention(expires_us=_NOW_US)
_FULL, _WINDOW, _STATE = 0, 1, 2  # parts of a chunk; states of further groups follow
_NO_END = 1 << 60  # bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """Bytes are of one chunk; of states, of one group. step_chunks: that one step of a prefill computes."""

    full_bytes: int
    state_bytes: int
    state_groups: int
    window_bytes: int = 0
    window_chunks: int = 0
    step_chunks: int = 8

    @property
    def states(self) -> range:
        """Parts that are states."""
        return range(_STATE, _STATE + self.state_groups)

    def size_bytes(self, part: int) -> int:
        """Bytes of a part of a chunk."""
        return self.state_bytes if part >= _STATE else self.window_bytes if part else self.full_bytes


_MAMBA2, _DELTA_NET = 2_147_840, 1_097_728  # bytes of one layer's state, bfloat16
SHAPES = {
    "Granite 4.0 H Small": Shape(4 * (4 << 20), 4 * _MAMBA2, 9),  # 4 layers with attention, 9 x 4 with Mamba 2
    "Qwen3-Next 80B": Shape(12 * (2 << 20), 12 * _DELTA_NET, 3),  # 12, and 3 x 12 with gated delta nets
    "made up, with windows": Shape(4 * (4 << 20), 4 * _MAMBA2, 2, 4 * (4 << 20), 1),  # of 1,024 tokens
}


def chunks_of(requests: Requests) -> Requests:
    """Chunks of each request. The blocks of one are a chain, so the second block of a chunk names both."""
    return [blocks[:-1][1::2] for blocks in requests]


class Pool:
    """Keys of all groups by the pagestore's policy, up to so many bytes."""

    def __init__(self, shape: Shape, capacity_bytes: int, rule: str, tier: str = DISK) -> None:
        """tier: in staging keys of one size have slots of their own, and make room for one another alone."""
        self.used_bytes = 0
        self._shape, self._capacity_bytes, self._rule, self._tier = shape, capacity_bytes, rule, tier
        self._parts = _STATE + shape.state_groups
        kinds = [EvictionPolicy[int]() for _ in range(_STATE + 1)] if tier == STAGING else [EvictionPolicy[int]()] * 3
        self._policies = [*kinds, *kinds[_STATE:] * (shape.state_groups - 1)]
        self._before: dict[int, int] = {}  # by chunk; -1: it is the first
        self._boundaries: Counter[int] = Counter()  # by chunk: boundaries from it on that have all states

    def find(self, chunks: Sequence[int]) -> int:
        """Chunks before the deepest boundary from which a prompt can go on."""
        boundary = run = 0
        for number, chunk in enumerate(chunks):
            if not self._has(chunk, _FULL):
                break
            run = run + 1 if self._has(chunk, _WINDOW) else 0
            if run >= min(self._shape.window_chunks, number + 1) and self._has_states(chunk):
                boundary = number + 1
        return boundary

    def use(self, chunks: Sequence[int], boundary: int) -> None:
        """Read what the boundary needs, compute and store the rest, and give up what is too much."""
        shape, end = self._shape, len(chunks)
        for number, chunk in enumerate(chunks):
            self._before[chunk] = chunks[number - 1] if number else -1
            self._insert(chunk, _FULL, number)
            if shape.window_chunks and number >= boundary - shape.window_chunks:
                is_passed = boundary <= number < end - KEPT_WINDOWS * shape.window_chunks
                self._insert(chunk, _WINDOW, number, is_unlikely=is_passed)
            computed = number + 1 - boundary
            if computed >= 0 and (computed % shape.step_chunks == 0 or number + 1 == end):
                is_inside = computed > 0 and number + 1 < end
                had_states = self._has_states(chunk)
                for part in shape.states:
                    self._insert(chunk, part, number, is_unlikely=is_inside and self._rule == ENDS)
                if not had_states:
                    self._count(chunk, 1)
        while self._tier == DISK and self.used_bytes > self._capacity_bytes and self._evict(_FULL):
            pass

    def _has(self, chunk: int, part: int) -> bool:
        return chunk * self._parts + part in self._policies[part]

    def _has_states(self, chunk: int) -> bool:
        return all(self._has(chunk, part) for part in self._shape.states)

    def _insert(self, chunk: int, part: int, number: int, *, is_unlikely: bool = False) -> None:
        key, before = (
            chunk * self._parts + part,
            self._before[chunk] * self._parts if part == _FULL and number else None,
        )
        if not self._has(chunk, part):
            self.used_bytes += self._shape.size_bytes(part)
            while self._tier == STAGING and self.used_bytes > self._capacity_bytes:
                if not any(self._evict(other) for other in (part, *range(self._parts))):
                    break
        self._policies[part].insert(key, before, domain=part, is_unlikely=is_unlikely)
        if part == _FULL and self._rule in (ORPHANS, BOTH):
            self._rank(chunk, range(1, self._parts), PLAIN)

    def _evict(self, part: int) -> bool:
        """Give up one key of those among which that part is; False if there is none."""
        victim = self._policies[part].evict(_NOW_US)
        if victim is None:
            return False
        chunk, part = divmod(victim, self._parts)
        self.used_bytes -= self._shape.size_bytes(part)
        if part == _FULL and self._rule in (ORPHANS, BOTH):
            self._rank(chunk, range(1, self._parts), WORTHLESS)
        elif part >= _STATE and all(self._has(chunk, other) for other in self._shape.states if other != part):
            self._count(chunk, -1)
            if self._rule == BOTH:
                self._rank(chunk, self._shape.states, WORTHLESS)
        return True

    def _count(self, chunk: int, change: int) -> None:
        """A boundary has all states, or does no more."""
        while chunk >= 0:
            self._boundaries[chunk] += change
            if not self._boundaries[chunk] and self._rule == BOTH:
                self._rank(chunk, (_FULL, _WINDOW), WORTHLESS)
            chunk = self._before[chunk]

    def _rank(self, chunk: int, parts: Iterable[int], retention: Retention) -> None:
        for part in parts:
            self._policies[part].retain(chunk * self._parts + part, retention)


class FuturePool(Pool):
    """The same, where what will be read last, or never, goes first."""

    def __init__(self, shape: Shape, capacity_bytes: int, requests: Requests) -> None:
        """requests: all that will be used, in order."""
        super().__init__(shape, capacity_bytes, FUTURE)
        self._reads = self._all_reads(requests)
        self._request = 0
        self._inside: dict[int, tuple[int, int]] = {}  # rank by key
        self._order: list[tuple[tuple[int, int], int]] = []  # with ranks that are out of date

    def _all_reads(self, requests: Requests) -> dict[int, list[int]]:
        """By key, the numbers of requests that read it from a pool without end, from the last to the first."""
        reads: dict[int, list[int]] = {}
        pool = Pool(self._shape, _NO_END, AS_NOW)
        for request, chunks in enumerate(requests):
            boundary = pool.find(chunks)
            for number, chunk in enumerate(chunks[:boundary]):
                in_window, at_end = number >= boundary - self._shape.window_chunks, number + 1 == boundary
                for part in (_FULL, *[_WINDOW] * in_window, *(self._shape.states if at_end else ())):
                    reads.setdefault(chunk * self._parts + part, []).insert(0, request)
            pool.use(chunks, boundary)
        return reads

    def use(self, chunks: Sequence[int], boundary: int) -> None:
        """As of `Pool`."""
        super().use(chunks, boundary)
        self._request += 1

    def _has(self, chunk: int, part: int) -> bool:
        return chunk * self._parts + part in self._inside

    def _insert(self, chunk: int, part: int, number: int, *, is_unlikely: bool = False) -> None:
        key = chunk * self._parts + part
        reads = self._reads.get(key, [])
        while reads and reads[-1] <= self._request:
            reads.pop()
        if key not in self._inside:
            self.used_bytes += self._shape.size_bytes(part)
        self._inside[key] = rank = (-reads[-1] if reads else -_NO_END, -number)
        heappush(self._order, (rank, key))

    def _evict(self, part: int) -> bool:
        while self._order:
            rank, key = heappop(self._order)
            if self._inside.get(key) == rank:
                del self._inside[key]
                self.used_bytes -= self._shape.size_bytes(key % self._parts)
                return True
        return False


def found_chunks(pool: Pool, requests: Requests) -> int:
    """Chunks that need not be computed."""
    found = 0
    for chunks in requests:
        boundary = pool.find(chunks)
        found += boundary
        pool.use(chunks, boundary)
    return found


def hit_rate(requests: Requests, shape: Shape, capacity_bytes: int, rule: str, tier: str = DISK) -> float:
    """Chunks that need not be computed, of all chunks asked for."""
    is_future = rule == FUTURE
    pool = FuturePool(shape, capacity_bytes, requests) if is_future else Pool(shape, capacity_bytes, rule, tier)
    return found_chunks(pool, requests) / sum(map(len, requests))


def working_set_bytes(requests: Requests, shape: Shape) -> int:
    """Bytes of all that a pool without end has in the end."""
    pool = Pool(shape, _NO_END, AS_NOW)
    found_chunks(pool, requests)
    return pool.used_bytes


def main() -> int:
    arguments = trace_arguments("bench.state_eviction", (__doc__ or "").split("\n")[0])
    traces = {"recorded": chunks_of(read_trace(arguments.trace, arguments.limit).requests)}
    traces |= {name: chunks_of(SYNTHETIC[name](random.Random(_SEED))) for name in TRACES}
    found: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = {}
    for name, shape in SHAPES.items():
        for trace, requests in traces.items():
            total = working_set_bytes(requests, shape)
            print(f"{name}, {trace}: {total / (1 << 30):.0f} GiB", flush=True)
            for tier, rules in RULES_OF.items():
                for rule in rules:
                    rates = [round(hit_rate(requests, shape, int(total * share), rule, tier), 4) for share in SHARES]
                    found.setdefault(name, {}).setdefault(trace, {}).setdefault(tier, {})[rule] = rates
                    print(f"  {tier:8}{rule:8}", *(f"{rate:7.4f}" for rate in rates), flush=True)
    write_rates("bench.state_eviction", arguments, shares_of_the_working_set=SHARES, hit_rates=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
