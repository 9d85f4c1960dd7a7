"""What the log is said to hold durably, when a sync of it fails: it is there after a power loss."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rocksdict import WriteBatch

from kvpool.core.errors import StoreFault
from kvpool_pagestore.adapters.records import RECORDS, VALUES
from kvpool_pagestore.adapters.rocks_database import RocksDatabase
from tests.fixtures.patience import PATIENCE_S


class LossyDisk:
    """Log files whose syncs fail when asked to. What a failed one should have written counts as written from then on,
    as the kernel has it: no later sync writes or reports it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures_left = 0
        self._directory = directory
        self._seen: dict[str, int] = {}  # bytes of a file that syncs have dealt with, by name
        self._lost: dict[str, list[tuple[int, int]]] = {}
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, descriptor: int) -> None:
        name, size_bytes = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, os.fstat(descriptor).st_size
        before = self._seen.get(name, 0)
        self._seen[name] = size_bytes
        if self.failures_left and size_bytes > before:
            self.failures_left -= 1
            self._lost.setdefault(name, []).append((before, size_bytes))
            raise OSError(errno.EIO, "Input/output error")

    def lose_power(self, copy: Path) -> None:
        """The directory as it is found then."""
        shutil.copytree(self._directory, copy)
        for path in self._directory.glob("*.log"):
            os.truncate(copy / path.name, self._seen.get(path.name, 0))
            with (copy / path.name).open("r+b") as file:
                for start, end in self._lost.get(path.name, []):
                    file.seek(start)
                    file.write(bytes(end - start))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LossyDisk:
    return LossyDisk(tmp_path / "db", monkeypatch)


@pytest.fixture
def database(tmp_path: Path, disk: LossyDisk) -> Iterator[RocksDatabase]:
    opened = RocksDatabase(tmp_path / "db")
    yield opened
    opened.close()


def record(number: int) -> bytes:
    return number.to_bytes(34, "big")


def write(database: RocksDatabase, number: int) -> None:
    batch = WriteBatch(raw_mode=True)
    batch.put(record(number), b"value", database.handle(RECORDS))
    database.write(batch, sync=False)


def after_power_loss(disk: LossyDisk, copy: Path, count: int) -> set[int]:
    """Which of the first records are there."""
    disk.lose_power(copy)
    again = RocksDatabase(copy)
    found = {number for number in range(count) if again.family(RECORDS).get(record(number)) is not None}
    again.close()
    return found


@pytest.mark.parametrize("failures", [1, 3])
def test_a_sync_after_a_failed_one_does_not_vouch_for_what_that_one_lost(
    database: RocksDatabase, disk: LossyDisk, tmp_path: Path, failures: int
) -> None:
    write(database, 0)
    database.sync_log()
    write(database, 1)
    for _ in range(failures):
        write(database, 2)
        disk.failures_left = 1
        with pytest.raises(StoreFault):
            while True:  # the first one after a failure goes around the log
                database.sync_log()
                write(database, 2)
    write(database, 3)
    database.sync_log()
    write(database, 4)
    database.sync_log()
    assert after_power_loss(disk, tmp_path / "copy", 5) == {0, 1, 2, 3, 4}


def test_what_was_reported_durable_is_durable_though_syncs_at_the_same_time_failed(
    database: RocksDatabase, disk: LossyDisk, tmp_path: Path
) -> None:
    disk.failures_left = 2
    reported, begin = set[int](), threading.Barrier(4)

    def work(first: int) -> None:
        begin.wait(PATIENCE_S)
        for number in range(first, first + 5):
            write(database, number)
            try:
                database.sync_log()
            except StoreFault:
                continue
            reported.add(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 20, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reported) >= 18 and reported <= after_power_loss(disk, tmp_path / "copy", 20)


def test_a_waiter_beside_another_sync_is_answered_when_its_own_records_are_synced(
    database: RocksDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fdatasync, sizes = os.fdatasync, list[int]()
    inside, go_on = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        inside.set()
        assert go_on.wait(PATIENCE_S)
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    write(database, 0)
    first = threading.Thread(target=database.sync_log)
    first.start()
    assert inside.wait(PATIENCE_S)
    write(database, 1)
    others = [threading.Thread(target=database.sync_log) for _ in range(3)]
    for thread in others:
        thread.start()
    go_on.set()
    for thread in (first, *others):
        thread.join()
    (log,) = (tmp_path / "db").glob("*.log")
    assert sizes[0] < log.stat().st_size == sizes[-1], "what was written meanwhile was not synced"


def test_logs_that_are_gone_are_not_held_open(database: RocksDatabase, tmp_path: Path) -> None:
    def held() -> set[str]:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return {Path(link).name for link in links if link.startswith(str(tmp_path)) and ".log" in link}

    write(database, 0)
    database.sync_log()
    for name in (RECORDS, VALUES):
        database.family(name).flush(wait=True)
    write(database, 1)
    database.sync_log()
    assert not any("(deleted)" in name for name in held())
