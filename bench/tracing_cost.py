"""What tracing costs a match and a load of an engine: off, on and not sampled, on for every request, collector dead.

Index, pagestore and agent are processes of their own, the engine's client another one. Modes take turns, so that what
else the machine does hits all of them alike; figures are medians over the rounds of each round's median.

Run: python -m bench.tracing_cost --rounds 3 [--modes off,on] [--before DIR]
--before: a checkout from before there was tracing, measured as the mode `before`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.process_usage import cpu_s

ROOT = Path(__file__).resolve().parents[1]
ROOTS = ("clients/python", "services/common", "services/index", "services/pagestore", "services/gpuagent", ".")
CHUNKS = 8
MATCHES, LOADS, READS = 800, 80, 80
READ_PAGES = 64
DEAD = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default="off,unsampled,on,dead")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(asyncio.run(_worker())))
        return
    modes = [*(["before"] if arguments.before else []), *arguments.modes.split(",")]
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    with _collector() as (endpoint, count):
        variables = {
            "unsampled": {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_TRACES_SAMPLER": "always_off"},
            "on": {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint},
            "dead": DEAD,
        }
        for number in range(arguments.rounds):
            for mode in modes if number % 2 == 0 else reversed(modes):
                source = arguments.before if mode == "before" else ROOT
                found[mode].append(_run(source.resolve(), variables.get(mode, {})))
        spans = count()
    summary = {
        mode: {name: round(statistics.median(one[name] for one in rounds), 4) for name in rounds[0]}
        for mode, rounds in found.items()
    }
    print(json.dumps({"medians": summary, "rounds": found, "spans_received": spans}, indent=1))


def _run(source: Path, variables: dict[str, str]) -> dict[str, float]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    path = os.pathsep.join([*(str(source / root) for root in ROOTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    done = subprocess.run(
        command, env={**kept, "PYTHONPATH": path, **variables}, cwd=source, check=True, stdout=subprocess.PIPE
    )
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


async def _worker() -> dict[str, float]:
    """One cluster, one engine; medians in ms. Imported here: from the checkout that is measured."""
    from kvpool.client.pool import AsyncPool
    from tests.e2e.service_processes import service_cluster
    from tests.fixtures.agent import CLIENT, SPEC, EngineProcess, prompt

    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as directory, service_cluster(Path(directory)) as cluster:
        store = cluster.pagestore("a")
        agent = cluster.agent("a", host="a", replica_bytes="0")
        pids = [os.getpid(), cluster.index.pid, store.pid, agent.pid]
        cluster.wait_ready()
        engine = EngineProcess(f"unix:{cluster.socket('a.agent')}", chunk_count=CHUNKS)
        pool = await AsyncPool.open(engine.plan, CLIENT)
        chain = prompt(pool.session, CHUNKS)
        engine.compute(chain, range(CHUNKS))
        table = engine.blocks.ravel()
        await (await pool.store(chain, table, first_chunk=0, end_chunk=CHUNKS)).result(10.0)
        for _ in range(500):  # until it is announced
            if (await pool.match(chain)).matched_chunks == CHUNKS:
                break
            await asyncio.sleep(0.01)

        async def load() -> None:
            assert (await pool.load(chain, table, first_chunk=0, end_chunk=CHUNKS)).loaded_chunks == CHUNKS

        before_s = _cpu_s(pids)
        match_ms = await _median_ms(MATCHES, lambda: pool.match(chain))
        match_cpu_ms = (_cpu_s(pids) - before_s) * 1e3 / (MATCHES * 11 // 10)
        before_s = _cpu_s(pids)
        load_ms = await _median_ms(LOADS, load)
        answer = {
            "match_ms": match_ms,
            "match_cpu_ms": match_cpu_ms,
            "load_ms": load_ms,
            "load_cpu_ms": (_cpu_s(pids) - before_s) * 1e3 / (LOADS * 11 // 10),
            "read_pages_ms": await asyncio.to_thread(_reads, store.ready["bulk_endpoint"], pool, SPEC, chain),
        }
        await pool.close()
        engine.close()
    return answer


def _cpu_s(pids: Sequence[int]) -> float:
    """Processor time of some processes so far: what other work on the machine hardly touches."""
    return sum(map(cpu_s, pids))


async def _median_ms(count: int, work: Callable[[], Awaitable[Any]]) -> float:
    for _ in range(count // 10):
        await work()
    taken_s = []
    for _ in range(count):
        started_s = time.perf_counter()
        await work()
        taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s) * 1e3


def _reads(endpoint: str, pool: Any, spec: Any, chain: Any) -> float:
    """One ReadPages of READ_PAGES pages of 64 KiB, again and again."""
    from kvpool.client.transfer import PageToRead, PageTransferClient
    from kvpool.core.grid import ShardGrid
    from kvpool.core.page import PageKey, page_bytes
    from kvpool.core.payload import payload_bytes

    size_bytes = page_bytes(payload_bytes(spec, ShardGrid.of(spec), 0))
    keys = [PageKey(pool.session.keyspace, chain.hashes[at // 2 % CHUNKS], at % 2) for at in range(READ_PAGES)]
    pages = [PageToRead(key=key, destination=memoryview(bytearray(size_bytes))) for key in keys]
    client, taken_s = PageTransferClient(endpoint), list[float]()

    def on_page(at: int, error: Any, hit: bool) -> None:
        assert hit, error

    for _ in range(READS):
        started_s = time.perf_counter()
        client.read_pages([(pool.session.keyspace, spec)], pages, on_page, timeout_s=30.0)
        taken_s.append(time.perf_counter() - started_s)
    client.close()
    return statistics.median(taken_s) * 1e3


@contextmanager
def _collector() -> Iterator[tuple[str, Callable[[], int]]]:
    """An OTLP receiver that only counts."""
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    counts: list[int] = []

    class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            counts.append(sum(len(scope.spans) for part in request.resource_spans for scope in part.scope_spans))
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # generated without types
    register(Receiver(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", lambda: sum(counts)
    server.stop(0).wait()


if __name__ == "__main__":
    main()
