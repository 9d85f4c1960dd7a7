"""The rest of `kvpool bench match`: matches that a replica answers, and matches that run at the same time."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time

from kvpool.cli.bench_results import Results
from kvpool.cli.output import CommandFailed
from kvpool.client.index import IndexClient, OpenedKeyspace
from kvpool.core.cluster import ChainQuery
from kvpool_server.node.replica_feed import LocationReplica, MatchedBy, ReplicaConfig

REPLICA_CHUNKS, BUSY_CHUNKS, AT_ONCE = 512, 128, 16
_HASH_BYTES = 16
_CURRENT_LIMIT_S = 10.0


async def add_replica(
    results: Results, index: IndexClient, keyspace: OpenedKeyspace, hashes: bytes, repetitions: int
) -> None:
    """Matches of a known chain, each beside the same one on the stream."""
    query = ChainQuery(keyspace=keyspace.keyspace, chunk_hashes=hashes[: REPLICA_CHUNKS * _HASH_BYTES])
    answered: list[MatchedBy] = []
    current = asyncio.Event()

    def on_event(replica: LocationReplica) -> None:
        if replica.is_current:
            current.set()

    replica = LocationReplica(index, ReplicaConfig(), on_match=answered.append, on_event=on_event)
    replica.open_keyspace(keyspace.keyspace, keyspace.grid)
    try:
        await asyncio.wait_for(current.wait(), _CURRENT_LIMIT_S)
        await replica.match(query)
        ours, theirs = list[float](), list[float]()
        for _ in range(repetitions):
            started_s = time.perf_counter()
            found = await replica.match(query)
            middle_s = time.perf_counter()
            await index.match_stream.match(query)
            ours.append((middle_s - started_s) * 1e3)
            theirs.append((time.perf_counter() - middle_s) * 1e3)
            if found.matched_chunks != REPLICA_CHUNKS:
                raise CommandFailed(f"{found.matched_chunks} of {REPLICA_CHUNKS} chunks were matched")
    except TimeoutError:
        raise CommandFailed("the index sent no heartbeat to the replica") from None
    finally:
        await replica.close()
    if answered[1:].count(MatchedBy.REPLICA) < repetitions:
        raise CommandFailed("the replica had to ask the index about a chain that it knows")
    for name, percent in (("p50", 50), ("p99", 99)):
        mine, other = (statistics.quantiles(each, n=100, method="inclusive")[percent - 1] for each in (ours, theirs))
        results.add(f"match {REPLICA_CHUNKS} chunks from a replica, {name}", "ms", mine, other, "on the stream")


async def add_busy(
    results: Results, index: IndexClient, keyspace: OpenedKeyspace, hashes: bytes, repetitions: int
) -> None:
    """Matches at once on one stream, beside the same number one after the other. This client takes part of the time."""
    query = ChainQuery(keyspace=keyspace.keyspace, chunk_hashes=hashes[: BUSY_CHUNKS * _HASH_BYTES])

    async def rate(at_once: int) -> float:
        numbers = itertools.count()

        async def ask() -> None:
            while next(numbers) < repetitions:
                await index.match_stream.match(query)

        started_s = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(at_once)))
        return repetitions / (time.perf_counter() - started_s)

    alone = await rate(1)
    results.add(
        f"matches of {BUSY_CHUNKS} chunks, {AT_ONCE} at once", "1/s", await rate(AT_ONCE), alone, "one at a time"
    )
