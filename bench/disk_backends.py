"""How fast does the disk tier make pages durable and read them, beside plain files with equal durability and threads?

Every way has its space already (blocks reserved and written once before) and writes over it, as a tier at its cap does:
a group of old pages is deleted, a group of new ones written and synced. Ways take turns within a round; a ratio is the
median over the rounds of what the way did beside the best plain way of the same round.

write  extents            RocksPageStore: deletion, page bytes, records, all synced
       plain direct       one reserved file, O_DIRECT, one fdatasync a group
       plain buffered     the same through the page cache
read   extents            RocksPageStore into aligned slots, every sum verified; cold
       plain direct       preadv past the page cache, nothing verified
       plain buffered     preadv through the page cache, which was emptied before; nothing verified
       plain verified     plain direct, then every sum verified
scan   records a second that a start takes (see full_disk for a million)

Run: python -m bench.disk_backends [--directory DIR] [--mib 512] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey, page_bytes, seal, slot_bytes, verify
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.ports import PageWrite
from kvpool_server.process import tune_process

SIZES = (256 << 10, 1 << 20, 2 << 20, 8 << 20)
GROUPS_MIB = (16, 64)
WRITERS = (1, 2)
READERS = (1, 4)
METADATA = PageMetadata(parent_hash=bytes(16), chunk_index=0, group_head_hash=bytes(16))
CODEC = 1
Cases = dict[str, dict[str, list[float]]]  # GB/s by case and way, one a round


def key(number: int) -> PageKey:
    return PageKey(bytes(16), number.to_bytes(16, "big"), 0)


class Workbench:
    """Sealed pages of one size in aligned memory, a store and a plain file that hold them all."""

    def __init__(self, directory: Path, size: int, total_bytes: int) -> None:
        self._size, self._slot_bytes = size, slot_bytes(size)
        self.count = total_bytes // self._slot_bytes
        self.total_bytes = self.count * page_bytes(size)
        self._arena = memoryview(mmap.mmap(-1, self.count * self._slot_bytes))
        content = os.urandom(size)
        for number in range(self.count):
            slot = self._slot(number)
            slot[64 : 64 + size] = content
            seal(slot, key(number), CODEC, size)
        self._destinations = [memoryview(mmap.mmap(-1, self._slot_bytes)) for _ in range(max(READERS))]
        for destination in self._destinations:
            destination[:] = bytes(len(destination))
        self.stores = {"extents": RocksPageStore(directory / "extents", total_bytes + (96 << 20))}
        for store in self.stores.values():
            store.open()
        self._directory = directory
        self._path = directory / "plain"
        with self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.count * self._slot_bytes)

    def _slot(self, number: int) -> memoryview:
        return self._arena[number * self._slot_bytes : (number + 1) * self._slot_bytes]

    def _page(self, number: int) -> memoryview:
        return self._slot(number)[: page_bytes(self._size)]

    def close(self) -> None:
        for store in self.stores.values():
            store.close()

    def _timed(
        self, threads: int, work: Callable[[int, Sequence[int]], None], batches: Sequence[Sequence[int]]
    ) -> float:
        """Bytes a second of all batches done by some threads; work gets the number of its thread."""

        def share(thread: int) -> None:
            for batch in batches[thread::threads]:
                work(thread, batch)

        with ThreadPoolExecutor(threads) as pool:
            started_s = time.perf_counter()
            list(pool.map(share, range(threads)))
            return self.total_bytes / (time.perf_counter() - started_s)

    def write(self, way: str, threads: int, group_mib: int) -> float:
        step = max(1, (group_mib << 20) // self._slot_bytes)
        batches = [range(start, min(start + step, self.count)) for start in range(0, self.count, step)]
        if way in self.stores:
            return self._timed(threads, partial(self._put, self.stores[way]), batches)
        flags = os.O_WRONLY | (os.O_DIRECT if way == "plain direct" else 0)
        descriptor = os.open(self._path, flags)

        def put(_: int, batch: Sequence[int]) -> None:
            for number in batch:
                os.pwrite(descriptor, self._slot(number), number * self._slot_bytes)
            os.fdatasync(descriptor)

        rate = self._timed(threads, put, batches)
        os.close(descriptor)
        return rate

    def _put(self, store: RocksPageStore, _: int, batch: Sequence[int]) -> None:
        failures: list[KvPoolError | None] = []
        store.delete_batch([key(number) for number in batch])
        pages = [PageWrite(key=key(number), page=self._page(number), metadata=METADATA) for number in batch]
        store.put_batch(pages, lambda _, failure: failures.append(failure))
        if any(failures):
            raise RuntimeError(str(failures[0]))

    def read(self, way: str, threads: int) -> float:
        order = [[number] for number in random.sample(range(self.count), self.count)]
        self._drop_caches()
        if way in self.stores:
            return self._timed(threads, partial(self._get, self.stores[way]), order)
        descriptor = os.open(self._path, os.O_RDONLY | (0 if way == "plain buffered" else os.O_DIRECT))

        def get(thread: int, batch: Sequence[int]) -> None:
            slot = self._destinations[thread]
            os.preadv(descriptor, [slot], batch[0] * self._slot_bytes)
            if way == "plain verified":
                self._check(slot, batch[0])

        rate = self._timed(threads, get, order)
        os.close(descriptor)
        return rate

    def _get(self, store: RocksPageStore, thread: int, batch: Sequence[int]) -> None:
        slot = self._destinations[thread]
        store.get_into(key(batch[0]), slot[: page_bytes(self._size)])
        self._check(slot, batch[0])

    def _check(self, slot: memoryview, number: int) -> None:
        fault = verify(slot, key(number), CODEC, self._size)
        if fault is not None:
            raise RuntimeError(f"page {number}: {fault}")

    def scan(self, way: str) -> float:
        """Pages a second of a start: opening and scanning."""
        store = self.stores[way]
        store.close()
        self._drop_caches()
        started_s = time.perf_counter()
        store.open()
        found = sum(1 for _ in store.scan())
        return found / (time.perf_counter() - started_s)

    def _drop_caches(self) -> None:
        for path in self._directory.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def measure(bench: Workbench, size: int, rounds: int, found: Cases) -> None:
    """Round 0 only makes the space."""
    label = f"{size >> 10} KiB"
    stores, plain = list(bench.stores), ["plain direct", "plain buffered"]
    groups = [(threads, mib) for threads in WRITERS for mib in GROUPS_MIB if (mib << 20) >= size]
    for number in range(rounds + 1):
        for threads, mib in groups if number else groups[:1]:
            for way in random.sample(stores + plain, 3):
                rate = bench.write(way, threads, mib)
                if number:
                    case = found.setdefault(f"write {label}, groups of {mib} MiB, {threads} threads", {})
                    case.setdefault(way, []).append(rate / 1e9)
        for threads in READERS if number else ():
            for way in random.sample([*stores, *plain, "plain verified"], 4):
                case = found.setdefault(f"read {label}, cold, {threads} threads", {})
                case.setdefault(way, []).append(bench.read(way, threads) / 1e9)


def summary(found: Cases) -> dict[str, dict[str, object]]:
    """Medians in GB/s, and the ratios of the stores to the best plain way without verification."""
    cases: dict[str, dict[str, object]] = {}
    for name, ways in found.items():
        plain = [ways["plain direct"], ways["plain buffered"]]
        best = max(plain, key=statistics.median)  # the better one as a whole, not of each round: noise is no merit
        medians = {way: round(statistics.median(rates), 3) for way, rates in ways.items()}
        ratios = {
            way: round(statistics.median(rate / beside for rate, beside in zip(ways[way], best, strict=True)), 3)
            for way in ways
            if not way.startswith(("plain direct", "plain buffered"))
        }
        cases[name] = {"gb_s": medians, "ratio_to_best_plain": ratios}
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes-kib", type=int, nargs="*", default=[size >> 10 for size in SIZES])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tune_process()
    found: Cases = {}
    scans: dict[str, int] = {}
    for size in (kib << 10 for kib in arguments.sizes_kib):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            bench = Workbench(Path(directory), size, arguments.mib << 20)
            measure(bench, size, arguments.rounds, found)
            scans |= {f"{way}, {bench.count} pages": round(bench.scan(way)) for way in bench.stores}
            bench.close()
    cases = summary(found)
    for name, case in cases.items():
        print(name, json.dumps(case))
    document = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": "2-core virtual machine, shared with other work",
        "command": f"python -m bench.disk_backends --mib {arguments.mib} --rounds {arguments.rounds}",
        "cases": cases,
        "scan_pages_per_s": scans,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
