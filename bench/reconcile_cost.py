"""What comparing a node's chunks with the index costs, at a million chunks.

Question: how long does one step of computing digests hold the event loop up, how much processor time does a whole
comparison take at the owner, and how many bytes does the index's answer have?

    python -m bench.reconcile_cost --chunks 1000000 --json bench/results/reconcile_cost.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from kvpool.core.location_digest import RANGE_COUNT, ChunkPlaces, HeldChunk
from kvpool_server.node.chunk_directory import ChunkDirectory

GRID = 0xFFFF


class MadeNode:
    """Chains of 16 chunks, whole on disk."""

    def __init__(self, chunk_count: int) -> None:
        self.keyspace = os.urandom(16)
        self.heads = {}
        for _ in range(chunk_count // 16):
            head = os.urandom(16)
            for chunk_hash in (head, *(os.urandom(16) for _ in range(15))):
                self.heads[chunk_hash] = head

    def chunks(self) -> Iterator[ChunkPlaces]:
        for chunk_hash, head in self.heads.items():
            yield ChunkPlaces(self.keyspace, chunk_hash, head)

    def locate(self, keyspace: bytes, chunk_hashes: Collection[bytes]) -> Iterator[tuple[bytes, HeldChunk]]:
        return ((one, HeldChunk(self.heads[one], (0, 0, GRID), GRID)) for one in chunk_hashes)

    def keyspace_encodings(self) -> Sequence[bytes]:
        return ()


def measure(chunk_count: int) -> dict[str, float]:
    node = MadeNode(chunk_count)
    started_s = time.perf_counter()
    directory = ChunkDirectory(node)
    for _ in directory.load():
        pass
    built_s = time.perf_counter() - started_s
    steps: list[float] = []
    used_s = time.process_time()
    for number in range(RANGE_COUNT):
        began_s = time.perf_counter()
        for _ in directory.refresh(number):
            steps.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
        steps.append(time.perf_counter() - began_s)
    used_s = time.process_time() - used_s
    began_s = time.perf_counter()
    change_count = sum(len(directory.changes(number)) for number in range(0, RANGE_COUNT, 64))
    list_s = (time.perf_counter() - began_s) / max(1, change_count)
    steps.sort()
    return {
        "chunks": chunk_count,
        "directory_built_s": round(built_s, 3),
        "comparison_processor_s": round(used_s, 3),
        "step_p50_ms": round(steps[len(steps) // 2] * 1e3, 3),
        "step_p99_ms": round(steps[len(steps) * 99 // 100] * 1e3, 3),
        "step_max_ms": round(steps[-1] * 1e3, 3),
        "answer_bytes": 8 * RANGE_COUNT,
        "directory_bytes": 16 * chunk_count,
        "telling_us_per_chunk": round(list_s * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"2-core virtual machine, Python {platform.python_version()}",
        "command": f"python -m bench.reconcile_cost --chunks {given.chunks}",
        "results": measure(given.chunks),
    }
    print(json.dumps(found, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
