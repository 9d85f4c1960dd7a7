"""What does mutual TLS cost: page streams, matches on an open stream, new connections?

Two pagestores and two indexes (over one Redis), of each one in the clear and one with TLS, as processes; this process
calls them in turns, in random order, so that a busy machine slows both alike. Streams are of 2 MiB pages, unverified by
the reader; processor seconds are those of both ends together, by gigabyte that was read.

Run: python -m bench.tls_cost [--pages 32] [--rounds 8] [--matches 1500] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.match_rig import filled, percentile, query_of, running_index, running_redis
from bench.pages_stream import KEYSPACE, METADATA, PAYLOAD_BYTES, SPEC, key, make_page
from bench.process_usage import cpu_s
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.tls import TlsCredentials, TlsFiles
from kvpool.client.transfer import PageToRead, PageToWrite, PageTransferClient
from kvpool.core.outcome import Admission
from kvpool.core.page import page_bytes
from kvpool_server.process import poll_grpc_directly
from tests.e2e.service_processes import Process
from tests.fixtures.certificates import Authority

CHUNKS, STORED_CHUNKS = 512, 10_000
WAYS = ("plain", "tls")
_WARM_UP = 100


def flags_of(files: TlsFiles, way: str) -> list[str]:
    """Of a service."""
    given = files.named() if way == "tls" else iter(())
    return [part for name, path in given for part in (f"--{name.replace('_', '-')}", str(path))]


class Streams:
    """Page streams to one pagestore, with buffers for all pages."""

    def __init__(self, process: Process, tls: TlsCredentials | None, page_count: int) -> None:
        self._pid = process.pid
        self._client = PageTransferClient(process.ready["bulk_endpoint"], frame_bytes=1 << 20, tls=tls)
        self._buffers = [bytearray(page_bytes(PAYLOAD_BYTES)) for _ in range(page_count)]
        self._written = 0
        self.close = self._client.close

    @property
    def size_bytes(self) -> int:
        """Of one round."""
        return sum(len(buffer) for buffer in self._buffers)

    def cpu_s(self) -> float:
        """Processor time of both ends so far."""
        return cpu_s(self._pid) + time.process_time()

    def prepare_write(self) -> None:
        """Make pages that the pagestore does not have."""
        for number, buffer in enumerate(self._buffers):
            make_page(self._written + number, memoryview(buffer))

    def write(self) -> None:
        """Until they are verified and visible there."""
        items = [
            PageToWrite(key=key(self._written + number), page=memoryview(buffer), metadata=METADATA)
            for number, buffer in enumerate(self._buffers)
        ]
        answers: list[object] = []
        self._client.write_pages(
            [(KEYSPACE, SPEC)], items, lambda at, admission, error: answers.append(error or admission), timeout_s=60
        )
        assert answers == [Admission.RESERVED] * len(items), answers[:3]
        self._written += len(items)

    def read(self) -> None:
        """The pages written first."""
        items = [PageToRead(key=key(n), destination=memoryview(buffer)) for n, buffer in enumerate(self._buffers)]
        hits: list[bool] = []
        self._client.read_pages([(KEYSPACE, SPEC)], items, lambda at, error, hit: hits.append(hit), timeout_s=60)
        assert hits == [True] * len(items)


@contextlib.contextmanager
def pagestores(directory: Path, files: TlsFiles, page_count: int, rounds: int) -> Iterator[dict[str, Streams]]:
    """One of each way, without disk and index."""
    arena_bytes = page_bytes(PAYLOAD_BYTES) * page_count * (rounds + 2) * 5 // 2
    with contextlib.ExitStack() as stack:
        found: dict[str, Streams] = {}
        for way in WAYS:
            process = Process(
                "kvpool_pagestore",
                directory / way,
                *("--data-dir", str(directory / way / "data"), "--disk-bytes", "0", "--log-level", "warning"),
                *("--listen", "127.0.0.1:0", "--bulk-listen", "127.0.0.1:0", "--arena-bytes", str(arena_bytes)),
                *flags_of(files, way),
            )
            stack.callback(process.kill)
            process.wait_ready()
            found[way] = Streams(process, TlsCredentials(files) if way == "tls" else None, page_count)
            stack.callback(found[way].close)
        yield found


def measure_streams(page_count: int, rounds: int) -> dict[str, float]:
    """Medians."""
    rates: dict[str, list[float]] = {f"{what} {way}": [] for what in ("read", "write") for way in WAYS}
    spent_s: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as name:
        directory = Path(name)
        files = Authority().issue(directory / "certificates")
        with pagestores(directory, files, page_count, rounds) as streams:
            for round_number in range(rounds + 1):
                for way in random.sample(WAYS, len(WAYS)):
                    each = streams[way]
                    each.prepare_write()
                    write_s = taken_s(each.write)
                    before_s = each.cpu_s()
                    read_s = taken_s(each.read)
                    if round_number:  # the first one connects
                        rates[f"write {way}"].append(each.size_bytes / write_s / 1e9)
                        rates[f"read {way}"].append(each.size_bytes / read_s / 1e9)
                        spent_s[way].append((each.cpu_s() - before_s) / (each.size_bytes / 1e9))
    figures = {f"{name.replace(' ', '_')}_gb_per_s": statistics.median(each) for name, each in rates.items()}
    return figures | {f"read_{way}_cpu_s_per_gb": statistics.median(each) for way, each in spent_s.items()}


def taken_s(work: Callable[[], None]) -> float:
    """Wall time."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


async def measure_matches(matches: int) -> dict[str, float]:
    """Percentiles of matches on open streams, and of the first call on a new connection."""
    matched: dict[str, list[float]] = {way: [] for way in WAYS}
    connected: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        files = Authority().issue(directory / "certificates")
        redis = stack.enter_context(running_redis(directory))
        servers = {
            way: stack.enter_context(running_index(directory, redis.endpoint, way, flags_of(files, way)))
            for way in WAYS
        }
        configs = {
            way: ClientConfig(
                index_endpoints=(servers[way].endpoint,),
                match_timeout_s=10.0,
                tls=TlsCredentials(files) if way == "tls" else None,
            )
            for way in WAYS
        }
        clients = {way: IndexClient(configs[way]) for way in WAYS}
        async with filled(redis, servers["plain"], STORED_CHUNKS) as (_, chains):
            for number in range(-_WARM_UP, matches):
                for way in random.sample(WAYS, len(WAYS)):
                    query = query_of(chains, random.randrange(STORED_CHUNKS // chains.chain_chunks), CHUNKS)
                    started_s = time.perf_counter()
                    found = await clients[way].match_stream.match(query)
                    if number >= 0:
                        matched[way].append((time.perf_counter() - started_s) * 1e3)
                    assert found.matched_chunks == CHUNKS
            for _ in range(max(1, matches // 15)):
                for way in random.sample(WAYS, len(WAYS)):
                    connected[way].append(await _connect_ms(configs[way]))
        for client in clients.values():
            await client.close()
    figures = {f"match_{way}_p{at}_ms": percentile(matched[way], at) for way in WAYS for at in (50, 99)}
    return figures | {f"connect_{way}_p50_ms": percentile(connected[way], 50) for way in WAYS}


async def _connect_ms(config: ClientConfig) -> float:
    client = IndexClient(config)
    started_s = time.perf_counter()
    await client.get_info()
    taken_ms = (time.perf_counter() - started_s) * 1e3
    await client.close()
    return taken_ms


def matches_as_agents_make_them(matches: int) -> dict[str, float]:
    """In a process of its own, because of how agents use gRPC."""
    poll_grpc_directly()
    return asyncio.run(measure_matches(matches))


def main() -> None:
    parser = argparse.ArgumentParser(description="What mutual TLS costs.")
    parser.add_argument("--pages", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--matches", type=int, default=1500)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = measure_streams(given.pages, given.rounds)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        results |= pool.submit(matches_as_agents_make_them, given.matches).result()
    for name, value in results.items():
        print(f"{name:32} {value:8.3f}")
    if given.json is not None:
        document = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"2-core virtual machine, Python {platform.python_version()}",
            "command": f"python -m bench.tls_cost {' '.join(sys.argv[1:])}".partition(" --json")[0],
            "load_average_1m": round(os.getloadavg()[0], 1),  # this bench alone gives about 2
            "results": {name: round(value, 3) for name, value in results.items()},
        }
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
