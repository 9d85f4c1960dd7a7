"""What announcing costs a node: processor time and batches while one page a millisecond becomes visible.

Question: does merging changes while a batch is in flight pay? An index with a store in memory runs as a process; the
sleeps of the load alone are measured after it and taken off.

    python -m bench.announce_cost --pages 1500
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.waiting import ready_document
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.core.cluster import CHAIN_GROUP_CHUNKS, LocationChange, NodeInfo, NodeKind, NodeLoad
from kvpool.core.outcome import Tier
from kvpool_server.node.chunk_directory import FixedLocations
from kvpool_server.node.node_link import NodeLink

SHARDS = 16  # pages of a chunk, one after the other
PAGE_PAUSE_S = 0.001
KEYSPACE = b"k" * 16


async def measure(endpoint: str, page_count: int) -> dict[str, float]:
    client = IndexClient(ClientConfig(index_endpoints=(endpoint,)))
    node = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, endpoint="127.0.0.1:1")
    link = NodeLink(client, node, load=NodeLoad, truth=FixedLocations([]), on_superseded=lambda error: None)
    await link.start(10.0)
    await link.wait_announced()
    hashes = [secrets.token_bytes(16) for _ in range(page_count // SHARDS + 1)]
    used_s, began_s = time.process_time(), time.perf_counter()
    batches = link._queue.last_sequence  # noqa: SLF001  # of interest to nothing else
    for page in range(page_count):
        chunk = page // SHARDS
        change = LocationChange(
            keyspace=KEYSPACE,
            chunk_hash=hashes[chunk],
            group_head_hash=hashes[chunk - chunk % CHAIN_GROUP_CHUNKS],
            tier=Tier.STAGING,
            added_shards=1 << page % SHARDS,
            removed_shards=0,
        )
        link.announce([change])
        await asyncio.sleep(PAGE_PAUSE_S)
    await link.wait_announced()
    used_s, took_s = time.process_time() - used_s, time.perf_counter() - began_s
    batches = link._queue.last_sequence - batches  # noqa: SLF001  # as above
    idle_s = time.process_time()
    for _ in range(page_count):
        await asyncio.sleep(PAGE_PAUSE_S)
    used_s -= time.process_time() - idle_s
    await link.close()
    await client.close()
    return {
        "pages": page_count,
        "processor_s": round(used_s, 3),
        "share": round(used_s / took_s, 3),
        "batches": batches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=1500)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready.json"
        command = [sys.executable, "-m", "kvpool_index.main", "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            found = asyncio.run(measure(ready_document(process, ready)["endpoint"], given.pages))
        finally:
            process.kill()
            process.wait()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
