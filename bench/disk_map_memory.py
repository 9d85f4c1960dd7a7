"""What does the map of the disk tier cost: bytes a chunk, a start's load, the first victim?
And a page in staging: bytes of the page table, time from its reserve to its commit?

Run: python -m bench.disk_map_memory [CHUNKS] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from kvpool.core.cluster import PageMetadata
from kvpool.core.page import PageKey
from kvpool.core.spans import PageSpan
from kvpool_pagestore.core.admission import AdmissionRules
from kvpool_pagestore.core.chunk_columns import FoundChunks
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.events import PageEvents
from kvpool_pagestore.core.page_table import ArenaLimits, PageTable
from kvpool_pagestore.core.sessions import Session
from kvpool_pagestore.core.slots import PageRecord, Slot, SpaceNeed
from kvpool_pagestore.core.stored_pages import StoredPages

SHARDS = 8
CHAIN_CHUNKS = 32
_STEP_CHUNKS = 1024
_KEYSPACE = b"k" * 16


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Chains:
    """Chains of CHAIN_CHUNKS chunks. It lives as long as a measurement, or what it frees would count as saved."""

    def __init__(self, chunk_count: int) -> None:
        self._hashes = np.random.default_rng(1).bytes(16 * chunk_count)
        words = np.frombuffer(self._hashes, ">u8").reshape(-1, 2)
        self._order = np.lexsort((words[:, 1], words[:, 0]))

    def stored_pages(self) -> Iterator[StoredPages]:
        """All pages, in the order of their chunks' hashes."""
        for start in range(0, len(self._order), _STEP_CHUNKS):
            yield StoredPages.of(
                (PageKey(_KEYSPACE, self._hash(number), shard), 1 << 20, self._metadata(number))
                for number in self._order[start : start + _STEP_CHUNKS].tolist()
                for shard in range(SHARDS)
            )

    def _hash(self, number: int) -> bytes:
        return self._hashes[16 * number : 16 * number + 16]

    def _metadata(self, number: int) -> PageMetadata:
        index = number % CHAIN_CHUNKS
        return PageMetadata(
            parent_hash=self._hash(number - 1) if index else bytes(16),
            chunk_index=index,
            group_head_hash=self._hash(number - number % 16),
            prompt_tokens=512,
        )


def measure(chunk_count: int) -> dict[str, float]:
    """Load a map as a start does, then evict from it with all ghosts in place."""
    disk, found, chains = DiskMap(lambda key: 1 << 20, PageEvents(), lambda: 0), FoundChunks(), Chains(chunk_count)
    pages = chains.stored_pages()
    first = next(pages)
    before_bytes = resident_bytes()
    load_s = 0.0
    for part in chain([first], pages):
        began_s = time.thread_time()
        found.add(part)
        load_s += time.thread_time() - began_s
    began_s = time.thread_time()
    disk.restore(found)
    disk.count_restored(found)
    restore_s = time.thread_time() - began_s
    del part, first
    loaded_bytes = resident_bytes() - before_bytes
    victims_s: list[float] = []
    for _ in range(min(chunk_count // 2, 100_000)):
        began_s = time.thread_time()
        (chunk,) = disk.oldest(1, lambda key: False)
        victims_s.append(time.thread_time() - began_s)
        disk.remove_chunks([chunk.name])
        disk.add(PageKey(_KEYSPACE, random.randbytes(16), 0), chunk.metadata)
    return {
        "chunks": chunk_count,
        "pages": chunk_count * SHARDS,
        "bytes_a_chunk": round(loaded_bytes / chunk_count, 1),
        "bytes_a_chunk_after_evictions": round((resident_bytes() - before_bytes) / chunk_count, 1),
        "load_s": round(load_s + restore_s, 2),
        "restore_s": round(restore_s, 2),
        "first_victim_ms": round(1e3 * victims_s[0], 3),
        "longest_victim_ms": round(1e3 * max(victims_s), 3),
        "mean_victim_us": round(1e6 * sum(victims_s) / len(victims_s), 2),
    }


def measure_staged(chunk_count: int, shards: int) -> dict[str, float]:
    """Store and commit pages until so many chunks are staged. Slots are booked, but no memory is behind them."""
    page_bytes, count = 1 << 20, chunk_count * shards
    limits = ArenaLimits(
        arena_bytes=2 * count * page_bytes,
        segment_bytes=1 << 30,
        first_segment_id=1,
        writer_bytes=1 << 62,
        grace_s=1.0,
    )
    table = PageTable(limits, PageEvents(), AdmissionRules(), lambda: 0)
    session, rng = Session(bytes(16), "tenant", "peer", max_leases=count), random.Random(1)
    before_bytes, began_s = resident_bytes(), time.thread_time()
    for _ in range(chunk_count // CHAIN_CHUNKS):
        span = PageSpan(
            keyspace=_KEYSPACE,
            chunk_hashes=rng.randbytes(16 * CHAIN_CHUNKS),
            first_chunk_index=0,
            parent_hash=bytes(16),
            group_heads=rng.randbytes(16 * (CHAIN_CHUNKS // 16)),
            positions=np.repeat(np.arange(CHAIN_CHUNKS, dtype=np.int32), shards),
            shards=np.tile(np.arange(shards, dtype=np.uint8), CHAIN_CHUNKS),
        )
        for key, position in zip(span.page_keys, span.positions.tolist(), strict=True):
            record = PageRecord(key, page_bytes, span.metadata[position])
            while table.reserve_slot(session, record, page_bytes) is SpaceNeed.SEGMENT:
                segment = table.space.plan_segment("tenant", page_bytes)
                assert segment is not None
                table.space.segment_made(segment)
            slot = table.begin_commit(session, session.last_lease_id)
            assert isinstance(slot, Slot) and table.finish_commit(slot, verified=True, dirty=False)
    count = table.ready_count
    name = f"staged_{shards}_shards"
    return {
        f"{name}_bytes_a_page": round((resident_bytes() - before_bytes) / count, 1),
        f"{name}_us_a_page": round(1e6 * (time.thread_time() - began_s) / count, 1),
    }


def main(argv: list[str]) -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chunks", nargs="?", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as apart:  # memory of one is no other's
        measured = apart.submit(measure, arguments.chunks).result()
        for shards in (1, SHARDS):
            measured |= apart.submit(measure_staged, arguments.chunks // 5 // shards, shards).result()
    print(json.dumps(measured, indent=1))
    if arguments.json:
        command = "python -m bench.disk_map_memory " + str(arguments.chunks)
        document = {"machine": "2-core virtual machine, beside other work", "command": command, **measured}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
