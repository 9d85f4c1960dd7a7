"""How does a pagestore with millions of pages on a full disk tier start, evict, change a policy, reconcile, clear?

    python -m bench.full_disk make DIR --chunks 1250000
    python -m bench.full_disk run DIR [--json FILE]

`make` writes real records of 8 shards a chunk into a real RocksDB. The files that hold the pages are sparse: all their
blocks are there and none is allocated, but for the pages of the first chunks, which are real and are read after the
start. The capacity is just what the pages fill, so that the next page evicts.

`run` starts a pagestore on it, with an index and a Redis, and times each step. Meanwhile `bench.loop_watch` notes each
stall of its event loop. `clear` empties the directory's records, so that it is made again for the next run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rocksdict import WriteBatch

from bench.loop_watch import stalls_between
from bench.match_rig import Server, running_index, running_redis
from bench.waiting import ready_document, until
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.client.transfer import PageToRead, PageToWrite, PageTransferClient
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import DrainBlocked, KvPoolError
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup, encode_keyspace, keyspace_id
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey, page_bytes, seal
from kvpool.core.payload import payload_bytes
from kvpool.core.policy import KeyspacePolicy
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.adapters.records import RECORDS, PageRecord
from kvpool_pagestore.core.extents import BLOCK_BYTES, Extent, ExtentBudget, charged_bytes, page_blocks
from kvpool_pagestore.ports import PageWrite

NAME = "full-disk"
SPEC = KeyspaceSpec(
    model_id="bench", model_revision="full-disk", groups=(KvGroup(8, 8, 128),), dtype=Dtype.BF16, chunk_tokens=16
)
GRID = ShardGrid.of(SPEC)
SHARDS = range(GRID.shard_count - 8, GRID.shard_count)  # the finest split: one for each KV head
PAYLOAD_BYTES = payload_bytes(SPEC, GRID, SHARDS[0])
PAGE_BYTES = page_bytes(PAYLOAD_BYTES)
ENCODING = encode_keyspace("default", SPEC)
KEYSPACE = keyspace_id(ENCODING)
CHAIN_CHUNKS = 64  # of one conversation
GROUP_CHUNKS = 16
REAL_CHUNKS = 16
HASH_BYTES = 16
SMALL_SPEC = KeyspaceSpec(
    model_id="bench", model_revision="staged", groups=(KvGroup(1, 1, 32),), dtype=Dtype.BF16, chunk_tokens=16
)
SMALL_GRID = ShardGrid.of(SMALL_SPEC)
SMALL_PAYLOAD_BYTES = payload_bytes(SMALL_SPEC, SMALL_GRID, 0)
SMALL_KEYSPACE = keyspace_id(encode_keyspace("default", SMALL_SPEC))
STAGED_PAGES = 3 << 14  # with fewer, what the process takes and gives back otherwise hides them
_LAST_STALL_S = 0.1  # after a step, for a stall to end
_STALLS_SHOWN = 5
START_TIMEOUT_S = 900.0
STEPS = ("evictions", "reconcile", "replication", "drain", "quota", "clear")  # that a run may leave out
STEP_TIMEOUT_S = 900.0


# ---- the directory


class Chunks:
    """Hashes and chains of made-up chunks, the same for the same count."""

    def __init__(self, count: int) -> None:
        self.count = count
        words = np.random.default_rng(count).integers(0, 1 << 63, (count, 2), dtype=np.uint64)
        self._hashes = words.view(np.uint8).reshape(count, HASH_BYTES)

    def hash(self, chunk: int) -> bytes:
        return bytes(self._hashes[chunk])

    def metadata(self, chunk: int) -> PageMetadata:
        index = chunk % CHAIN_CHUNKS
        parent = self.hash(chunk - 1) if index else bytes(HASH_BYTES)
        return PageMetadata(
            parent_hash=parent, chunk_index=index, group_head_hash=self.hash(chunk - index % GROUP_CHUNKS)
        )

    def by_hash(self) -> npt.NDArray[np.int64]:
        """All chunks in the order of their keys, in which RocksDB takes records fastest."""
        return np.lexsort(self._hashes.T[::-1])


def sealed(key: PageKey) -> memoryview:
    page = bytearray(PAGE_BYTES)
    seal(page, key, SPEC.codec, PAYLOAD_BYTES)
    return memoryview(page)


def capacity_for(page_count: int) -> int:
    """The smallest tier, to a MiB, that may hold so many pages."""
    needed, capacity_bytes = page_count * charged_bytes(PAGE_BYTES), 64 << 20
    while (missing := needed - ExtentBudget(capacity_bytes).live_limit_bytes) > 0:
        capacity_bytes += max(1 << 20, missing)
    return capacity_bytes


def make(directory: Path, chunk_count: int) -> None:
    """Raises FileExistsError if there is one."""
    (directory / "disk").mkdir(parents=True)
    chunks, page_count = Chunks(chunk_count), chunk_count * len(SHARDS)
    budget = ExtentBudget(capacity_for(page_count))
    blocks = page_blocks(PAGE_BYTES)
    pages_per_file = budget.file_block_count // blocks
    store = RocksPageStore(directory / "disk", budget.capacity_bytes)
    store.open()
    store.remember_keyspace(ENCODING)
    database = store._pages.database  # noqa: SLF001  # the one way to write records without their pages
    batch = WriteBatch(raw_mode=True)
    for done, chunk in enumerate(chunks.by_hash().tolist()):
        metadata, chunk_hash = chunks.metadata(chunk), chunks.hash(chunk)
        for page, shard in enumerate(SHARDS, chunk * len(SHARDS)):
            extent = Extent(1 + page // pages_per_file, page % pages_per_file * blocks, blocks)
            record = PageRecord(PAGE_BYTES, 1 + page, (extent,), metadata)
            batch.put(PageKey(KEYSPACE, chunk_hash, shard).pack(), record.encode(), database.handle(RECORDS))
        if len(batch) >= 8192 or done + 1 == chunk_count:
            database.write(batch, sync=False)
            batch = WriteBatch(raw_mode=True)
    store.close()
    make_sparse_files(directory / "disk" / "extents", budget)
    store.open()
    write_real_pages(store, chunks)
    store.close()
    manifest = {"chunks": chunk_count, "capacity_bytes": budget.capacity_bytes}
    (directory / "full_disk.json").write_text(json.dumps(manifest))


def make_sparse_files(directory: Path, budget: ExtentBudget) -> None:
    left, number = budget.block_count, 1
    while left:
        count = min(left, budget.file_block_count)
        with (directory / f"{number}.pages").open("wb") as file:
            file.truncate(count * BLOCK_BYTES)
        left, number = left - count, number + 1


def write_real_pages(store: RocksPageStore, chunks: Chunks) -> None:
    failures: list[KvPoolError | None] = []
    for chunk in range(min(REAL_CHUNKS, chunks.count)):
        keys = [PageKey(KEYSPACE, chunks.hash(chunk), shard) for shard in SHARDS]
        store.delete_batch(keys)
        writes = [PageWrite(key=key, page=sealed(key), metadata=chunks.metadata(chunk)) for key in keys]
        store.put_batch(writes, lambda _, failure: failures.append(failure))
    if any(failures):
        raise RuntimeError(f"the real pages could not be written: {next(filter(None, failures))}")


# ---- the run


class MachineNoise:
    """A process that only sleeps; `longest_s`: by how much it woke late since the last look."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_sleep_and_measure, args=(theirs,), daemon=True)
        self._process.start()
        self.longest_s()

    def longest_s(self) -> float:
        self._ours.send(None)
        longest: float = self._ours.recv()
        return longest

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _sleep_and_measure(peer: Connection) -> None:
    longest_s = 0.0
    while True:
        begun_s = time.perf_counter()
        time.sleep(0.005)  # how much longer it takes is what is measured
        longest_s = max(longest_s, time.perf_counter() - begun_s - 0.005)
        if peer.poll():
            peer.recv()
            peer.send(longest_s)
            longest_s = 0.0


class Run:
    """A pagestore that serves, and what each step of it took."""

    def __init__(
        self,
        directory: Path,
        stack: ExitStack,
        index: Server,
        redis: Server,
        scratch: Path,
        document: dict[str, object],
        result: Path | None,
    ) -> None:
        """document: of the run, written to `result` after each step."""
        self._others = {"index_processor_s": index, "redis_processor_s": redis}
        manifest = json.loads((directory / "full_disk.json").read_text())
        self.chunks = Chunks(manifest["chunks"])
        self._steps: list[dict[str, object]] = []
        self._document = document
        self._result = result
        document |= {"chunks": self.chunks.count, "pages": self.chunks.count * len(SHARDS), "steps": self._steps}
        self._config = ClientConfig(index_endpoints=(index.endpoint,))
        self._run_number = time.time_ns() >> 20 & 0xFFFF_FFFF  # chunks that an earlier run wrote may be there
        self._noise = MachineNoise()
        stack.callback(self._noise.close)
        self._index_stalls = scratch / "index-stalls"
        self._stalls, self._log = scratch / "stalls", scratch / "pagestore.log"
        with self.step("restart to serving"):
            self._process, document = stack.enter_context(
                pagestore(directory, ["--disk-bytes", str(manifest["capacity_bytes"])], index.endpoint, scratch)
            )
        self._endpoint, self._metrics_url = str(document["endpoint"]), str(document["metrics_url"])
        self._transfer = PageTransferClient(str(document["bulk_endpoint"]), frame_bytes=1 << 20)
        stack.callback(self._transfer.close)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time what happens, and the longest stall of the pagestore's event loop meanwhile.

        stall_cpu_ms: the longest by the processor time that the loop's thread took in it. machine_ms: by how much a
        process that does nothing was woken late. processor_s: of the pagestore since it started, and of the index and
        its store. leases_lost: how often
        the node had to register again.
        """
        self._noise.longest_s()
        begun_s, lost = time.time(), self._leases_lost()
        yield
        time.sleep(_LAST_STALL_S)  # a stall is written down when it has ended
        ended_s = time.time()
        stalls = stalls_between(self._stalls, begun_s, ended_s)
        index_stalls = stalls_between(self._index_stalls, begun_s, ended_s)
        found: dict[str, object] = {
            "step": name,
            "seconds": round(ended_s - begun_s - _LAST_STALL_S, 2),
            "stall_ms": round(max((one.late_s for one in stalls), default=0.0) * 1e3, 1),
            "stall_cpu_ms": round(max((one.cpu_s for one in stalls), default=0.0) * 1e3, 1),
            "index_stall_cpu_ms": round(max((one.cpu_s for one in index_stalls), default=0.0) * 1e3, 1),
            "processor_s": round(Server(self._process, "").cpu_s(), 1),
            **{name: round(server.cpu_s(), 1) for name, server in self._others.items()},
            "machine_ms": round(self._noise.longest_s() * 1e3, 1),
            "leases_lost": self._leases_lost() - lost,
            "resident_mib": resident_bytes(self._process) >> 20,
            "load": round(os.getloadavg()[0], 1),
        }
        self._steps.append(found)
        print(json.dumps(found), flush=True)
        if self._result is not None:
            self._result.write_text(json.dumps(self._document, indent=2) + "\n")
        for one in sorted(stalls, key=lambda stall: -stall.cpu_s)[:_STALLS_SHOWN]:
            if one.stack:
                figures = f"{one.late_s * 1e3:.0f} ms late, {one.cpu_s * 1e3:.0f} ms of cpu, "
                print(f"  {figures}{one.collecting_s * 1e3:.0f} ms collecting: {one.stack}", flush=True)

    def _leases_lost(self) -> int:
        return self._log.read_text().count("registering it again") if self._log.exists() else 0

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self._process)

    def read_real_pages(self) -> None:
        """Every one of them verifies."""
        keys = [
            PageKey(KEYSPACE, self.chunks.hash(chunk), shard)
            for chunk in range(min(REAL_CHUNKS, self.chunks.count))
            for shard in SHARDS
        ]
        found = list[int]()

        def on_page(number: int, error: object, is_hit: bool) -> None:
            if is_hit and error is None:
                found.append(number)

        items = [PageToRead(key=key, destination=memoryview(bytearray(PAGE_BYTES))) for key in keys]
        self._transfer.read_pages([(KEYSPACE, SPEC)], items, on_page, timeout_s=STEP_TIMEOUT_S)
        if len(found) != len(keys):
            raise RuntimeError(f"{len(found)} of {len(keys)} pages could be read")

    def write_pages(self, first: int, count: int) -> None:
        """New chunks, durable on return."""
        items = []
        for number in range(first, first + count):
            chunk_hash = (1 << 127 | self._run_number << 64 | number).to_bytes(HASH_BYTES, "big")
            metadata = PageMetadata(parent_hash=bytes(HASH_BYTES), chunk_index=0, group_head_hash=chunk_hash)
            for shard in SHARDS:
                key = PageKey(KEYSPACE, chunk_hash, shard)
                items.append(PageToWrite(key=key, page=sealed(key), metadata=metadata))
        failures = list[object]()

        def on_page(number: int, admission: Admission, error: object) -> None:
            if admission is not Admission.RESERVED:
                failures.append(error or admission)

        self._transfer.write_pages([(KEYSPACE, SPEC)], items, on_page, timeout_s=STEP_TIMEOUT_S, require_durable=True)
        if failures:
            raise RuntimeError(f"{len(failures)} pages were not taken: {failures[0]}")

    async def change_policy(self, policy: KeyspacePolicy) -> None:
        """Nodes hear of it with their next renewal."""
        index = IndexClient(self._config)
        opened = await index.open_keyspace(NAME, SPEC)
        if opened.keyspace != KEYSPACE:
            raise RuntimeError("the index names the keyspace otherwise than the directory: clear its tenant settings")
        await index.set_keyspace_policy(NAME, policy)
        await index.close()
        await asyncio.sleep(5.0)

    def _metrics(self) -> dict[str, float]:
        """Those without labels."""
        with urllib.request.urlopen(self._metrics_url, timeout=STEP_TIMEOUT_S) as answer:
            lines = [line.split() for line in answer.read().decode().splitlines() if line.startswith("kvpool")]
        return {words[0]: float(words[1]) for words in lines if len(words) == 2}

    def wait_announced(self) -> None:
        """Until the first comparison with the index is complete: all that differed was replaced and acknowledged."""
        name = "kvpool_pagestore_reconcile_rounds_total"
        until(lambda: self._metrics().get(name, 0.0) > 0, STEP_TIMEOUT_S, "a complete comparison", poll_s=0.5)

    def wait_reconciled(self) -> None:
        """Until a comparison with the index has ended without anything to tell."""

        def rounds_and_ranges() -> tuple[float, float]:
            values, prefix = self._metrics(), "kvpool_pagestore_reconcile_"
            return values.get(f"{prefix}rounds_total", 0.0), values.get(f"{prefix}ranges_total", 0.0)

        seen = rounds_and_ranges()

        def is_quiet() -> bool:
            nonlocal seen
            now = rounds_and_ranges()
            if now[0] > seen[0] and now[1] == seen[1]:
                return True
            if now[0] > seen[0]:
                seen = now
            return False

        until(is_quiet, STEP_TIMEOUT_S, "a comparison with the index that finds nothing", poll_s=1.0)

    async def lower_quota(self) -> None:
        """To nine tenths of what the tier may hold; until so much is gone."""
        limit_bytes = self.chunks.count * len(SHARDS) * charged_bytes(PAGE_BYTES) * 9 // 10
        await self.change_policy(KeyspacePolicy(quota_bytes=limit_bytes))

        def is_met() -> bool:
            return self._metrics()["kvpool_pagestore_disk_pages"] * charged_bytes(PAGE_BYTES) <= limit_bytes

        until(is_met, STEP_TIMEOUT_S, "a quota that is met", poll_s=1.0)

    async def clear(self) -> None:
        control = PageStoreControl(self._endpoint, ClientConfig())
        await control.clear(KEYSPACE, timeout_s=STEP_TIMEOUT_S)
        await control.close()

    async def begin_drain(self) -> None:
        """It ends at once: there is no other node. The node is taken back into service."""
        control = PageStoreControl(self._endpoint, ClientConfig())
        try:
            async for _ in control.drain(timeout_s=STEP_TIMEOUT_S):
                pass
        except DrainBlocked:
            pass
        async for _ in control.drain(cancel=True, timeout_s=STEP_TIMEOUT_S):
            pass
        await control.close()


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    """Of a process, but for what it shares (the arena)."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@contextmanager
def pagestore(
    directory: Path, flags: Sequence[str], index_endpoint: str, scratch: Path
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, object]]]:
    """A pagestore that serves, with a watch over its event loop; it is killed at the end."""
    ready, log = scratch / "pagestore.json", scratch / "pagestore.log"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.loop_watch", str(scratch / "stalls"), "kvpool_pagestore.main"]
    command += ["--data-dir", str(directory), "--ready-file", str(ready)]
    command += ["--listen", "127.0.0.1:0", "--bulk-listen", "127.0.0.1:0", "--arena-bytes", str(256 << 20), *flags]
    command += ["--index-endpoints", index_endpoint, "--log-level", "warning"]
    command += ["--reconcile-interval-ms", "10000", "--sweep-interval-ms", "4000", "--parent-pid", str(os.getpid())]
    with log.open("wb") as out, subprocess.Popen(command, stderr=out) as process:
        try:
            yield process, ready_document(process, ready, START_TIMEOUT_S)
        finally:
            process.kill()


def empty_bytes(index_endpoint: str, scratch: Path) -> int:
    """What a pagestore takes that has nothing."""
    flags = ["--disk-bytes", str(1 << 30)]
    with pagestore(scratch / "empty", flags, index_endpoint, scratch) as (process, _):
        time.sleep(2.0)  # its start has settled
        return resident_bytes(process)


def staged_page_bytes(index_endpoint: str, scratch: Path) -> float:
    """What a small page in staging takes, its bytes in the arena not counted."""
    with pagestore(scratch / "staging", ["--disk-bytes", "0"], index_endpoint, scratch) as (process, document):
        transfer = PageTransferClient(str(document["bulk_endpoint"]), frame_bytes=1 << 20)
        part = STAGED_PAGES // 8

        def write(first: int) -> None:
            items, refused = list[PageToWrite](), list[object]()
            for number in range(first, first + part):
                chunk_hash = (number + 1).to_bytes(HASH_BYTES, "big")
                metadata = PageMetadata(parent_hash=bytes(HASH_BYTES), chunk_index=0, group_head_hash=chunk_hash)
                key = PageKey(SMALL_KEYSPACE, chunk_hash, 0)
                page = bytearray(page_bytes(SMALL_PAYLOAD_BYTES))
                seal(page, key, SMALL_SPEC.codec, SMALL_PAYLOAD_BYTES)
                items.append(PageToWrite(key=key, page=memoryview(page), metadata=metadata))

            def on_page(number: int, admission: Admission, error: object) -> None:
                if admission is not Admission.RESERVED:
                    refused.append(error or admission)

            transfer.write_pages([(SMALL_KEYSPACE, SMALL_SPEC)], items, on_page, timeout_s=STEP_TIMEOUT_S)
            if refused:
                raise RuntimeError(f"{len(refused)} pages were not taken: {refused[0]}")

        write(0)  # what the first pages take comes once
        before_bytes = resident_bytes(process)
        for first in range(part, 8 * part, part):
            write(first)
        transfer.close()
        return (resident_bytes(process) - before_bytes) / (7 * part)


def run(directory: Path, skipped: Sequence[str], result: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as name, ExitStack() as stack:
        scratch = Path(name)
        drop_caches(directory)
        redis = stack.enter_context(running_redis(scratch))
        index = stack.enter_context(running_index(scratch, redis.endpoint, stalls=scratch / "index-stalls"))
        asyncio.run(_open(index.endpoint))
        staged = staged_page_bytes(index.endpoint, scratch)
        empty = empty_bytes(index.endpoint, scratch)
        print(f"{staged:.0f} bytes a staged page, {empty >> 20} MiB empty", flush=True)
        document: dict[str, object] = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": f"{os.cpu_count()}-core virtual machine, shared with other work",
            "bytes_a_staged_page": round(staged),
        }
        bench = Run(directory, stack, index, redis, scratch, document, result)
        with bench.step("digests agree"):
            bench.wait_announced()
        with bench.step("idle for 5 s"):
            time.sleep(5.0)  # the step: what an idle process does
        document["bytes_a_chunk"] = round((bench.resident_bytes - empty) / bench.chunks.count)
        with bench.step("read real pages"):
            bench.read_real_pages()
        if "evictions" not in skipped:
            with bench.step("first eviction"):
                bench.write_pages(0, 64)
            with bench.step("evictions that follow"):
                bench.write_pages(64, 512)
        with bench.step("policy change"):
            asyncio.run(bench.change_policy(KeyspacePolicy(quota_bytes=1 << 50)))
        if "reconcile" not in skipped:
            with bench.step("reconcile"):
                bench.wait_reconciled()
        if "replication" not in skipped:
            with bench.step("replication sweep, for 30 s"):
                asyncio.run(bench.change_policy(KeyspacePolicy(replication_factor=2)))
                time.sleep(25.0)  # the step: as much of a sweep as fits into this time
        if "drain" not in skipped:
            with bench.step("drain begin"):
                asyncio.run(bench.begin_drain())
        if "quota" not in skipped:
            with bench.step("a quota of nine tenths"):
                asyncio.run(bench.lower_quota())
        if "clear" not in skipped:
            with bench.step("clear"):
                asyncio.run(bench.clear())


async def _open(index_endpoint: str) -> None:
    client = IndexClient(ClientConfig(index_endpoints=(index_endpoint,)))
    await client.open_keyspace(NAME, SPEC)
    await client.close()


def drop_caches(directory: Path) -> None:
    for path in (directory / "disk").glob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("directory", type=Path)
    making.add_argument("--chunks", type=int, required=True)
    running = commands.add_parser("run")
    running.add_argument("directory", type=Path)
    running.add_argument("--skip", nargs="*", default=[], choices=STEPS)
    running.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.directory, arguments.chunks)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends with us
    run(arguments.directory, arguments.skip, arguments.json)


if __name__ == "__main__":
    main()
