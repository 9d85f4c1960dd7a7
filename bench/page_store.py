"""How fast does the disk tier make pages durable and read them, beside plain files with the same durability?

Pages of 2 MiB in batches of 32 (64 MiB), each batch durable before the next. The ways take turns.

write: files      RocksPageStore.put_batch with page bytes in files beside RocksDB (the default)
       tables     RocksPageStore.put_batch with page bytes inside RocksDB: synced table files, taken into volumes
       memtable   RocksDB as it comes: a write batch without log, then a flush
       log        RocksDB as it comes: a write batch through the log, synced
       new file   a new file per batch, pwrite, fsync (the baseline)
       allocated  one file, its blocks allocated before the clock runs, pwrite, fdatasync per batch
read:  files      RocksPageStore.get_into, page bytes in files
       tables     RocksPageStore.get_into, page bytes inside RocksDB
       plain      preadv of the same bytes into the same buffers (the baseline)
       each cold (the page cache emptied of these files before) and warm, and with 1 and 4 threads

Run: python -m bench.page_store [--directory DIR] [--pages 256] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rocksdict import DBCompressionType, Options, Rdict, WriteBatch, WriteOptions

from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.rocks import PageBytes, RocksPageStore
from kvpool_pagestore.ports import PageMetadata, PageWrite
from kvpool_server.process import tune_process

PAGE_BYTES = (2 << 20) + 64 + 256
BATCH_PAGES = 32
METADATA = PageMetadata(parent_hash=bytes(16), chunk_index=0, group_head_hash=bytes(16))


def key(number: int) -> PageKey:
    return PageKey(bytes(16), number.to_bytes(16, "big"), 0)


class Workbench:
    """Pages in memory, a directory, and one function a way. Those that write give the seconds they took."""

    def __init__(self, directory: Path, page_count: int) -> None:
        self._directory = directory
        self._arena = memoryview(bytearray(os.urandom(PAGE_BYTES) * BATCH_PAGES))
        self._numbers = [range(start, start + BATCH_PAGES) for start in range(0, page_count, BATCH_PAGES)]
        self.total_bytes = page_count * PAGE_BYTES
        self._slots = [memoryview(bytearray(PAGE_BYTES)) for _ in range(16)]

    def _page(self, number: int) -> memoryview:
        start = number % BATCH_PAGES * PAGE_BYTES
        return self._arena[start : start + PAGE_BYTES]

    def _fresh(self, name: str) -> Path:
        path = self._directory / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def write_extents(self) -> float:
        return self._write_store("extents")

    def write_tables(self) -> float:
        return self._write_store("tables")

    def _write_store(self, way: str) -> float:
        store = RocksPageStore(self._fresh(way), 4 << 30, page_bytes=PageBytes(way))
        store.open()
        failures: list[KvPoolError | None] = []
        started_at_s = time.perf_counter()
        for numbers in self._numbers:
            pages = [PageWrite(key=key(n), page=self._page(n), metadata=METADATA) for n in numbers]
            store.put_batch(pages, lambda _, failure: failures.append(failure))
        seconds = time.perf_counter() - started_at_s
        assert not any(failures), failures
        store.close()
        return seconds

    def write_memtable(self) -> float:
        return self._write_plain_rocks("memtable", log=False)

    def write_log(self) -> float:
        return self._write_plain_rocks("log", log=True)

    def _write_plain_rocks(self, name: str, *, log: bool) -> float:
        options = Options(raw_mode=True)
        options.set_compression_type(DBCompressionType.none())
        options.set_disable_auto_compactions(True)
        options.set_write_buffer_size(128 << 20)
        how = WriteOptions()
        how.sync = log
        if not log:
            how.disable_wal = True  # type: ignore[method-assign,assignment]  # the binding's types know it as a method
        database = Rdict(str(self._fresh(name)), options)
        started_at_s = time.perf_counter()
        for numbers in self._numbers:
            batch = WriteBatch(raw_mode=True)
            for number in numbers:
                batch.put(key(number).pack(), bytes(self._page(number)))
            database.write(batch, how)
            if not log:
                database.flush()
        seconds = time.perf_counter() - started_at_s
        database.close()
        shutil.rmtree(self._directory / name)
        return seconds

    def write_new_file(self) -> float:
        path = self._fresh("new file")
        started_at_s = time.perf_counter()
        for numbers in self._numbers:
            descriptor = os.open(path / str(numbers.start), os.O_CREAT | os.O_WRONLY)
            for number in numbers:
                os.pwrite(descriptor, self._page(number), (number - numbers.start) * PAGE_BYTES)
            os.fsync(descriptor)
            os.close(descriptor)
        return time.perf_counter() - started_at_s

    def write_allocated(self) -> float:
        descriptor = os.open(self._fresh("allocated") / "pages", os.O_CREAT | os.O_WRONLY)
        os.posix_fallocate(descriptor, 0, self.total_bytes)
        os.fsync(descriptor)
        started_at_s = time.perf_counter()
        for numbers in self._numbers:
            for number in numbers:
                os.pwrite(descriptor, self._page(number), number * PAGE_BYTES)
            os.fdatasync(descriptor)
        seconds = time.perf_counter() - started_at_s
        os.close(descriptor)
        shutil.rmtree(self._directory / "allocated")
        return seconds

    def _read_all(self, read: Callable[[int, memoryview], object], threads: int) -> float:
        slots = self._slots

        def read_share(share: int) -> None:
            for numbers in self._numbers[share::threads]:
                for number in numbers:
                    read(number, slots[share])

        with ThreadPoolExecutor(threads) as pool:
            started_at_s = time.perf_counter()
            list(pool.map(read_share, range(threads)))
            return time.perf_counter() - started_at_s

    def read_store(self, way: str, *, cold: bool, threads: int) -> float:
        store = RocksPageStore(self._directory / way, 4 << 30, page_bytes=PageBytes(way))
        store.open()
        if cold:
            self._drop_cache(way)
        seconds = self._read_all(lambda number, slot: store.get_into(key(number), slot), threads)
        store.close()
        return seconds

    def read_plain(self, *, cold: bool, threads: int) -> float:
        descriptors = {
            numbers.start: os.open(self._directory / "new file" / str(numbers.start), os.O_RDONLY)
            for numbers in self._numbers
        }
        if cold:
            self._drop_cache("new file")

        def read(number: int, slot: memoryview) -> None:
            place = number % BATCH_PAGES
            os.preadv(descriptors[number - place], [slot], place * PAGE_BYTES)

        seconds = self._read_all(read, threads)
        for descriptor in descriptors.values():
            os.close(descriptor)
        return seconds

    def _drop_cache(self, name: str) -> None:
        for path in (self._directory / name).rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def measure(bench: Workbench, rounds: int) -> dict[str, list[float]]:
    """GB/s by case. Writes of a round come before its reads, which read what they wrote."""
    writes = [
        bench.write_extents,
        bench.write_tables,
        bench.write_memtable,
        bench.write_log,
        bench.write_new_file,
        bench.write_allocated,
    ]
    reads = [(cold, threads) for cold in (True, False) for threads in (1, 4)]
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for write in random.sample(writes, len(writes)):
            name = write.__name__.replace("_", " ")
            found.setdefault(name, []).append(bench.total_bytes / write() / 1e9)
        for cold, threads in reads:
            for way in random.sample(("extents", "tables", "plain"), 3):
                read = bench.read_plain if way == "plain" else partial(bench.read_store, way)
                name = f"read {way}, {'cold' if cold else 'warm'}, {threads} threads"
                found.setdefault(name, []).append(bench.total_bytes / read(cold=cold, threads=threads) / 1e9)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tune_process()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        found = measure(Workbench(Path(directory), arguments.pages), arguments.rounds)
    cases = {}
    for name, rates in sorted(found.items()):
        baseline_name = (
            "write new file" if name.startswith("write") else name.replace("extents", "plain").replace("tables", "plain")
        )
        value, baseline = statistics.median(rates), statistics.median(found[baseline_name])
        cases[name] = {"value": value, "unit": "GB/s", "baseline": baseline, "ratio": value / baseline}
        print(f"{name:28} {value:6.2f} GB/s  ({min(rates):.2f} to {max(rates):.2f})  {value / baseline:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(cases, indent=2) + "\n")


if __name__ == "__main__":
    main()
