"""How much Redis memory does a chunk take?

A million chunks in chains of 512, one location each, announced through the index's own store in large batches to a
fresh server: used_memory before and after, digests included. With the event log, as an index writes it while chunks are
announced, its streams are weighed too; they are bounded, so that the more chunks there are the less they count.

Run: python -m bench.index_memory [--chunks 1000000] [--topologies single,cluster] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.index_fill import MadeChains, announce_all
from kvpool.core.cluster import NodeInfo, NodeKind
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_server.process import tune_process
from tests.fixtures.redis_server import running_redis
from tests.fixtures.redis_topologies import facts, running_cluster

MOST_BYTES = 48.0  # a chunk
LEASE_MS = 3_600_000


@contextlib.contextmanager
def fresh(topology: str) -> Iterator[tuple[str, list[int]]]:
    """URL and ports of servers that hold nothing yet."""
    if topology == "cluster":
        with running_cluster() as cluster:
            yield cluster.url, [server.port for server in cluster.servers]
    else:
        with running_redis() as server:
            yield server.url, [server.port]


def used_bytes(ports: list[int]) -> int:
    return sum(int(facts(port, "memory")["used_memory"]) for port in ports)


async def measure(url: str, ports: list[int], chains: MadeChains, *, with_events: bool) -> dict[str, float]:
    """Announce all chains and weigh them."""
    store = RedisIndexStore(url, timeout_s=60.0)
    info = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, endpoint="127.0.0.1:1", incarnation=0)
    granted = await store.nodes.register(info, last_incarnation=0, lease_ttl_ms=LEASE_MS)
    fence = await store.nodes.open_stream(info.node_id, granted.incarnation, granted.announce_epoch)
    # The scripts and the connections are there already, so that only chunks are weighed.
    first = MadeChains(keyspace=chains.keyspace, chunk_count=16, seed=chains.seed + 1)
    await announce_all(store, fence, first)
    before = used_bytes(ports)
    seconds = await announce_all(store, fence, chains, with_events=with_events)
    after = used_bytes(ports)
    await store.close()
    return {
        "bytes a chunk": round((after - before) / chains.chunk_count, 2),
        "chunks announced a second": round(chains.chunk_count / seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Weigh chunks in Redis.")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--topologies", default="single,cluster")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    tune_process()
    chains = MadeChains(keyspace=bytes(range(16)), chunk_count=given.chunks)
    cases: dict[str, dict[str, float]] = {}
    for topology in given.topologies.split(","):
        for with_events in (False, True):
            with fresh(topology) as (url, ports):
                name = f"{topology}, {'with' if with_events else 'without'} event log"
                cases[name] = asyncio.run(measure(url, ports, chains, with_events=with_events))
                print(f"{name}: {cases[name]}")
    about = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "machine": "2-core virtual machine",
        "command": f"python -m bench.index_memory --chunks {given.chunks} --topologies {given.topologies}",
        "chunks": given.chunks,
    }
    if given.json:
        given.json.write_text(json.dumps({"about": about, "cases": cases}, indent=2) + "\n")
    return int(any(case["bytes a chunk"] > MOST_BYTES for case in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
