"""Does bulk work hold up the small calls? reserve, acquire and match beside a page stream and write-back at full speed.

A cluster with one pagestore; another process streams fresh pages to it without a pause, and the pagestore writes them
back to disk. Meanwhile this process asks for one lease or match at a time and takes each answer's time. The baseline of
the times under load is how late a thread of this process wakes up from a sleep in the same seconds: no answer can come
sooner on a machine whose cores are all busy.

Run: python -m bench.ledger_latency [--seconds 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from kvpool.cli.bench_cluster import bench_cluster, endpoint_of
from kvpool.cli.bench_engine import KEYSPACE_NAME, SPEC
from kvpool.cli.bench_session import METADATA, PAGE_BYTES, PAYLOAD_BYTES
from kvpool.cli.cluster import ClusterOptions
from kvpool.cli.output import table
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.page_items import AcquireItem, ReserveItem
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.transfer import PageToWrite, PageTransferClient
from kvpool.core.cluster import ChainQuery
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey, seal

PAUSE_S = 0.002
MATCH_CHUNKS = 128
LOAD_PAGES = 16

Row = dict[str, object]


def stream_pages(bulk_endpoint: str, keyspace: bytes, stop: Event, written: multiprocessing.Queue[int]) -> None:
    """Write fresh pages without a pause until `stop`; then the number that the pagestore took."""
    client = PageTransferClient(bulk_endpoint, frame_bytes=1 << 20)
    pages = [memoryview(bytearray(PAGE_BYTES)) for _ in range(LOAD_PAGES)]
    draw, taken = np.random.default_rng().bytes, 0

    def on_page(number: int, admission: Admission, error: object) -> None:
        nonlocal taken
        taken += admission is Admission.RESERVED and error is None

    while not stop.is_set():
        items = []
        for page in pages:
            key = PageKey(keyspace, draw(16), 0)
            seal(page, key, SPEC.codec, PAYLOAD_BYTES)
            items.append(PageToWrite(key=key, page=page, metadata=METADATA))
        client.write_pages([(keyspace, SPEC)], items, on_page, timeout_s=60)
    written.put(taken)
    client.close()


class Lateness(threading.Thread):
    """How late a thread wakes up: milliseconds, sampled until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples_ms: list[float] = []
        self._stop_asked = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.is_set():
            before_s = time.perf_counter()
            time.sleep(PAUSE_S)
            self.samples_ms.append((time.perf_counter() - before_s - PAUSE_S) * 1e3)

    def stop(self) -> list[float]:
        self._stop_asked.set()
        self.join()
        return self.samples_ms


class Probe:
    """The small calls, one at a time."""

    def __init__(self, session: PageStoreSession, index: IndexClient, keyspace: bytes) -> None:
        self._session, self._index, self._keyspace = session, index, keyspace
        self._draw = np.random.default_rng(1).bytes
        self._kept = PageKey(keyspace, self._draw(16), 0)
        self._query = ChainQuery(keyspace=keyspace, chunk_hashes=self._draw(16 * MATCH_CHUNKS))
        self.rejected = 0

    async def store_one(self) -> None:
        """The page that is acquired over and over."""
        (result,) = await self._session.reserve([ReserveItem(self._kept, PAGE_BYTES, METADATA)])
        assert result.slot is not None, result
        seal(self._session.slot_view(result.slot), self._kept, SPEC.codec, PAYLOAD_BYTES)
        assert await self._session.commit([result.slot.lease_id]) == [None]

    async def reserve(self) -> None:
        item = ReserveItem(PageKey(self._keyspace, self._draw(16), 0), PAGE_BYTES, METADATA)
        (result,) = await self._session.reserve([item])
        if result.slot is None:
            self.rejected += 1  # an answer all the same: the writers have their whole share of the arena
        else:
            self._session.abort_soon([result.slot.lease_id])

    async def acquire(self) -> None:
        async with self._session.acquire([AcquireItem(self._kept)], wait_s=10.0) as results:
            async for result in results:
                assert result.slot is not None, result
                self._session.release_soon([result.slot.lease_id])

    async def match(self) -> None:
        await self._index.match_stream.match(self._query)

    async def sample(self, seconds: float) -> dict[str, list[float]]:
        """Milliseconds of each call, taken in turns."""
        calls = {"reserve": self.reserve, "acquire": self.acquire, f"match {MATCH_CHUNKS} chunks": self.match}
        found: dict[str, list[float]] = {name: [] for name in calls}
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            for name, call in calls.items():
                await asyncio.sleep(PAUSE_S)
                before_s = time.perf_counter()
                await call()
                found[name].append((time.perf_counter() - before_s) * 1e3)
        return found


def percentile(samples: Sequence[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


def rows_of(state: str, found: dict[str, list[float]], lateness_ms: Sequence[float]) -> list[Row]:
    baseline = {"wakes_late_p50_ms": percentile(lateness_ms, 50), "wakes_late_p99_ms": percentile(lateness_ms, 99)}
    return [
        {"state": state, "call": name, "samples": len(times), "max_ms": max(times)}
        | {f"p{percent}_ms": percentile(times, percent) for percent in (50, 99)}
        | baseline
        for name, times in found.items()
    ]


async def measure(pagestore: str, bulk: str, index_endpoint: str, seconds: float) -> tuple[list[Row], str]:
    """All rows, and what the stream did meanwhile."""
    config = ClientConfig(index_endpoints=(index_endpoint,), match_timeout_s=10.0)
    index = IndexClient(config)
    keyspace = (await index.open_keyspace(KEYSPACE_NAME, SPEC)).keyspace
    plan = SessionPlan(endpoint=pagestore, peer_name="bench", keyspaces=((keyspace, SPEC),))
    session = await PageStoreSession.open(plan, config)
    probe = Probe(session, index, keyspace)
    await probe.store_one()
    await probe.sample(1.0)  # connections, caches
    rows = []
    lateness = Lateness()
    lateness.start()
    rows += rows_of("idle", await probe.sample(seconds / 2), lateness.stop())
    context = multiprocessing.get_context("spawn")
    stop, written = context.Event(), context.Queue()
    load = context.Process(target=stream_pages, args=(bulk, keyspace, stop, written))
    load.start()
    try:
        await probe.sample(3.0)  # until the stream runs, and the arena is full
        probe.rejected = 0
        lateness = Lateness()
        lateness.start()
        rows += rows_of("saturated", await probe.sample(seconds), lateness.stop())
    finally:
        stop.set()
        taken = await asyncio.to_thread(written.get, True, 60)
        load.join(10)
    await session.close()
    await index.close()
    return rows, f"{taken * PAGE_BYTES / 1e9:.1f} GB streamed meanwhile; {probe.rejected} reserves had no room"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = ClusterOptions(state_dir=Path(), pagestores=1, agents=0, arena_bytes=512 << 20, disk_bytes=8 << 30)
    with bench_cluster(options) as (state, _):
        rows, said = asyncio.run(
            measure(
                f"unix:{endpoint_of(state, 'pagestore', 'socket')}",
                endpoint_of(state, "pagestore", "bulk_endpoint"),
                endpoint_of(state, "index", "endpoint"),
                arguments.seconds,
            )
        )
    columns = list(rows[0])
    print(table(columns, [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]))
    print(said)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "load": said}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
