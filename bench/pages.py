"""`python -m bench pages`: put and get through the local arena, a remote stream, from disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.rig.bare import BareStream
from bench.rig.cluster import bench_cluster, endpoint_of, running_cluster
from bench.rig.engine import BLOCKS_OF_16, CONTIGUOUS, SHARDS, SPEC, BenchEngine
from bench.rig.machine import CopyBaseline, FileBaseline, drop_from_page_cache, tune_process
from bench.rig.results import Results, progress
from bench.rig.session import PAGE_BYTES, PAYLOAD_BYTES, BenchSession
from bench.rig.stream import BenchTransfer
from kvpool.client.config import ClientConfig
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.client.sync import BackgroundLoop
from kvpool_cli.cluster import ClusterOptions
from kvpool_cli.errors import CommandFailed
from kvpool_cli.state import ClusterState

_MIB = 1 << 20
_FILE_THREADS_WRITE, _FILE_THREADS_READ = 2, 4  # as many as the pagestore's disk tier has
_SEED = 1000  # of the first prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesPlan:
    """How much is moved: chunks of 8 MiB a case and round."""

    chunks: int
    rounds: int
    disk_chunks: int
    disk_rounds: int

    @property
    def page_count(self) -> int:
        """Pages of 2 MiB a case and round."""
        return self.chunks * SHARDS.bit_count()


FULL = PagesPlan(chunks=16, rounds=7, disk_chunks=16, disk_rounds=4)
QUICK = PagesPlan(chunks=8, rounds=3, disk_chunks=8, disk_rounds=2)


def measure_pages(state_dir: Path | None, plan: PagesPlan) -> Results:
    """All cases. state_dir: of a running cluster to use, where that is possible. Raises CommandFailed, KvPoolError."""
    tune_process()
    results = Results()
    size_bytes = plan.page_count * PAGE_BYTES
    # No disk tier here: writing back would take its share of processor and memory from whatever is measured meanwhile.
    # A round has four times size_bytes in the arena, where slots are somewhat larger than pages.
    options = ClusterOptions(state_dir=Path(), arena_bytes=_round_up(size_bytes * 5), disk_bytes=0)
    with (
        running_cluster(state_dir) if state_dir else bench_cluster(options) as (state, _),
        _Local(state, plan) as local,
    ):
        for number in range(plan.rounds + 1):
            progress(f"arena and streams: round {number} of {plan.rounds}")
            local.round(number, results if number else Results())  # the first one touches fresh memory
    _measure_disk(plan, results)
    return results


class _Local:
    """What is measured against staging memory: agent, session, streams, each after its baseline."""

    def __init__(self, state: ClusterState, plan: PagesPlan) -> None:
        self._stack = ExitStack()
        agent = f"unix:{endpoint_of(state, 'agent', 'socket')}"
        pagestore = f"unix:{endpoint_of(state, 'pagestore', 'socket')}"
        with ExitStack() as stack:
            self._engine = BenchEngine(agent, CONTIGUOUS, plan.chunks)
            stack.callback(self._engine.close)
            self._blocks = BenchEngine(agent, BLOCKS_OF_16, plan.chunks)
            stack.callback(self._blocks.close)
            index = endpoint_of(state, "index", "endpoint")
            self._session = BenchSession(pagestore, index, plan.page_count)
            stack.callback(self._session.close)
            bulk = endpoint_of(state, "pagestore", "bulk_endpoint")
            self._transfer = BenchTransfer(bulk, self._session.keyspace, plan.page_count)
            stack.callback(self._transfer.close)
            self._bare = BareStream(PAGE_BYTES, plan.page_count, PAGE_BYTES // 2)  # as many frames as the page stream
            stack.callback(self._bare.close)
            self._control = _Control(pagestore)
            stack.callback(self._control.close)
            self._copy = CopyBaseline(PAYLOAD_BYTES, plan.page_count)
            self._stack = stack.pop_all()

    def __enter__(self) -> _Local:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def round(self, number: int, results: Results) -> None:
        """One sample of every case, on pages of its own. What is written back to disk is waited for in between."""

        def sample(name: str, baseline: Callable[[], float], against: str, value: Callable[[], float]) -> None:
            beside = baseline()
            results.add(name, "GB/s", value(), beside, against)

        engine, blocks, session, transfer = self._engine, self._blocks, self._session, self._transfer
        memcpy, bare = "memcpy of 2 MiB pages, one thread", "bare gRPC stream, 1 MiB frames"
        chain, keys = engine.chain(_SEED + number), session.keys(_SEED + number)
        written = session.keys(2 * _SEED + number)
        engine.fill(number)
        sample("arena put, contiguous tensor", self._copy.rate, memcpy, lambda: engine.put_rate(chain))
        self._control.flush()
        expected = engine.in_prompt_order()
        engine.fill(number + 1)
        sample("arena get, contiguous tensor", self._copy.rate, memcpy, lambda: engine.get_rate(chain)[0])
        sample("arena get, 16-token blocks", self._copy.rate, memcpy, lambda: blocks.get_rate(chain)[0])
        if not (
            np.array_equal(engine.in_prompt_order(), expected) and np.array_equal(blocks.in_prompt_order(), expected)
        ):
            raise CommandFailed("what was loaded is not what was stored")
        other = blocks.chain(3 * _SEED + number)
        sample("arena put, 16-token blocks", self._copy.rate, memcpy, lambda: blocks.put_rate(other))
        self._control.flush()
        sample("arena put, session alone", self._copy.rate, memcpy, lambda: session.put_rate(keys))
        self._control.flush()
        sample("arena get, session alone", self._copy.rate, memcpy, lambda: session.get_rate(keys))
        sample("stream write", self._bare.write_rate, bare, lambda: transfer.write_rate(written))
        self._control.flush()
        sample("stream read", self._bare.read_rate, bare, lambda: transfer.read_rate(keys, verified=False))
        sample("stream read, verified", self._bare.read_rate, bare, lambda: transfer.read_rate(keys, verified=True))
        # Or the pagestore would choose what to give up, and of this round rather than of an earlier one that was read.
        self._control.clear(session.keyspace)


def _measure_disk(plan: PagesPlan, results: Results) -> None:
    """Prompts that together are larger than the arena, in turns: each one has left it when its turn comes again."""
    set_bytes = plan.disk_chunks * SHARDS.bit_count() * PAGE_BYTES
    # A set must fit into what may be dirty, half of the arena.
    options = ClusterOptions(state_dir=Path(), arena_bytes=_round_up(set_bytes * 5 // 2), memory_index=True)
    with bench_cluster(options) as (state, directory), ExitStack() as stack:
        engine = BenchEngine(f"unix:{endpoint_of(state, 'agent', 'socket')}", CONTIGUOUS, plan.disk_chunks)
        stack.callback(engine.close)
        control = _Control(f"unix:{endpoint_of(state, 'pagestore', 'socket')}")
        stack.callback(control.close)
        plain = FileBaseline(directory, engine.size_bytes, PAYLOAD_BYTES)
        stack.callback(plain.remove)
        chains = [engine.chain(_SEED + number) for number in range(plan.disk_rounds + 3)]
        for number, chain in enumerate(chains):
            progress(f"to disk: prompt {number} of {len(chains) - 1}")
            engine.fill(number)
            baseline = plain.write_rate(_FILE_THREADS_WRITE)
            put_rate = engine.put_rate(chain)
            value = _durable_rate(engine.size_bytes, put_rate, control.flush())
            if number:
                results.add("disk put, until durable", "GB/s", value, baseline, "plain file, 2 threads, fdatasync")
        for number, chain in enumerate(chains[: plan.disk_rounds + 1]):
            progress(f"from disk: prompt {number} of {plan.disk_rounds}")
            baseline = plain.read_rate(_FILE_THREADS_READ)
            drop_from_page_cache([path for path in directory.glob("pagestore-0/**/*") if path.is_file()])
            value, tokens = engine.get_rate(chain)
            if tokens.disk != plan.disk_chunks * SPEC.chunk_tokens:
                raise CommandFailed(f"only {tokens.disk} tokens came from disk")
            if number:
                results.add("disk get, cold", "GB/s", value, baseline, "plain file, cold, 4 threads")


def _durable_rate(size_bytes: int, put_rate: float, flush_s: float) -> float:
    """GB/s of a put and the flush after it."""
    return size_bytes / (size_bytes / put_rate + flush_s * 1e9)


class _Control:
    """The control calls of a pagestore. Each raises KvPoolError."""

    def __init__(self, endpoint: str) -> None:
        self._loop = BackgroundLoop()
        self._control = self._loop.run(lambda: _open_control(endpoint))

    def flush(self) -> float:
        """Flush; how many seconds that took."""
        started_s = time.perf_counter()
        outcome = self._loop.run(self._control.flush)
        if outcome.failed_count:
            raise CommandFailed(f"{outcome.failed_count} pages could not be written to disk")
        return time.perf_counter() - started_s

    def clear(self, keyspace: bytes) -> None:
        """Drop the keyspace's pages."""
        self._loop.run(lambda: self._control.clear(keyspace))

    def close(self) -> None:
        """End the connection."""
        self._loop.end(self._control.close)


async def _open_control(endpoint: str) -> PageStoreControl:
    return PageStoreControl(endpoint, ClientConfig())


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // (8 * _MIB)) * 8 * _MIB
