"""What it costs to look up pages that are no chain: 64 and 512 questions about one chunk each.

In turns: a message for each question, as clients did before there was another way; few messages for all of them; and,
for comparison, one question about as many chunks of a chain. Index, Redis and this client share the machine's cores.

Run: python -m bench.match_many [--questions 64,512] [--rounds 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.index_fill import MadeChains
from bench.match_rig import Server, filled, percentile, query_of, rig
from kvpool.client.index import IndexClient
from kvpool.core.cluster import CHAIN_GROUP_CHUNKS, ChainMatch, ChainQuery
from kvpool.core.errors import KvPoolError

_STORED_CHUNKS = 100_000
_WARM_UP = 20

Lookup = Callable[[], Awaitable[int]]
"""Asks, and returns how many chunks were found."""


async def measure(redis: Server, index: Server, question_counts: list[int], rounds: int) -> dict[str, object]:
    """By number of questions and way, milliseconds of all of them and the index's processor time."""
    async with filled(redis, index, _STORED_CHUNKS) as (client, chains):
        return {str(count): await _measure_one(client, chains, index, count, rounds) for count in question_counts}


async def _measure_one(
    client: IndexClient, chains: MadeChains, index: Server, count: int, rounds: int
) -> dict[str, dict[str, float]]:
    samples: dict[str, list[float]] = {}
    cpu_s: dict[str, float] = {}
    for number in range(-_WARM_UP, rounds):
        for way, look_up in _ways(client, chains, count).items():
            spent_s, started_s = index.cpu_s(), time.perf_counter()
            found = await look_up()
            taken_s = time.perf_counter() - started_s
            assert found == count, f"{way}: {found} of {count}"
            if number >= 0:
                samples.setdefault(way, []).append(taken_s * 1e3)
                cpu_s[way] = cpu_s.get(way, 0.0) + index.cpu_s() - spent_s
    return {
        way: {
            "p50_ms": percentile(each, 50),
            "p99_ms": percentile(each, 99),
            "index_cpu_ms": cpu_s[way] / rounds * 1e3,
        }
        for way, each in samples.items()
    }


def _ways(client: IndexClient, chains: MadeChains, count: int) -> dict[str, Lookup]:
    stream = client.match_stream
    # The head of a group stands for a chunk of which no neighbours are known: it is kept under its own hash.
    heads = [_head(chains) for _ in range(count)]
    alone = [ChainQuery(keyspace=chains.keyspace, chunk_hashes=head, host_id="another") for head in heads]
    chain = query_of(chains, random.randrange(chains.chain_count - 1), count)

    async def one_each() -> int:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream.match(query)) for query in alone]
        return sum(task.result().matched_chunks for task in tasks)

    async def together() -> int:
        return sum(_matched(answer) for answer in await stream.match_many(alone))

    async def chained() -> int:
        return (await stream.match(chain)).matched_chunks

    return {"a message each": one_each, "together": together, "one chain": chained}


def _head(chains: MadeChains) -> bytes:
    hashes = chains.hashes(random.randrange(chains.chain_count - 1))
    start = 16 * CHAIN_GROUP_CHUNKS * random.randrange(chains.chain_chunks // CHAIN_GROUP_CHUNKS)
    return hashes[start : start + 16]


def _matched(answer: ChainMatch | KvPoolError) -> int:
    if isinstance(answer, KvPoolError):
        raise answer
    return answer.matched_chunks


def main() -> None:
    parser = argparse.ArgumentParser(description="Many questions about one chunk each.")
    parser.add_argument("--questions", default="64,512")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    counts = [int(each) for each in given.questions.split(",")]
    with rig() as (redis, indexes):
        rows = asyncio.run(measure(redis, indexes[0], counts, given.rounds))
    print(json.dumps(rows, indent=1), flush=True)
    if given.json:
        command = f"python -m bench.match_many --questions {given.questions} --rounds {given.rounds}"
        document = {"date": time.strftime("%Y-%m-%d"), "machine": "2-core virtual machine, other work beside it"}
        Path(given.json).write_text(json.dumps({**document, "command": command, "questions": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
