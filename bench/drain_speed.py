"""How fast does a pagestore drain, and does it hold up readers of the same node meanwhile?

A cluster with two pagestores on this machine. Pages are streamed to the first one, each answered once it is on disk:
the baseline, since a drain does that and reads the pages besides. Then the first one is drained to the second, while
this process acquires one page of it over and over.

Run: python -m bench.drain_speed [--pages 512] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from bench.rig.cluster import bench_cluster
from bench.rig.engine import FIRST_SHARD, KEYSPACE_NAME, SPEC
from bench.rig.session import PAGE_BYTES, PAYLOAD_BYTES
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.page_items import AcquireItem
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.client.transfer import PageToWrite, PageTransferClient
from kvpool.core.cluster import CHAIN_GROUP_CHUNKS, PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey, seal
from kvpool_cli.cluster import ClusterOptions

WINDOW_PAGES = 16
PAUSE_S = 0.002


def pages_of(keyspace: bytes, count: int) -> list[tuple[PageKey, PageMetadata]]:
    """Pages of chains of one group each."""
    hashes = [np.random.default_rng(number).bytes(16) for number in range(count)]
    return [
        (
            PageKey(keyspace, hashes[number], FIRST_SHARD),
            PageMetadata(
                parent_hash=hashes[number - 1] if number % CHAIN_GROUP_CHUNKS else bytes(16),
                chunk_index=number % CHAIN_GROUP_CHUNKS,
                group_head_hash=hashes[number - number % CHAIN_GROUP_CHUNKS],
            ),
        )
        for number in range(count)
    ]


def write_durable(bulk_endpoint: str, keyspace: bytes, count: int) -> float:
    """Seconds that the pages took, the time for making them left out."""
    client, taken_s = PageTransferClient(bulk_endpoint), 0.0
    buffers = [memoryview(bytearray(PAGE_BYTES)) for _ in range(WINDOW_PAGES)]
    pages = pages_of(keyspace, count)
    for start in range(0, count, WINDOW_PAGES):
        items = []
        for (key, metadata), buffer in zip(pages[start : start + WINDOW_PAGES], buffers, strict=False):
            buffer[64:72] = key.chunk_hash[:8]
            seal(buffer, key, SPEC.codec, PAYLOAD_BYTES)
            items.append(PageToWrite(key=key, page=buffer, metadata=metadata))
        errors: list[KvPoolError | None] = []

        def on_page(
            index: int, admission: Admission, error: KvPoolError | None, errors: list[KvPoolError | None] = errors
        ) -> None:
            errors.append(error)

        before_s = time.perf_counter()
        client.write_pages(
            [(keyspace, SPEC)],
            items,
            on_page,
            timeout_s=60,
            require_durable=True,
        )
        taken_s += time.perf_counter() - before_s
        assert not any(errors), errors
    client.close()
    return taken_s


async def acquire_times(session: PageStoreSession, key: PageKey, stop: asyncio.Event) -> list[float]:
    """Milliseconds of one lease after the other."""
    times: list[float] = []
    while not stop.is_set():
        before_s = time.perf_counter()
        async with session.acquire([AcquireItem(key)], wait_s=10.0) as results:
            async for result in results:
                assert result.slot is not None, result
                session.release_soon([result.slot.lease_id])
        times.append((time.perf_counter() - before_s) * 1e3)
        await asyncio.sleep(PAUSE_S)
    return times


async def measure(index_endpoint: str, endpoints: list[dict[str, str]], count: int) -> dict[str, float]:
    config = ClientConfig(index_endpoints=(index_endpoint,))
    index = IndexClient(config)
    keyspace = (await index.open_keyspace(KEYSPACE_NAME, SPEC)).keyspace
    write_s = await asyncio.to_thread(write_durable, endpoints[0]["bulk_endpoint"], keyspace, count)
    socket = f"unix:{endpoints[0]['socket']}"
    plan = SessionPlan(endpoint=socket, peer_name="bench", keyspaces=((keyspace, SPEC),))
    session, control = await PageStoreSession.open(plan, config), PageStoreControl(socket, config)
    (key, _), *_ = pages_of(keyspace, 1)
    stop = asyncio.Event()
    stop_idle = asyncio.get_running_loop().call_later(2.0, stop.set)
    idle_ms = await acquire_times(session, key, stop)
    stop_idle.cancel()
    stop = asyncio.Event()
    reading = asyncio.ensure_future(acquire_times(session, key, stop))
    before_s = time.perf_counter()
    reports = [progress async for progress in control.drain(timeout_s=300)]
    drain_s = time.perf_counter() - before_s
    stop.set()
    drain_ms = await reading
    await session.close()
    await control.close()
    await index.close()
    # The page that is read over and over became hot, and may have a copy already.
    assert reports[-1].done and reports[-1].moved_page_count >= count - 1, reports[-1]
    total_mb = count * PAGE_BYTES / 1e6
    return {
        "pages": count,
        "page_bytes": PAGE_BYTES,
        "durable_write_mb_per_s": total_mb / write_s,
        "drain_mb_per_s": reports[-1].moved_bytes / 1e6 / drain_s,
        "drain_to_durable_write": write_s / drain_s,
        "acquire_idle_p99_ms": statistics.quantiles(idle_ms, n=100)[98],
        "acquire_draining_p50_ms": statistics.median(drain_ms),
        "acquire_draining_p99_ms": statistics.quantiles(drain_ms, n=100)[98],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = ClusterOptions(
        state_dir=Path(), pagestores=2, agents=0, arena_bytes=256 << 20, disk_bytes=4 << 30, memory_index=True
    )
    with bench_cluster(options) as (state, _):
        stores = [process.endpoints for process in state.of_role("pagestore")]
        (index_process, *_) = state.of_role("index")
        found = asyncio.run(measure(index_process.endpoints["endpoint"], stores, arguments.pages))
    for name, value in found.items():
        print(f"{name:26} {value:12.2f}")
    if arguments.json:
        about = {"date": datetime.now(UTC).date().isoformat(), "machine": "2-core virtual machine"}
        about["command"] = f"python -m bench.drain_speed --pages {arguments.pages}"
        arguments.json.write_text(json.dumps(about | found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
