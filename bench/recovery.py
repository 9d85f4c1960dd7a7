"""How long after a kill does a pagestore serve again what it had on disk?

20,000 small pages lie on disk, written through the store itself. A pagestore serves them and is killed (-9); the clock
runs from the start of the next one, its interpreter included, until it answers that all pages are there.

Run: python -m bench.recovery [--pages 20000] [--rounds 3] [--directory DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from bench.waiting import ready_document
from kvpool.client.config import ClientConfig
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup, encode_keyspace, keyspace_id
from kvpool.core.page import PageKey, page_bytes, seal
from kvpool.core.payload import payload_bytes
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.ports import PageWrite

SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(2, 1, 32),), dtype=Dtype.FP32, chunk_tokens=32)
ENCODING = encode_keyspace("default", SPEC)
KEYSPACE = keyspace_id(ENCODING)
PAYLOAD_BYTES = payload_bytes(SPEC, ShardGrid.of(SPEC), 0)
DISK_BYTES = 2 << 30
START_TIMEOUT_S = 60.0


def key(number: int) -> PageKey:
    return PageKey(KEYSPACE, number.to_bytes(16, "big"), 0)


def fill(directory: Path, count: int) -> None:
    """Pages that verify, in chains of 16."""
    store = RocksPageStore(directory / "disk", DISK_BYTES)
    store.open()
    store.remember_keyspace(ENCODING)
    failures: list[KvPoolError | None] = []
    for start in range(0, count, 500):
        batch = []
        for number in range(start, min(start + 500, count)):
            page = bytearray(page_bytes(PAYLOAD_BYTES))
            seal(page, key(number), SPEC.codec, PAYLOAD_BYTES)
            parent = max(0, number - 1).to_bytes(16, "big")
            head = (number - number % 16).to_bytes(16, "big")
            metadata = PageMetadata(parent_hash=parent, chunk_index=number, group_head_hash=head)
            batch.append(PageWrite(key=key(number), page=memoryview(page), metadata=metadata))
        store.put_batch(batch, lambda _, failure: failures.append(failure))
    store.close()
    if any(failures):
        raise RuntimeError("the pages could not be written")


@contextmanager
def pagestore(directory: Path) -> Iterator[str]:
    """The endpoint of a pagestore that serves; it is killed at the end."""
    ready = directory / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "kvpool_pagestore.main", "--data-dir", str(directory), "--ready-file", str(ready)]
    command += ["--listen", "127.0.0.1:0", "--bulk-listen", "127.0.0.1:0", "--disk-bytes", str(DISK_BYTES)]
    command += ["--arena-bytes", str(64 << 20), "--segment-bytes", str(8 << 20), "--log-level", "warning"]
    with subprocess.Popen(command) as process:
        try:
            yield ready_document(process, ready, START_TIMEOUT_S)["endpoint"]
        finally:
            process.kill()


async def pages_on_disk(endpoint: str) -> int:
    control = PageStoreControl(endpoint, ClientConfig())
    try:
        return (await control.status(timeout_s=10.0)).disk_page_count
    finally:
        await control.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made:
        directory = Path(made)
        fill(directory, arguments.pages)
        with pagestore(directory):
            pass
        for _ in range(arguments.rounds):
            started_s = time.perf_counter()
            with pagestore(directory) as endpoint:
                found = asyncio.run(pages_on_disk(endpoint))
                seconds.append(time.perf_counter() - started_s)
            if found != arguments.pages:
                raise RuntimeError(f"{found} pages are there, not {arguments.pages}")
    document = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": "2-core virtual machine, shared with other work",
        "command": f"python -m bench.recovery --pages {arguments.pages} --rounds {arguments.rounds}",
        "pages": arguments.pages,
        "seconds": [round(each, 2) for each in seconds],
        "median_s": round(statistics.median(seconds), 2),
    }
    print(json.dumps(document, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
