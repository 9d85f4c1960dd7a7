"""How long one match takes, on the open stream and from a replica, with 10 thousand and with a million chunks stored.

Index, Redis and this client share the machine's cores. Matches are of random chains, one at a time; beside them, in
turns, the same keys are read from Redis by one plain pipeline, and messages of the same sizes are echoed by a gRPC
stream that does nothing else: together they are what no index over gRPC and Redis can be faster than.

Run: python -m bench.match_latency [--chunks 10000,1000000] [--matches 2000] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import time
from contextlib import AsyncExitStack

from bench.index_fill import MadeChains
from bench.match_echo import echo_stream, running_echo
from bench.match_rig import SPEC, Server, filled, percentile, query_of, rig
from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainQuery
from kvpool.core.grid import ShardGrid
from kvpool_index.adapters.redis_reads import group_key
from kvpool_index.core.entries import group_reads
from kvpool_server.node.replica_feed import LocationReplica, MatchedBy, ReplicaConfig
from kvpool_server.process import poll_grpc_directly

CHUNKS = 512
_WARM_UP = 200


async def measure(redis: Server, index: Server, chunk_count: int, matches: int) -> dict[str, float]:
    """One row of the table."""
    async with (
        filled(redis, index, chunk_count) as (client, chains),
        AsyncExitStack() as stack,
    ):
        plain = _Plain(redis)
        echo = await stack.enter_async_context(echo_stream(stack.enter_context(running_echo())))
        whole = max(1, chunk_count // chains.chain_chunks)
        stream, floor, echoed = list[float](), list[float](), list[float]()
        spent = [redis.cpu_s(), index.cpu_s()]
        for number in range(-_WARM_UP, matches):
            query = query_of(chains, random.randrange(whole), CHUNKS)
            started_s = time.perf_counter()
            found = await client.match_stream.match(query)
            ended_s = time.perf_counter()
            assert found.matched_chunks == CHUNKS, found.matched_chunks
            read_s = plain.read(query)
            echo_s = await echo(query.chunk_hashes)
            if number >= 0:
                stream.append((ended_s - started_s) * 1e3)
                floor.append(read_s * 1e3)
                echoed.append(echo_s * 1e3)
        total = matches + _WARM_UP
        result = {
            "stream_p50_ms": percentile(stream, 50),
            "stream_p99_ms": percentile(stream, 99),
            "plain_redis_p50_ms": percentile(floor, 50),
            "plain_redis_p99_ms": percentile(floor, 99),
            "grpc_echo_p50_ms": percentile(echoed, 50),
            "grpc_echo_p99_ms": percentile(echoed, 99),
            "index_cpu_ms": (index.cpu_s() - spent[1]) / total * 1e3,
        }
        plain.close()
        return result | await _with_replica(client, chains, matches)


async def _with_replica(client: IndexClient, chains: MadeChains, matches: int) -> dict[str, float]:
    answered: list[MatchedBy] = []
    current = asyncio.Event()

    def on_event(replica: LocationReplica) -> None:
        if replica.is_current:
            current.set()

    replica = LocationReplica(client, ReplicaConfig(), on_match=answered.append, on_event=on_event)
    replica.open_keyspace(chains.keyspace, ShardGrid.of(SPEC))
    await current.wait()
    known = min(200, max(1, chains.chunk_count // chains.chain_chunks))
    for chain in range(known):
        await replica.match(query_of(chains, chain, CHUNKS))
    answered.clear()
    samples: list[float] = []
    for _ in range(matches):
        query = query_of(chains, random.randrange(known), CHUNKS)
        started_s = time.perf_counter()
        found = await replica.match(query)
        samples.append((time.perf_counter() - started_s) * 1e3)
        assert found.matched_chunks == CHUNKS
    hits = answered.count(MatchedBy.REPLICA) / len(answered)
    used = replica.used_bytes
    await replica.close()
    return {
        "replica_p50_ms": percentile(samples, 50),
        "replica_p99_ms": percentile(samples, 99),
        "replica_hit_share": hits,
        "replica_bytes_a_chunk": used / (known * CHUNKS),
    }


class _Plain:
    """One pipeline of HMGETs on a socket, parsed by hiredis."""

    def __init__(self, redis: Server) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(redis.endpoint.removeprefix("unix://"))

    def read(self, query: ChainQuery) -> float:
        """Seconds from the first byte out to the last reply parsed."""
        import hiredis

        reads = group_reads(query)
        commands = b"".join(
            _pack([b"HMGET", group_key(b"kvpool", query.keyspace, read.head), *read.fields]) for read in reads
        )
        reader = hiredis.Reader()
        started_s = time.perf_counter()
        self._socket.sendall(commands)
        left = len(reads)
        while left:
            reader.feed(self._socket.recv(1 << 20))
            while left and reader.gets() is not False:
                left -= 1
        return time.perf_counter() - started_s

    def close(self) -> None:
        self._socket.close()


def _pack(words: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(description="Latency of matches.")
    parser.add_argument("--chunks", default="10000,1000000")
    parser.add_argument("--matches", type=int, default=2000)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    poll_grpc_directly()  # as the index does, and the agents, whose matches these are
    rows = {}
    for chunk_count in map(int, given.chunks.split(",")):
        with rig() as (redis, indexes):
            rows[str(chunk_count)] = asyncio.run(measure(redis, indexes[0], chunk_count, given.matches))
        print(chunk_count, {name: round(value, 3) for name, value in rows[str(chunk_count)].items()}, flush=True)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
