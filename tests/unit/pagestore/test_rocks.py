"""What only the RocksDB tier does: it gives space back, stays small, and says why it cannot start or write."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rocksdict import WriteBatch

from kvpool.core.errors import KvPoolError, QuotaExceeded, StartupFailed, StoreFault
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters import page_store, rocks_database
from kvpool_pagestore.adapters.extents import ExtentBlocks
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.adapters.records import RECORDS
from tests.unit.pagestore.rocks_pages import PAGE_BYTES, get, key, opened, page, page_write, put, put_each, scanned

# ---- space


def test_space_comes_back_and_live_pages_stay_right_through_long_churn(tmp_path: Path) -> None:
    capacity_bytes = 60 << 20
    store = opened(tmp_path, capacity_bytes=capacity_bytes)
    live: list[int] = []
    limit_pages = store.live_limit_bytes // store.charged_bytes(PAGE_BYTES)
    highest_bytes = 0
    for number in range(0, 400, 4):
        surplus = max(0, len(live) + 4 - limit_pages)
        # Now an old one, now a new one: what becomes free is scattered.
        doomed = [live.pop((7 * number + 3 * n) % len(live)) for n in range(surplus)]
        store.delete_batch([key(dead) for dead in doomed])
        put(store, *range(number, number + 4))
        live += range(number, number + 4)
        highest_bytes = max(highest_bytes, store.used_bytes())
    assert highest_bytes <= capacity_bytes
    assert len(live) > limit_pages - 4 > 90
    assert scanned(store) == set(live)
    assert all(get(store, number) == page(number) for number in live)
    store.close()
    store = opened(tmp_path, capacity_bytes=capacity_bytes)
    assert scanned(store) == set(live)
    assert all(get(store, number) == page(number) for number in live)
    store.delete_keyspace(b"k" * 16)
    assert scanned(store) == set()
    for start in range(1000, 1000 + limit_pages // 4 * 4, 4):
        put(store, *range(start, start + 4))  # the space is there again
    assert store.used_bytes() <= capacity_bytes
    store.close()


def test_readers_never_miss_a_page_that_is_being_moved(tmp_path: Path) -> None:
    store = opened(tmp_path)
    kept = [0, 9, 18, 27]
    stop, failures = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            for number in kept:
                if get(store, number) != page(number):
                    failures.append(number)

    for number in range(36):
        put(store, number)
    reader = threading.Thread(target=read)
    reader.start()
    for round_number in range(6):
        store.delete_batch([key(number) for number in range(36) if number not in kept])
        put(store, *(number for number in range(36) if number not in kept and number % 6 != round_number))
    stop.set()
    reader.join()
    assert failures == []
    store.close()


def test_writers_at_once_are_all_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    threads = [
        threading.Thread(target=lambda first=first: put_each(store, range(first, first + 8)))
        for first in range(0, 32, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scanned(store) == set(range(32))
    assert all(get(store, number) == page(number) for number in range(32))
    store.close()


def test_memory_and_files_stay_small_whatever_was_written(tmp_path: Path) -> None:
    script = """
import ctypes
import sys
from pathlib import Path
from kvpool_server.process import tune_process
from tests.unit.pagestore.rocks_pages import opened, page_write, get
def resident_mib():
    return sum(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) / 1024
tune_process()
store = opened(Path(sys.argv[1]))
ctypes.CDLL(None).malloc_trim(0)
before = resident_mib()
for start in range(0, 600, 10):
    store.put_batch([page_write(n) for n in range(start, start + 10)], lambda key, failure: None)
for number in range(600):
    get(store, number)
ctypes.CDLL(None).malloc_trim(0)
print(resident_mib() - before)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout
    assert float(output) < 20
    assert sum(path.stat().st_size for path in tmp_path.glob("LOG*")) < 4 << 20


def test_the_cache_of_records_grows_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters and indexes that do not fit are read again for each lookup."""
    monkeypatch.setattr(rocks_database, "_BLOCK_CACHE_BYTES", 1000)
    monkeypatch.setattr(rocks_database, "_CACHE_FITTED_WRITES", 1)
    database, sizes = rocks_database.RocksDatabase(tmp_path), list[int]()
    for start in range(0, 40_000, 10_000):
        batch = WriteBatch(raw_mode=True)
        for number in range(start, start + 10_000):
            batch.put(key(number).pack(), bytes(140), database.handle(RECORDS))
        database.write(batch, sync=True)
        database.family(RECORDS).flush(wait=True)
        sizes.append(database.cache_bytes())
    assert sizes[0] > 10_000 * 2 and sizes[-1] > 3.5 * sizes[0]
    database.close()


def test_clearing_a_large_keyspace_holds_few_of_its_pages_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is deleted waits for a sync before its blocks are free; there is one every so many pages."""
    monkeypatch.setattr(page_store, "_FORGOTTEN_ROWS", 10)
    monkeypatch.setattr(page_store, "_UNSYNCED_PAGES", 30)
    store, syncs = opened(tmp_path), list[int]()
    store.put_batch([page_write(number, b"small") for number in range(300)], lambda _, failure: None)
    sync_log = rocks_database.RocksDatabase.sync_log

    def counted(database: rocks_database.RocksDatabase) -> None:
        syncs.append(len(scanned(store)))
        sync_log(database)

    monkeypatch.setattr(rocks_database.RocksDatabase, "sync_log", counted)
    store.delete_keyspace(b"k" * 16)
    assert syncs == [*range(270, -1, -30), 0]
    store.close()


def test_a_new_keyspace_costs_no_look_at_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    for number in range(20):
        store.remember_keyspace(b"old %d" % number)
    store.close()
    store, read = opened(tmp_path), list[Path]()
    read_bytes = Path.read_bytes

    def recorded(path: Path) -> bytes:
        read.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", recorded)
    for number in range(20):
        store.remember_keyspace(b"new %d" % number)
    assert read == []
    assert len(store.keyspaces()) == 40
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda store: put(store, 7),
        lambda store: store.delete_batch([key(1)]),
        lambda store: store.delete_keyspace(b"k" * 16),
        lambda store: store.set_metadata([(key(1), page_write(2).metadata)]),
    ],
    ids=["put_batch", "delete_batch", "delete_keyspace", "set_metadata"],
)
def test_what_the_opening_found_is_given_once_and_not_after_a_change(
    tmp_path: Path, change: Callable[[RocksPageStore], None]
) -> None:
    store = opened(tmp_path)
    put_each(store, (1, 2, 3))
    store.close()
    store = opened(tmp_path)
    found = store.take_found()
    assert found is not None and len(found) == 3 and found.page_counts.total() == 3
    assert bytes(found.names) == b"".join(key(number).pack()[:32] for number in (1, 2, 3))
    assert store.take_found() is None
    store.close()
    store = opened(tmp_path)
    change(store)
    assert store.take_found() is None
    store.close()


# ---- refusals


def refused(directory: Path) -> str:
    with pytest.raises(StartupFailed) as raised:
        RocksPageStore(directory, 64 << 20).open()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_directory_in_use_is_refused_and_named(tmp_path: Path) -> None:
    store = opened(tmp_path)
    message = refused(tmp_path)
    assert str(tmp_path) in message and "in use by another process" in message
    put(store, 1)
    store.close()


def test_a_directory_that_cannot_be_made_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert str(tmp_path / "file" / "disk") in refused(tmp_path / "file" / "disk")


def test_a_directory_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rocks_database, "_FORMAT", b"of another version")
        opened(tmp_path).close()
    assert "of another version" in refused(tmp_path)


@pytest.mark.parametrize(
    "call",
    [
        lambda store: list(store.scan()),
        lambda store: store.load_value("x"),
        lambda store: store.get_into(key(1), memoryview(bytearray(1))),
        lambda store: store.used_bytes(),
    ],
)
def test_a_closed_store_is_a_fault_not_a_miss(tmp_path: Path, call: Callable[[RocksPageStore], object]) -> None:
    store = opened(tmp_path)
    store.close()
    with pytest.raises(StoreFault):
        call(store)


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_that_fails_is_reported_once_per_page_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    put(store, 1)
    failures: list[tuple[PageKey, KvPoolError | None]] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", no_space)
        store.put_batch([page_write(2), page_write(3)], lambda page_key, failure: failures.append((page_key, failure)))
    assert [(page_key, type(failure)) for page_key, failure in failures] == [(key(2), StoreFault), (key(3), StoreFault)]
    put(store, 3)
    assert scanned(store) == {1, 3}
    store.close()


def test_while_a_keyspace_is_cleared_its_blocks_serve_writers_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_store, "_UNSYNCED_PAGES", 64)
    monkeypatch.setattr(page_store, "_FORGOTTEN_ROWS", 64)
    store = opened(tmp_path, 128 << 20)
    failures: list[KvPoolError | None] = []

    def fill(number: int) -> bool:
        store.put_batch([page_write(number)], lambda _, failure: failures.append(failure))
        return failures[-1] is None

    count = next(number for number in range(10_000) if not fill(number))
    assert isinstance(failures[-1], QuotaExceeded) and count > 300
    give_if_read, written = ExtentBlocks.give_if_read, list[KvPoolError | None]()
    other = replace(page_write(0), key=PageKey(b"o" * 16, b"c" * 16, 0))

    def given(blocks: ExtentBlocks, keys: list[bytes], values: list[bytes]) -> Any:
        if len(written) == 3:  # parts: the blocks of the first two have come back
            store.put_batch([other], lambda _, failure: failures.append(failure))
        written.append(failures[-1])
        return give_if_read(blocks, keys, values)

    monkeypatch.setattr(ExtentBlocks, "give_if_read", given)
    store.delete_keyspace(b"k" * 16)
    assert len(written) > 4 and written[3] is None
    store.close()
