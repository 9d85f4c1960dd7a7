"""What do loads and stores cost between an engine and its agent and pagestore, beside what a GPU's link takes?

A real index, pagestore and agent, each a process; pages of 8 KiB that have the count, and windows the number, of the 8B
Llama shape's pages of 8 MiB; the agent moves them by its GPU code on a runtime that copies nothing, but takes the time
of a link of 55 GB/s each way and lets go of the interpreter's lock where CUDA does. So what is measured is messages,
ledgers, hand-overs, and the agent's threads beside each other.

store, load, both: transfers of 4 chunks (8 pages), four in flight each way. Their rate, median time, and the
    processor time of each in client, agent and pagestore: the link takes 1.2 ms for each, so 820 a second are its most.
bursts: 4 prompts of 64 chunks ordered at once, until all of them are stored.
one: a single chunk, until the caller knows of its end.
nothing: matches of new prompts of 32 chunks, of which nothing is stored, one at a time. --redis: the index keeps its
    locations in a Redis server, as it does in a cluster, instead of its own memory.

Run: python -m bench.agent_path [--seconds 2] [--only CASE] [--redis] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.match_rig import running_redis
from bench.process_usage import cpu_s
from bench.waiting import ready_document
from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import EngineRegistration
from kvpool.client.hashing import Prompt
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.client.sync import Pool
from kvpool.core import grid
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from tests.fixtures.layout_presets import vllm_blhnc_layout

SCALE = 1024  # pages of the 8B shape are so many times larger
grid.USUAL_PAGE_BYTES //= SCALE
grid.UNDIVIDED_PAGE_BYTES //= SCALE
SPEC = KeyspaceSpec(
    model_id="agent-path", model_revision="1", groups=(KvGroup(4, 1, 64),), dtype=Dtype.BF16, chunk_tokens=16
)
BLOCK_TOKENS, BLOCKS_PER_CHUNK = 2, 8
IN_FLIGHT, CHUNKS, PROMPT_CHUNKS, STORED, UNKNOWN_CHUNKS = 4, 4, 64, 16, 32
TIMEOUT_S = 30.0
_LINK_BYTES_PER_S = 55e9
_ENQUEUE_US = 100  # what the driver takes for 128 copies


def serve(module: str) -> int:
    """Run a service whose constants are scaled, and an agent's device."""
    from importlib import import_module

    if module == "kvpool_gpuagent":
        import kvpool_gpuagent.adapters.gpu.cache as transfers
        from kvpool_gpuagent import main
        from kvpool_gpuagent.engine import loading, storing

        transfers.LONG_RUN_BYTES = 1
        storing.WINDOW_BYTES //= SCALE
        loading.FIRST_WINDOW_BYTES //= SCALE
        loading.WINDOW_BYTES //= SCALE
        vars(main)["CpuDevice"] = _device()
    return int(import_module(f"{module}.main").main())


def _device() -> type:
    """A CPU device whose caches are those of a GPU that copies nothing."""
    from kvpool.core.grid import shards_in
    from kvpool.core.plane_table import PlaneTable
    from kvpool_gpuagent.adapters.cpu.device import CpuDevice
    from kvpool_gpuagent.adapters.gpu.cache import GpuCache, TransferEngine

    libc = ctypes.CDLL(None)  # each call lets go of the interpreter's lock, as CUDA's do

    class Copied:
        """Mark."""

        def __init__(self, ends_s: float) -> None:
            self._ends_s = ends_s
            libc.getppid()

        def wait(self) -> None:
            time.sleep(max(0.0, self._ends_s - time.perf_counter()))  # what the link takes is what is played

        def passed(self) -> bool:
            return time.perf_counter() >= self._ends_s

    class Link:
        """Runtime of copies that only take their time, and a stream of it: one copy after the other."""

        name, address = "link", 1

        def __init__(self) -> None:
            self._ends_s = 0.0

        def stream(self, *, urgent: bool) -> Link:
            return Link()

        def mark(self) -> Copied:
            return Copied(self._ends_s)

        def copy_runs(self, destinations: Any, sources: Any, sizes_bytes: Any, stream: Link) -> None:
            libc.usleep(_ENQUEUE_US)
            took_s = int(sizes_bytes.sum()) * SCALE / _LINK_BYTES_PER_S
            stream._ends_s = max(stream._ends_s, time.perf_counter()) + took_s

        def __getattr__(self, name: str) -> Callable[..., bool]:
            return lambda *arguments, **named: True

    class Device(CpuDevice):
        async def map_cache(self, spec: Any, grid: Any, layout: Any, handles: Any, events: Any) -> Any:
            cpu = await super().map_cache(spec, grid, layout, handles, events)
            engine = TransferEngine(Link(), scratch_bytes=1 << 20)  # type: ignore[arg-type]
            addresses = [memory.ctypes.data for memory in cpu._memory]  # type: ignore[attr-defined]  # noqa: SLF001  # as mapped here
            own = list(shards_in(grid.bitmap_for(layout.layer_range, layout.head_range)))
            store, load = engine.directions(PlaneTable.of(spec, grid, layout, addresses), own)
            return GpuCache(store, load, lambda slot: True, lambda: None)

    return Device


class Rig:
    """The processes."""

    def __init__(self, directory: Path, stack: ExitStack, arena_bytes: int, disk_bytes: int, redis: bool) -> None:
        self._directory, self._stack = directory, stack
        self.pids: dict[str, int] = {}
        self._redis_url = ""
        if redis:
            server = stack.enter_context(running_redis(directory))
            self._redis_url, self.pids["redis"] = server.endpoint, server.process.pid
        shm = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-", dir="/dev/shm")))
        self.index = self._start("kvpool_index", "--listen", "127.0.0.1:0")["endpoint"]
        self._start(
            "kvpool_pagestore",
            *("--data-dir", str(directory / "pagestore"), "--index-endpoints", self.index, "--host-id", "bench"),
            *("--listen", "127.0.0.1:0", "--bulk-listen", "127.0.0.1:0", "--session-dir", str(shm)),
            *("--socket", str(shm / "store"), "--arena-bytes", str(arena_bytes), "--segment-bytes", str(8 << 20)),
            *("--disk-bytes", str(disk_bytes), "--write-back-bytes-per-s", str((1 << 30) // SCALE)),
        )
        self.agent = "unix:" + str(shm / "agent")
        self._start(
            "kvpool_gpuagent",
            *("--data-dir", str(directory / "gpuagent"), "--index-endpoints", self.index, "--host-id", "bench"),
            *("--socket", str(shm / "agent"), "--pagestore-socket", str(shm / "store")),
        )

    def _start(self, module: str, *flags: str) -> dict[str, Any]:
        ready = self._directory / f"{module}.json"
        # The package first, as `-m` has it: gRPC is imported after what it says.
        program = f"import {module}; from bench.agent_path import serve; raise SystemExit(serve({module!r}))"
        command = [sys.executable, "-c", program, "--ready-file", str(ready), *flags]
        log = self._stack.enter_context((self._directory / f"{module}.log").open("wb"))
        process = subprocess.Popen([*command, "--log-level", "warning"], stderr=log, env=self._environment(module))
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self.pids[module.removeprefix("kvpool_")] = process.pid
        return ready_document(process, ready)

    def _environment(self, module: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
        return kept | ({"KVPOOL_INDEX_REDIS_URL": self._redis_url} if module == "kvpool_index" else {})

    def cpu_s(self) -> dict[str, float]:
        """Processor time of each process so far."""
        found = {name: cpu_s(pid) for name, pid in self.pids.items()}
        return {"client": sum(os.times()[:2]), **found}


class Client:
    """One engine's threads."""

    def __init__(self, agent: str) -> None:
        places = 2 * IN_FLIGHT * PROMPT_CHUNKS
        layout = vllm_blhnc_layout(SPEC, range(4), range(1), BLOCK_TOKENS, places * BLOCKS_PER_CHUNK)
        plan = EngineRegistration(
            endpoint=agent,
            engine_name="bench",
            keyspace_name="agent-path",
            spec=SPEC,
            layout=layout,
            regions=tuple(SharedMemoryRegion(size_bytes) for size_bytes in layout.handle_sizes),
        )
        order = np.random.default_rng(5).permutation(places * BLOCKS_PER_CHUNK).astype(np.int64)
        self._blocks = order.reshape(2 * IN_FLIGHT, -1)
        self.pool = Pool(plan, ClientConfig(store_timeout_s=TIMEOUT_S, load_timeout_s=TIMEOUT_S))
        self._seeds = itertools.count(time.time_ns() % (1 << 40))
        self.loaded = [self.chain(CHUNKS) for _ in range(STORED)]
        for number, chain in enumerate(self.loaded):
            self.store(number % IN_FLIGHT, chain)

    def chain(self, chunks: int) -> Prompt:
        """A prompt that none has stored."""
        tokens = np.full(chunks * SPEC.chunk_tokens, 7, np.uint32)
        tokens[:2] = np.array([next(self._seeds)], np.uint64).view(np.uint32) & 0x7FFFFFFF
        return self.pool.prompt(tokens)

    def store(self, slot: int, chain: Prompt) -> None:
        """Until it is stored."""
        handle = self.pool.store(chain, self._blocks[slot], first_chunk=0, end_chunk=chain.chunk_count)
        report = handle.result(TIMEOUT_S)
        if report.failed_chunks:
            raise RuntimeError(f"a store failed: {next(iter(report.failed_chunks.values()))!r}")

    def load(self, slot: int, chain: Prompt, chunks: int = CHUNKS) -> bool:
        """Until it is loaded; False if some of it is not there any more."""
        blocks = self._blocks[IN_FLIGHT + slot]
        return self.pool.load(chain, blocks, first_chunk=0, end_chunk=chunks).loaded_chunks == chunks

    def store_new(self, slot: int, count: int) -> None:
        """A new prompt."""
        self.store(slot, self.chain(CHUNKS))

    def load_next(self, slot: int, count: int) -> None:
        """One of those that are stored, as others push them out."""
        chain = self.loaded[(slot + IN_FLIGHT * count) % STORED]
        if not self.load(slot, chain):
            self.store(slot, chain)


def transfers(rig: Rig, works: Sequence[Callable[[int, int], None]], seconds: float) -> dict[str, float]:
    """Four of each in flight for so long."""
    took_s: list[float] = []
    before, began_s = rig.cpu_s(), time.perf_counter()

    def run(work: Callable[[int, int], None], slot: int) -> None:
        for count in itertools.count():
            started_s = time.perf_counter()
            if started_s - began_s > seconds:
                return
            work(slot, count)
            took_s.append(time.perf_counter() - started_s)

    with ThreadPoolExecutor(len(works) * IN_FLIGHT) as threads:
        for running in [threads.submit(run, work, slot) for work in works for slot in range(IN_FLIGHT)]:
            running.result()
    passed_s, after = time.perf_counter() - began_s, rig.cpu_s()
    used = {f"{name} ms": round((after[name] - before[name]) / len(took_s) * 1e3, 3) for name in after}
    return {
        "per s": round(len(took_s) / passed_s),
        "p50 ms": round(statistics.median(took_s) * 1e3, 2),
        **used,
    }


def bursts(rig: Rig, client: Client, rounds: int) -> dict[str, float]:
    """Median of prompts ordered at once, and the processor time of one."""
    took_s, before = [], rig.cpu_s()
    for _ in range(rounds):
        chains = [client.chain(PROMPT_CHUNKS) for _ in range(IN_FLIGHT)]
        began_s = time.perf_counter()
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            list(threads.map(client.store, range(IN_FLIGHT), chains))
        took_s.append(time.perf_counter() - began_s)
    after = rig.cpu_s()
    used = {f"{name} ms": round((after[name] - before[name]) / rounds * 1e3, 2) for name in after}
    return {"p50 ms": round(statistics.median(took_s) * 1e3, 2), **used}


def one(client: Client, rounds: int) -> dict[str, float]:
    """A load and a store of one chunk, alone."""
    loads, stores = [], []
    for number in range(rounds):
        chain = client.chain(1)
        began_s = time.perf_counter()
        client.store(0, chain)
        stored_s = time.perf_counter()
        client.load(0, chain, 1)
        loads.append(time.perf_counter() - stored_s)
        stores.append(stored_s - began_s)
        if number % 8 == 0:
            time.sleep(0.005)  # work that is done behind the answers has its turn
    return {
        "load p50 ms": round(statistics.median(loads) * 1e3, 3),
        "store p50 ms": round(statistics.median(stores) * 1e3, 3),
    }


def nothing(rig: Rig, client: Client, rounds: int) -> dict[str, float]:
    """Matches that find nothing: median and 99th percentile, and the processor time of each."""
    took_ms = []
    chains = [client.chain(UNKNOWN_CHUNKS) for _ in range(rounds)]
    before = rig.cpu_s()
    for chain in chains:
        began_s = time.perf_counter()
        found = client.pool.match(chain)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
        if found.matched_chunks or found.error is not None:
            raise RuntimeError(f"a prompt that none has stored: {found}")
    after = rig.cpu_s()
    used = {f"{name} ms": round((after[name] - before[name]) / rounds * 1e3, 3) for name in after}
    p50, p99 = np.percentile(took_ms, (50, 99))
    return {"p50 ms": round(float(p50), 3), "p99 ms": round(float(p99), 3), **used}


@contextmanager
def running(arena_bytes: int, disk_bytes: int, redis: bool) -> Iterator[Rig]:
    """The processes, until the block ends."""
    directory = Path(tempfile.mkdtemp(prefix="kvpool-bench-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        yield Rig(directory, stack, arena_bytes, disk_bytes, redis)


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case")
    parser.add_argument(
        "--arena-bytes", type=int, default=16 << 20, help="full after 1,000 stores, as an arena mostly is"
    )
    parser.add_argument("--disk-bytes", type=int, default=0)
    parser.add_argument("--redis", action="store_true", help="the index keeps its locations in a Redis server")
    parser.add_argument("--only", default="", help="one case")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with running(arguments.arena_bytes, arguments.disk_bytes, arguments.redis) as rig:
        client = Client(rig.agent)
        ways: dict[str, Sequence[Callable[[int, int], None]]] = {
            "store": [client.store_new],
            "load": [client.load_next],
            "both": [client.store_new, client.load_next],
        }
        for works in ways.values() if arguments.only != "nothing" else ():
            transfers(rig, works, 0.3)
        results: dict[str, dict[str, float]] = {}
        for name, works in ways.items():
            if arguments.only in ("", name):
                results[name] = transfers(rig, works, arguments.seconds)
                print(name, json.dumps(results[name]), flush=True)
        if arguments.only in ("", "bursts"):
            results["bursts"] = bursts(rig, client, max(3, int(10 * arguments.seconds)))
            print("bursts", json.dumps(results["bursts"]), flush=True)
        if arguments.only in ("", "one"):
            results["one"] = one(client, 200)
            print("one", json.dumps(results["one"]), flush=True)
        if arguments.only in ("", "nothing"):
            time.sleep(1.0)  # the index's replica in the agent hears of what was stored by then; no call says when
            results["nothing"] = nothing(rig, client, int(500 * arguments.seconds))
            print("nothing", json.dumps(results["nothing"]), flush=True)
        client.pool.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
