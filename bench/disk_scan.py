"""How long does a pagestore with a million pages on disk take from opening RocksDB to a full map of them?

The records are real and lie in a real RocksDB; their pages were never written (a scan reads none). They name blocks
of one sparse file, so that the free extents are found as at any start. Timed in a fresh process, the page cache
emptied of the files before: opening, which checks records and finds what is free; then engine_disk.DiskTier.load.

Run: python -m bench.disk_scan [--records 1000000] [--directory DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import CollectorRegistry
from rocksdict import WriteBatch

from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup, encode_keyspace, keyspace_id
from kvpool.core.page import PageKey, page_bytes
from kvpool.core.payload import payload_bytes
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.adapters.records import RECORDS, PageRecord
from kvpool_pagestore.core.disk_budget import page_blocks
from kvpool_pagestore.core.extents import BLOCK_BYTES, Extent
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.engine_disk import DiskTier
from kvpool_pagestore.engine_tasks import EngineTasks
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.ports import PageMetadata
from kvpool_server.executor import BoundedExecutor
from kvpool_server.process import tune_process

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(4, 1, 64),), dtype=Dtype.FP32, chunk_tokens=32)
ENCODING = encode_keyspace("default", SPEC)
KEYSPACE = keyspace_id(ENCODING)
PAGE_BYTES = page_bytes(payload_bytes(SPEC, ShardGrid.of(SPEC), 0))
CAPACITY_BYTES = 8 << 40


class NoAnnouncer:
    """Nobody is told while a tier loads."""

    def disk(self, *_: object) -> None:
        """Nothing."""


def build(directory: Path, count: int) -> None:
    """Records of `count` pages in one sparse file."""
    store = RocksPageStore(directory, CAPACITY_BYTES)
    store.open()
    store.remember_keyspace(ENCODING)
    blocks = page_blocks(PAGE_BYTES)
    with (directory / "extents" / "1.pages").open("wb") as file:
        file.truncate((count + 1) * blocks * BLOCK_BYTES)
    database = store._pages.database  # the one way to write records without their pages
    batch = WriteBatch(raw_mode=True)
    for number in range(count):
        key = PageKey(KEYSPACE, os.urandom(16), 0)
        metadata = PageMetadata(parent_hash=os.urandom(16), chunk_index=number, group_head_hash=os.urandom(16))
        record = PageRecord(PAGE_BYTES, number, (Extent(1, number * blocks, blocks),), metadata)
        batch.put(key.pack(), record.encode(), database.handle(RECORDS))
        if len(batch) == 4096:
            database.write(batch, sync=False)
            batch = WriteBatch(raw_mode=True)
    database.write(batch, sync=True)
    store.close()


async def load(directory: Path, count: int) -> dict[str, float]:
    """Seconds of each step, and of the processor: what a machine without other work would need at most."""
    started_s, begun_s = time.perf_counter(), time.process_time()
    store = RocksPageStore(directory, CAPACITY_BYTES)
    store.open()
    opened_s = time.perf_counter()
    readers, writers = (BoundedExecutor(name, threads=2, queue_limit=64) for name in ("read", "write"))
    metrics = PageStoreMetrics(CollectorRegistry())
    announcer: object = NoAnnouncer()
    tier = DiskTier(
        store, CAPACITY_BYTES, KeyspaceBook(), announcer, readers, writers, EngineTasks(), metrics  # type: ignore[arg-type]
    )  # fmt: skip
    await tier.load()
    loaded_s = time.perf_counter()
    if tier.map.page_count != count:
        raise RuntimeError(f"{tier.map.page_count} pages are in the map, not {count}")
    await tier.close()
    await readers.close()
    await writers.close()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "open_s": opened_s - started_s,
        "load_s": loaded_s - opened_s,
        "processor_s": time.process_time() - begun_s,
        "peak_resident_mib": peak_mib,
    }


def drop_caches(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--load", type=Path, help="time the loading of this directory and print it (used by itself)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tune_process()
    if arguments.load:
        print(json.dumps(asyncio.run(load(arguments.load, arguments.records))))
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        build(Path(directory) / "disk", arguments.records)
        drop_caches(Path(directory))
        command = [sys.executable, "-m", "bench.disk_scan", "--records", str(arguments.records), "--load"]
        output = subprocess.run([*command, f"{directory}/disk"], stdout=subprocess.PIPE, check=True).stdout
    steps = {name: round(value, 2) for name, value in json.loads(output).items()}
    document = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": "2-core virtual machine, shared with other work",
        "command": f"python -m bench.disk_scan --records {arguments.records}",
        "records": arguments.records,
        **steps,
        "total_s": round(steps["open_s"] + steps["load_s"], 2),
    }
    print(json.dumps(document, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
