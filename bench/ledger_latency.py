"""Does bulk work hold up the small calls? reserve, acquire and match beside a page stream and write-back at full speed.

A cluster with one pagestore; another process streams fresh pages to it without a pause, and the pagestore writes them
back to disk. Meanwhile this process asks for one lease or match at a time and takes each answer's time. Two baselines
are taken in the same seconds, because no answer can come sooner on a machine whose cores are all busy: how late a
thread of this process wakes up, and the time of a message to a gRPC server that does nothing but echo it.

With --ahead all of it is measured once more, in turns with the usual way, while the kernel lets what answers go before
what moves bytes: this process, the index, its Redis and the pagestore's loop under SCHED_RR, which needs privileges.
What is gained is what these processes wait for a core.

Run: python -m bench.ledger_latency [--seconds 20] [--ahead] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TypeAlias

import grpc
import numpy as np

from bench.rig.cluster import bench_cluster, endpoint_of
from bench.rig.engine import FIRST_SHARD, KEYSPACE_NAME, SPEC
from bench.rig.session import METADATA, PAGE_BYTES, PAYLOAD_BYTES
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.page_items import AcquireItem, ReserveItem
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.client.transfer import PageToWrite, PageTransferClient
from kvpool.core.cluster import ChainQuery
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey, seal
from kvpool_cli.cluster import ClusterOptions
from kvpool_cli.output import as_text, table
from kvpool_cli.state import ClusterState

PAUSE_S = 0.002
MATCH_CHUNKS = 128
MATCH = f"match {MATCH_CHUNKS} chunks"
LOAD_PAGES = 16
TURNS = 4  # in which the two ways take the time under load
ECHO_METHOD = "/bench.Echo/Stream"
ECHO_MESSAGE = bytes(100)

Row = dict[str, object]
EchoCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


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
            key = PageKey(keyspace, draw(16), FIRST_SHARD)
            seal(page, key, SPEC.codec, PAYLOAD_BYTES)
            items.append(PageToWrite(key=key, page=page, metadata=METADATA))
        client.write_pages([(keyspace, SPEC)], items, on_page, timeout_s=60)
    written.put(taken)
    client.close()


def serve_echo(port: multiprocessing.Queue[int]) -> None:
    """Send each message of a stream back, until this process is terminated."""

    async def echo(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async for request in requests:
            await context.write(request)

    async def serve() -> None:
        server = grpc.aio.server()
        _, service, method = ECHO_METHOD.split("/")
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(echo)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
        port.put(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


@asynccontextmanager
async def echo_stream() -> AsyncIterator[EchoCall]:
    """A stream to an echo server of our own."""
    context = multiprocessing.get_context("spawn")
    port: multiprocessing.Queue[int] = context.Queue()
    server = context.Process(target=serve_echo, args=(port,), daemon=True)
    server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{await asyncio.to_thread(port.get, True, 60)}") as channel:
            yield channel.stream_stream(ECHO_METHOD)()
    finally:
        server.terminate()
        server.join(10)


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


class Ahead:
    """Puts what answers before what moves bytes, and back."""

    def __init__(self, state: ClusterState) -> None:
        whole = [process.pid for role in ("index", "redis") for process in state.of_role(role)]
        self._whole = [os.getpid(), *whole]
        self._parted = [process.pid for process in state.of_role("pagestore")]

    def set(self, ahead: bool) -> None:
        """Raises PermissionError."""
        threads = [(pid, path) for pid in [*self._whole, *self._parted] for path in Path(f"/proc/{pid}/task").iterdir()]
        for pid, path in threads:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                # gRPC's own threads have names; all of Python's are called like their process, and the loop's is first.
                is_worker = int(path.name) != pid and not (path / "comm").read_text().startswith("event_engine")
                policy = os.SCHED_RR if ahead and not (pid in self._parted and is_worker) else os.SCHED_OTHER
                os.sched_setscheduler(int(path.name), policy, os.sched_param(int(policy == os.SCHED_RR)))


class Probe:
    """The small calls, one at a time."""

    def __init__(self, session: PageStoreSession, index: IndexClient, echo: EchoCall, keyspace: bytes) -> None:
        self._session, self._index, self._echo, self._keyspace = session, index, echo, keyspace
        self._draw = np.random.default_rng(1).bytes
        self._kept = PageKey(keyspace, self._draw(16), FIRST_SHARD)
        self._query = ChainQuery(keyspace=keyspace, chunk_hashes=self._draw(16 * MATCH_CHUNKS))
        self.rejected = 0

    async def store_one(self) -> None:
        """The page that is acquired over and over."""
        (result,) = await self._session.reserve([ReserveItem(self._kept, PAGE_BYTES, METADATA)])
        assert result.slot is not None, result
        seal(self._session.slot_view(*result.slot.place), self._kept, SPEC.codec, PAYLOAD_BYTES)
        assert await self._session.commit([result.slot.lease_id]) == []

    async def reserve(self) -> None:
        item = ReserveItem(PageKey(self._keyspace, self._draw(16), FIRST_SHARD), PAGE_BYTES, METADATA)
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

    async def echo(self) -> None:
        await self._echo.write(ECHO_MESSAGE)
        assert await self._echo.read() == ECHO_MESSAGE

    async def sample(self, seconds: float) -> dict[str, list[float]]:
        """Milliseconds of each call, taken in turns."""
        calls = {"echo": self.echo, "reserve": self.reserve, "acquire": self.acquire, MATCH: self.match}
        found: dict[str, list[float]] = {name: [] for name in calls}
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            for name, call in calls.items():
                await asyncio.sleep(PAUSE_S)
                before_s = time.perf_counter()
                await call()
                found[name].append((time.perf_counter() - before_s) * 1e3)
        return found


class Samples:
    """Milliseconds of one or more stretches: of the calls, and how late a thread of this process woke up."""

    def __init__(self, state: str) -> None:
        self._state = state
        self._times_ms: dict[str, list[float]] = {}
        self._late_ms: list[float] = []

    async def take(self, probe: Probe, seconds: float) -> None:
        lateness = Lateness()
        lateness.start()
        for name, times in (await probe.sample(seconds)).items():
            self._times_ms.setdefault(name, []).extend(times)
        self._late_ms += lateness.stop()

    def rows(self) -> list[Row]:
        baseline = {f"wakes_late_p{percent}_ms": percentile(self._late_ms, percent) for percent in (50, 99)}
        return [
            {"state": self._state, "call": name, "samples": len(times), "max_ms": max(times)}
            | {f"p{percent}_ms": percentile(times, percent) for percent in (50, 99)}
            | baseline
            for name, times in self._times_ms.items()
        ]


def percentile(samples: Sequence[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


async def measure(state: ClusterState, seconds: float, ahead: Ahead | None) -> tuple[list[Row], str]:
    """All rows, and what the stream did meanwhile."""
    socket, bulk = (endpoint_of(state, "pagestore", key) for key in ("socket", "bulk_endpoint"))
    config = ClientConfig(index_endpoints=(endpoint_of(state, "index", "endpoint"),), match_timeout_s=10.0)
    index = IndexClient(config)
    keyspace = (await index.open_keyspace(KEYSPACE_NAME, SPEC)).keyspace
    plan = SessionPlan(endpoint=f"unix:{socket}", peer_name="bench", keyspaces=((keyspace, SPEC),))
    session = await PageStoreSession.open(plan, config)
    async with echo_stream() as echo:
        probe = Probe(session, index, echo, keyspace)
        await probe.store_one()
        await probe.sample(1.0)  # connections, caches
        idle = Samples("idle")
        await idle.take(probe, seconds / 2)
        saturated, taken = await measure_saturated(probe, bulk, keyspace, seconds, ahead)
    await session.close()
    await index.close()
    said = f"{taken * PAGE_BYTES / 1e9:.1f} GB streamed meanwhile; {probe.rejected} reserves had no room"
    return [*idle.rows(), *saturated], said


async def measure_saturated(
    probe: Probe, bulk: str, keyspace: bytes, seconds: float, ahead: Ahead | None
) -> tuple[list[Row], int]:
    """The rows under load, and how many pages the pagestore took meanwhile."""
    context = multiprocessing.get_context("spawn")
    stop, written = context.Event(), context.Queue()
    load = context.Process(target=stream_pages, args=(bulk, keyspace, stop, written))
    load.start()
    try:
        await probe.sample(3.0)  # until the stream runs, and the arena is full
        probe.rejected = 0
        usual, first = Samples("saturated"), Samples("saturated, ahead")
        for _ in range(TURNS):
            await usual.take(probe, seconds / TURNS)
            if ahead is not None:
                ahead.set(True)
                await first.take(probe, seconds / TURNS)
                ahead.set(False)
    finally:
        stop.set()
        taken = await asyncio.to_thread(written.get, True, 60)
        load.join(10)
    return [*usual.rows(), *(first.rows() if ahead is not None else ())], taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--ahead", action="store_true", help="also measure with the calls ahead of bulk work")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = ClusterOptions(state_dir=Path(), pagestores=1, agents=0, arena_bytes=512 << 20, disk_bytes=8 << 30)
    with bench_cluster(options) as (state, _):
        rows, said = asyncio.run(measure(state, arguments.seconds, Ahead(state) if arguments.ahead else None))
    columns = list(rows[0])
    print(
        as_text(
            table(columns, [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows])
        )
    )
    print(said)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "load": said}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
