"""What does the disk tier do to a device over an hour at its cap?

Pages of 256 KiB, 1, 2 and 8 MiB (as many bytes of each) are written at a bounded rate, far beyond the cap, while others
read by Zipf's law; what was unused longest is given up. Sizes are mixed and reads save old pages, so that what comes
free is scattered. Every page that is read is verified.

written_bytes counts what this process had the kernel write to the device (/proc/self/io), RocksDB's files included.
The files are measured every 100 ms as the file system counts them.

Run: python -m bench.disk_churn [--minutes 60] [--rate-mb-s 80] [--capacity-mib 4096] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageKey, page_bytes, seal, slot_bytes, verify
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.ports import PageWrite
from kvpool_server.process import tune_process

SIZES = (256 << 10, 1 << 20, 2 << 20, 8 << 20)
METADATA = PageMetadata(parent_hash=bytes(16), chunk_index=0, group_head_hash=bytes(16))
BATCH_BYTES = 16 << 20
CODEC = 1


def key(number: int) -> PageKey:
    return PageKey(bytes(16), number.to_bytes(16, "big"), 0)


class Churn:
    """A store at its cap with one thread that writes, one that reads and one that measures."""

    def __init__(self, store: RocksPageStore, capacity_bytes: int, rate_bytes_s: float, seed: int) -> None:
        self._store = store
        self._capacity_bytes = capacity_bytes
        self._rate_bytes_s = rate_bytes_s
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._present: OrderedDict[int, int] = OrderedDict()  # payload bytes by number, unused longest first
        self._numbers: list[int] = []  # present or not, for choosing by rank of age
        self._being_read: set[int] = set()
        self._charged_bytes = 0
        self._stop = threading.Event()
        self.put_bytes = self.put_pages = self.refused_batches = self.bad_pages = self.missing_pages = 0
        self.put_s: list[float] = []  # of a batch
        self.get_s: dict[int, list[float]] = {size: [] for size in SIZES}
        self.highest_bytes = self.samples = self.over_cap = 0

    def run(self, seconds: float) -> None:
        self._stop.clear()
        threads = [threading.Thread(target=work) for work in (self._write, self._read, self._measure)]
        for thread in threads:
            thread.start()
        self._stop.wait(seconds)
        self._stop.set()
        for thread in threads:
            thread.join()

    def wait_full(self) -> None:
        """Write without bound until pages were given up."""
        arena, number = mmap.mmap(-1, 2 * BATCH_BYTES), 0
        while not self._write_batch(memoryview(arena), number, self._choose()):
            number = self._numbers[-1] + 1

    def _choose(self) -> list[int]:
        """Sizes of one batch; small pages are as many bytes as large ones."""
        chosen: list[int] = []
        while sum(chosen) < BATCH_BYTES:
            chosen += self._dice.choices(SIZES, [1 / size for size in SIZES])
        return chosen

    def _write(self) -> None:
        arena = mmap.mmap(-1, 2 * BATCH_BYTES)
        started_s, begun_bytes = time.perf_counter(), self.put_bytes
        while not self._stop.is_set():
            self._write_batch(memoryview(arena), self._numbers[-1] + 1, self._choose())
            due_s = started_s + (self.put_bytes - begun_bytes) / self._rate_bytes_s
            self._stop.wait(max(0.0, due_s - time.perf_counter()))

    def _write_batch(self, arena: memoryview, first: int, sizes: Sequence[int]) -> bool:
        """Whether pages had to be given up."""
        writes, at = [], 0
        for number, size in enumerate(sizes, first):
            slot = arena[at : at + slot_bytes(size)]
            at += len(slot)
            slot[64:80] = number.to_bytes(16, "big")
            seal(slot, key(number), CODEC, size)
            writes.append(PageWrite(key=key(number), page=slot[: page_bytes(size)], metadata=METADATA))
        failures: list[KvPoolError | None] = []
        gave_up = self._make_room(sum(self._charge(size) for size in sizes))
        started_s = time.perf_counter()
        self._store.put_batch(writes, lambda _, failure: failures.append(failure))
        self.put_s.append(time.perf_counter() - started_s)
        with self._lock:
            for number, size, failure in zip(range(first, first + len(sizes)), sizes, failures, strict=True):
                self._numbers.append(number)
                if failure is None:
                    self._present[number] = size
                    self._charged_bytes += self._charge(size)
        self.refused_batches += any(failures)
        self.put_bytes += 0 if any(failures) else sum(page_bytes(size) for size in sizes)
        self.put_pages += len(sizes)
        return gave_up

    def _charge(self, size: int) -> int:
        return self._store.charged_bytes(page_bytes(size))

    def _make_room(self, needed_bytes: int) -> bool:
        doomed: list[int] = []
        with self._lock:
            for number, size in self._present.items():
                if self._charged_bytes + needed_bytes <= self._store.live_limit_bytes:
                    break
                if number not in self._being_read:
                    doomed.append(number)
                    self._charged_bytes -= self._charge(size)
            for number in doomed:
                del self._present[number]
        if doomed:
            self._store.delete_batch([key(number) for number in doomed])
        return bool(doomed)

    def _read(self) -> None:
        slot = memoryview(mmap.mmap(-1, slot_bytes(SIZES[-1])))
        while not self._stop.wait(0.02):
            with self._lock:
                number = self._rank()
                size = self._present.get(number)
                if size is None:
                    continue
                self._present.move_to_end(number)
                self._being_read.add(number)
            page = slot[: page_bytes(size)]
            started_s = time.perf_counter()
            found = self._store.get_into(key(number), page)
            fault = verify(page, key(number), CODEC, size)
            self.get_s[size].append(time.perf_counter() - started_s)
            self.missing_pages += found is None
            self.bad_pages += found is not None and fault is not None
            with self._lock:
                self._being_read.discard(number)

    def _rank(self) -> int:
        """A page by Zipf's law over a fixed shuffle of all numbers, so that some old ones stay wanted."""
        count = len(self._numbers)
        rank = int(count ** self._dice.random())  # density 1 / rank
        return self._numbers[(rank * 2_654_435_761 + count // 4096 * 977) % count]

    def _measure(self) -> None:
        while not self._stop.wait(0.1):
            used_bytes = self._store.used_bytes()
            self.highest_bytes = max(self.highest_bytes, used_bytes)
            self.over_cap += used_bytes > self._capacity_bytes
            self.samples += 1


def device_bytes() -> int:
    """Bytes that this process had written to devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    found = {name: ordered[min(len(ordered) - 1, int(len(ordered) * part))] for name, part in PARTS.items()}
    return {name: round(value * 1e3, 2) for name, value in found.items()}


PARTS = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


def report(arguments: argparse.Namespace, churn: Churn, seconds: float, written_bytes: int) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": "2-core virtual machine, shared with other work",
        "command": f"python -m bench.disk_churn --minutes {arguments.minutes} "
        f"--rate-mb-s {arguments.rate_mb_s} --capacity-mib {arguments.capacity_mib}",
        "seconds": round(seconds),
        "page_bytes_put": churn.put_bytes,
        "pages_put": churn.put_pages,
        "written_bytes": written_bytes,
        "write_amplification": round(written_bytes / max(1, churn.put_bytes), 4),
        "capacity_bytes": arguments.capacity_mib << 20,
        "highest_bytes": churn.highest_bytes,
        "samples": churn.samples,
        "samples_over_cap": churn.over_cap,
        "put_batch_ms": percentiles_ms(churn.put_s),
        "get_verified_ms": {f"{size >> 10} KiB": percentiles_ms(found) for size, found in churn.get_s.items()},
        "gets": sum(len(found) for found in churn.get_s.values()),
        "refused_batches": churn.refused_batches,
        "missing_pages": churn.missing_pages,
        "bad_pages": churn.bad_pages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate-mb-s", type=float, default=80)
    parser.add_argument("--capacity-mib", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tune_process()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        capacity_bytes = arguments.capacity_mib << 20
        store = RocksPageStore(Path(directory) / "disk", capacity_bytes)
        store.open()
        churn = Churn(store, capacity_bytes, arguments.rate_mb_s * 1e6, seed=4)
        churn.wait_full()
        churn.put_bytes = churn.put_pages = 0
        churn.put_s.clear()
        written_bytes, started_s = device_bytes(), time.perf_counter()
        for _ in range(max(1, round(arguments.minutes))):  # what is known so far is kept, minute by minute
            churn.run(min(60.0, arguments.minutes * 60))
            seconds = time.perf_counter() - started_s
            found = report(arguments, churn, seconds, device_bytes() - written_bytes)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=2) + "\n")
        print(json.dumps(found, indent=2))
        store.close()


if __name__ == "__main__":
    main()
