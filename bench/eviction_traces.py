"""Synthetic traces of prefix requests, to see that an eviction policy was not made for one recorded trace."""

from __future__ import annotations

import argparse
import json
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import accumulate, count
from pathlib import Path
from typing import Any

Requests = list[list[int]]

_REFERENCES = 60_000  # about, of each trace


class _Blocks:
    """New block numbers."""

    def __init__(self) -> None:
        self._next = count()

    def take(self, block_count: int) -> list[int]:
        return [next(self._next) for _ in range(block_count)]


def _zipf(rng: random.Random, item_count: int, exponent: float) -> Callable[[], int]:
    totals = list(accumulate(1 / (rank + 1) ** exponent for rank in range(item_count)))
    return lambda: bisect(totals, rng.random() * totals[-1])


def _until_full(requests: Iterator[list[int]]) -> Requests:
    found: Requests = []
    references = 0
    for blocks in requests:
        found.append(blocks)
        references += len(blocks)
        if references >= _REFERENCES:
            return found
    return found


def _conversations(
    rng: random.Random, prompts: list[list[int]], choose: Callable[[], int], turns: float, think: float, tail: bool
) -> Iterator[list[int]]:
    """Open conversations that take turns; time is counted in requests' arrivals.

    turns: mean number. think: mean time between turns of one. tail: each prompt ends in a block that only it has.
    """
    blocks = _Blocks()
    blocks.take(100_000)  # numbers of prompts are below
    due: list[tuple[float, int, list[int]]] = []
    number = count()
    now = 0.0
    while True:
        now += rng.expovariate(1.0)
        while due and due[0][0] <= now:
            at, _, chain = heappop(due)
            yield from _turn(rng, blocks, due, number, at, chain, turns, think, tail)
        chain = list(prompts[choose()])
        yield from _turn(rng, blocks, due, number, now, chain, turns, think, tail)


def _turn(
    rng: random.Random,
    blocks: _Blocks,
    due: list[tuple[float, int, list[int]]],
    number: count[int],
    now: float,
    chain: list[int],
    turns: float,
    think: float,
    tail: bool,
) -> Iterator[list[int]]:
    longer = chain + blocks.take(1 + min(int(rng.lognormvariate(1.0, 1.0)), 60))
    yield longer + (blocks.take(1) if tail else [])
    if rng.random() < 1 - 1 / turns:
        heappush(due, (now + rng.lognormvariate(0, 1) * think, next(number), longer))


def chat(rng: random.Random) -> Requests:
    """Conversations of 3 turns on average behind one short system prompt."""
    return _until_full(_conversations(rng, [[0]], lambda: 0, 3.0, 150.0, tail=False))


def chat_with_tails(rng: random.Random) -> Requests:
    """The same where the last, partial block of each request is stored too, as in recorded traces."""
    return _until_full(_conversations(rng, [[0]], lambda: 0, 3.0, 150.0, tail=True))


def system_prompts(rng: random.Random) -> Requests:
    """Mostly single requests behind one of 400 system prompts of 4 to 40 blocks, with Zipf popularity."""
    numbers = count()
    prompts = [[next(numbers) for _ in range(rng.randint(4, 40))] for _ in range(400)]
    return _until_full(_conversations(rng, prompts, _zipf(rng, 400, 1.0), 1.2, 50.0, tail=False))


def agents(rng: random.Random) -> Requests:
    """Loops of 20 quick steps on average, each a little longer than the last, behind 5 tool prompts."""
    prompts = [list(range(at * 12, at * 12 + 12)) for at in range(5)]
    return _until_full(_conversations(rng, prompts, _zipf(rng, 5, 0.5), 20.0, 12.0, tail=False))


def documents(rng: random.Random) -> Requests:
    """Questions about one of 800 documents of 5 to 60 blocks; what is popular changes over time."""
    numbers = count()
    prompts = [[next(numbers) for _ in range(rng.randint(5, 60))] for _ in range(800)]
    zipf, shift = _zipf(rng, 800, 0.9), count()
    choose = lambda: (zipf() + next(shift) // 60) % 800  # noqa: E731
    return _until_full(_conversations(rng, prompts, choose, 1.3, 40.0, tail=True))


def scan(rng: random.Random) -> Requests:
    """Prompts that never come back."""
    blocks = _Blocks()
    return _until_full(blocks.take(rng.randint(3, 40)) for _ in count())


def loop(rng: random.Random) -> Requests:
    """The same 300 prompts over and over, in the same order: what LRU is worst at."""
    blocks = _Blocks()
    prompts = [blocks.take(rng.randint(5, 40)) for _ in range(300)]
    return _until_full(list(prompts[at % 300]) for at in count())


def mixture(rng: random.Random) -> Requests:
    """All of these at once, from different users."""
    kinds = (chat, chat_with_tails, system_prompts, agents, documents, scan)
    parts = [(make(rng), 10_000_000 * (1 + at)) for at, make in enumerate(kinds)]
    streams = [iter([[block + offset for block in blocks] for blocks in requests]) for requests, offset in parts]

    def merged() -> Iterator[list[int]]:
        while True:
            blocks = next(rng.choice(streams), None)
            if blocks is None:
                return
            yield blocks

    return _until_full(merged())


def changing(rng: random.Random) -> Requests:
    """One kind of traffic after another: what was learned first is wrong later."""
    found: Requests = []
    for at, make in enumerate((agents, scan, chat, system_prompts)):
        requests = make(rng)
        found += [[block + 10_000_000 * at for block in blocks] for blocks in requests[: len(requests) // 3]]
    return found


SYNTHETIC: dict[str, Callable[[random.Random], Requests]] = {
    "chat": chat,
    "chat with partial blocks": chat_with_tails,
    "system prompts": system_prompts,
    "agents": agents,
    "documents": documents,
    "scan": scan,
    "loop": loop,
    "mixture": mixture,
    "changing": changing,
}


def trace_arguments(module: str, description: str) -> argparse.Namespace:
    """Of a replay: TRACE, how many of its requests, and where its result goes."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("trace", metavar="TRACE", help="JSON lines with hash_ids; - is stdin")
    parser.add_argument("--limit", type=int, default=0, help="only the first requests of TRACE; 0: all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def write_rates(module: str, arguments: argparse.Namespace, **document: Any) -> None:
    """Write the result to the file that was asked for, if any, with the command that makes it."""
    if arguments.json is None:
        return
    command = f"python -m {module} TRACE" + (f" --limit {arguments.limit}" if arguments.limit else "")
    arguments.json.write_text(json.dumps({"command": command, **document}, indent=1) + "\n")
