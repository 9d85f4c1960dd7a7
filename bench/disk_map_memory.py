"""What does the map of the disk tier cost: bytes a chunk, a start's load, the longest step, the first victim?

Run: python -m bench.disk_map_memory [CHUNKS] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvpool.core.cluster import PageMetadata
from kvpool.core.page import PageKey
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.events import PageEvents
from kvpool_pagestore.core.kept_metadata import StoredPage, pack_metadata

SHARDS = 8
CHAIN_CHUNKS = 32
_STEP_PAGES = 2048
_KEYSPACE = b"k" * 16


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def stored_pages(chunk_count: int) -> Iterator[StoredPage]:
    """Chains of CHAIN_CHUNKS chunks, in the order of their hashes' making."""
    rng = random.Random(1)
    parent = head = bytes(16)
    for number in range(chunk_count):
        chunk_hash, index = rng.randbytes(16), number % CHAIN_CHUNKS
        if index % 16 == 0:
            head = chunk_hash
        kept = PageMetadata(
            parent_hash=parent if index else bytes(16), chunk_index=index, group_head_hash=head, prompt_tokens=512
        )
        packed, parent = pack_metadata(kept), chunk_hash
        for shard in range(SHARDS):
            yield StoredPage(PageKey(_KEYSPACE, chunk_hash, shard).pack(), 1 << 20, packed)


def measure(chunk_count: int) -> dict[str, float]:
    """Load a map as a start does, then evict from it with all ghosts in place."""
    disk, pages = DiskMap(lambda key: 1 << 20, PageEvents(), lambda: 0), stored_pages(chunk_count)
    before_bytes = resident_bytes()
    load_s = longest_s = 0.0
    while part := list(islice(pages, _STEP_PAGES)):
        began_s = time.thread_time()
        disk.add_found(part)
        took_s = time.thread_time() - began_s
        load_s, longest_s = load_s + took_s, max(longest_s, took_s)
    del part
    loaded_bytes = resident_bytes() - before_bytes
    victims_s: list[float] = []
    for _ in range(min(chunk_count // 2, 100_000)):
        began_s = time.thread_time()
        (chunk,) = disk.oldest(1, lambda key: False)
        victims_s.append(time.thread_time() - began_s)
        disk.remove_chunk(chunk.name)
        disk.add(PageKey(_KEYSPACE, random.randbytes(16), 0), chunk.metadata)
    return {
        "chunks": chunk_count,
        "pages": chunk_count * SHARDS,
        "bytes_a_chunk": round(loaded_bytes / chunk_count, 1),
        "bytes_a_chunk_after_evictions": round((resident_bytes() - before_bytes) / chunk_count, 1),
        "load_s": round(load_s, 2),
        "longest_load_step_ms": round(1e3 * longest_s, 2),
        "first_victim_ms": round(1e3 * victims_s[0], 3),
        "longest_victim_ms": round(1e3 * max(victims_s), 3),
        "mean_victim_us": round(1e6 * sum(victims_s) / len(victims_s), 2),
    }


def main(argv: list[str]) -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chunks", nargs="?", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    measured = measure(arguments.chunks)
    print(json.dumps(measured, indent=1))
    if arguments.json:
        command = "python -m bench.disk_map_memory " + str(arguments.chunks)
        document = {"machine": "2-core virtual machine, beside other work", "command": command, **measured}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
