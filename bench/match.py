"""`python -m bench match`: how long the index takes to find the longest prefix, beside Redis itself."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import hiredis
import redis

from bench.rig.cluster import bench_cluster, endpoint_of, running_cluster
from bench.rig.machine import tune_process
from bench.rig.results import Results, progress
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient, OpenedKeyspace
from kvpool.core.cluster import ChainQuery, LocationChange, NodeInfo, NodeKind, NodeLoad
from kvpool.core.errors import KvPoolError
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.core.outcome import Tier
from kvpool_cli.cluster import ClusterOptions
from kvpool_cli.errors import CommandFailed
from kvpool_cli.output import say
from kvpool_cli.state import ClusterState
from kvpool_server.node.chunk_directory import FixedLocations
from kvpool_server.node.node_link import NodeLink
from kvpool_server.node.replica_feed import LocationReplica, MatchedBy, ReplicaConfig

CHUNK_COUNTS = (16, 128, 512, 2048)
GROUP_CHUNKS = 16
HASH_BYTES = 16
SPEC = KeyspaceSpec(
    model_id="kvpool-bench", model_revision="match", groups=(KvGroup(32, 8, 128),), dtype=Dtype.BF16, chunk_tokens=256
)
FULL_REPETITIONS, QUICK_REPETITIONS = 1000, 200
_WARM_UP = 20
REPLICA_CHUNKS, BUSY_CHUNKS, AT_ONCE = 512, 128, 16
_CURRENT_LIMIT_S = 10.0


def measure_matches(state_dir: Path | None, repetitions: int) -> Results:
    """All cases. state_dir: of a running cluster to use. Raises CommandFailed, KvPoolError."""
    tune_process()
    options = ClusterOptions(state_dir=Path(), pagestores=0, agents=0)
    with running_cluster(state_dir) if state_dir else bench_cluster(options) as (state, _):
        return asyncio.run(_measure(state, repetitions))


async def _measure(state: ClusterState, repetitions: int) -> Results:
    config = ClientConfig(index_endpoints=(endpoint_of(state, "index", "endpoint"),), match_timeout_s=10.0)
    async with AsyncExitStack() as stack:
        index = IndexClient(config)
        stack.push_async_callback(index.close)
        keyspace = await index.open_keyspace("kvpool-bench-match", SPEC)
        node_id, hashes = secrets.token_bytes(16), secrets.token_bytes(HASH_BYTES * max(CHUNK_COUNTS))
        await _announce(index, keyspace, node_id, hashes, stack)
        stack.push_async_callback(index.drop_keyspace_locations, keyspace.keyspace, node_id)
        plain = _redis_of(state, keyspace.keyspace, hashes)
        if plain is not None:
            stack.callback(plain.close)
        results = await _take_turns(index, keyspace.keyspace, hashes, plain, repetitions)
        await _add_replica(results, index, keyspace, hashes, repetitions)
        await _add_busy(results, index, keyspace, hashes, repetitions)
        return results


async def _announce(
    index: IndexClient, keyspace: OpenedKeyspace, node_id: bytes, hashes: bytes, stack: AsyncExitStack
) -> None:
    """Register a node that holds every chunk in staging."""

    def on_superseded(error: KvPoolError) -> None:
        say(f"the bench's node was replaced: {error}")

    changes = [
        LocationChange(
            keyspace=keyspace.keyspace,
            chunk_hash=_hash(hashes, chunk),
            group_head_hash=_hash(hashes, chunk - chunk % GROUP_CHUNKS),
            tier=Tier.STAGING,
            added_shards=keyspace.grid.all_shards,
            removed_shards=0,
        )
        for chunk in range(len(hashes) // HASH_BYTES)
    ]
    link = NodeLink(
        index,
        NodeInfo(node_id=node_id, kind=NodeKind.PAGESTORE, host_id="bench", endpoint="127.0.0.1:1"),
        load=NodeLoad,
        truth=FixedLocations(changes),
        on_superseded=on_superseded,
    )
    await link.start(10.0)
    stack.push_async_callback(link.close)
    link.announce(changes)
    await link.wait_announced()


async def _take_turns(
    index: IndexClient, keyspace: bytes, hashes: bytes, plain: PlainRedis | None, repetitions: int
) -> Results:
    ours: dict[int, list[float]] = {count: [] for count in CHUNK_COUNTS}
    theirs: dict[int, list[float]] = {count: [] for count in CHUNK_COUNTS}
    queries = {
        count: ChainQuery(keyspace=keyspace, chunk_hashes=hashes[: count * HASH_BYTES]) for count in CHUNK_COUNTS
    }
    for repetition in range(-_WARM_UP, repetitions):
        if repetition % 50 == 0:
            progress(f"matches: {repetition} of {repetitions}")
        for count in CHUNK_COUNTS:
            started_s = time.perf_counter()
            found = await index.match_stream.match(queries[count])
            middle_s = time.perf_counter()
            if found.matched_chunks != count:
                raise CommandFailed(f"{found.matched_chunks} of {count} chunks were matched")
            if plain is not None:
                plain.read(count)
            if repetition >= 0:
                ours[count].append((middle_s - started_s) * 1e3)
                theirs[count].append((time.perf_counter() - middle_s) * 1e3)
    progress("")
    results = Results()
    for count in CHUNK_COUNTS:
        for name, percent in (("p50", 50), ("p99", 99)):
            baseline = _percentile(theirs[count], percent) if plain is not None else None
            results.add(
                f"match {count} chunks, {name}", "ms", _percentile(ours[count], percent), baseline, "pipelined HMGET"
            )
    return results


async def _add_replica(
    results: Results, index: IndexClient, keyspace: OpenedKeyspace, hashes: bytes, repetitions: int
) -> None:
    """Matches of a known chain, each beside the same one on the stream."""
    query = ChainQuery(keyspace=keyspace.keyspace, chunk_hashes=hashes[: REPLICA_CHUNKS * HASH_BYTES])
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


async def _add_busy(
    results: Results, index: IndexClient, keyspace: OpenedKeyspace, hashes: bytes, repetitions: int
) -> None:
    """Matches at once on one stream, beside the same number one after the other. This client takes part of the time."""
    query = ChainQuery(keyspace=keyspace.keyspace, chunk_hashes=hashes[: BUSY_CHUNKS * HASH_BYTES])

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


class PlainRedis:
    """The same keys and fields by one pipeline of packed HMGETs on a socket: what no index can be faster than."""

    def __init__(self, socket_path: str, keyspace: bytes, hashes: bytes) -> None:
        """Raises CommandFailed when it does not find all keys."""
        with redis.Redis(unix_socket_path=socket_path) as client:
            keys = {_head_of(key, keyspace): key for key in _scan(client, keyspace)}
            heads = [_hash(hashes, chunk) for chunk in range(0, len(hashes) // HASH_BYTES, GROUP_CHUNKS)]
            if not all(head in keys for head in heads):
                raise CommandFailed("the keys of the chunks were not found in Redis")
            fields = {head: [field for field in client.hkeys(keys[head]) if field] for head in heads}
        groups = [_pack([b"HMGET", keys[head], *fields[head]]) for head in heads]
        self._commands = {count: b"".join(groups[: count // GROUP_CHUNKS]) for count in CHUNK_COUNTS}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(socket_path)

    def read(self, chunk_count: int) -> None:
        """Read the values of the first chunk_count chunks."""
        reader = hiredis.Reader()
        self._socket.sendall(self._commands[chunk_count])
        left = chunk_count // GROUP_CHUNKS
        while left:
            reader.feed(self._socket.recv(1 << 20))
            while left and reader.gets() is not False:
                left -= 1

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _redis_of(state: ClusterState, keyspace: bytes, hashes: bytes) -> PlainRedis | None:
    for process in state.of_role("redis"):
        return PlainRedis(process.endpoints["socket"], keyspace, hashes)
    say(f"no baseline: the store is {state.store}")
    return None


def _scan(client: Any, keyspace: bytes) -> Iterator[bytes]:
    found: Iterator[bytes] = client.scan_iter(count=1000, _type="hash")
    return (key for key in found if keyspace in key)


def _head_of(key: bytes, keyspace: bytes) -> bytes:
    """The group head: the index's keys end with it."""
    return key[key.index(keyspace) + len(keyspace) :]


def _pack(words: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _hash(hashes: bytes, chunk: int) -> bytes:
    return hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]


def _percentile(samples: Sequence[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]
