"""What only the RocksDB tier does: it survives kills and damage, gives space back, and says why it cannot start."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kvpool.core.errors import KvPoolError, PageCorrupt, StartupFailed, StoreFault
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters.rocks import PageBytes, RocksPageStore
from kvpool_pagestore.adapters.rocks_volumes import live_limit_bytes
from kvpool_pagestore.ports import PageMetadata, PageWrite

VOLUME_BYTES = 1 << 20
PAGE_BYTES = 200_000


def key(number: int) -> PageKey:
    return PageKey(b"k" * 16, number.to_bytes(16, "big"), 0)


def page(number: int, size_bytes: int = PAGE_BYTES) -> bytes:
    return (number.to_bytes(4, "big") * (size_bytes // 4 + 1))[:size_bytes]


def page_write(number: int, content: bytes | None = None) -> PageWrite:
    metadata = PageMetadata(parent_hash=b"p" * 16, chunk_index=number, group_head_hash=b"g" * 16)
    return PageWrite(key=key(number), page=memoryview(page(number) if content is None else content), metadata=metadata)


def opened(directory: Path, way: str, volume_bytes: int = VOLUME_BYTES) -> RocksPageStore:
    store = RocksPageStore(directory, volume_bytes=volume_bytes, page_bytes=PageBytes(way))
    store.open()
    return store


def put(store: RocksPageStore, *numbers: int) -> None:
    failures: list[KvPoolError | None] = []
    store.put_batch([page_write(number) for number in numbers], lambda _, failure: failures.append(failure))
    assert failures == [None] * len(numbers)


def put_each(store: RocksPageStore, numbers: Iterable[int]) -> None:
    for number in numbers:
        put(store, number)


def get(store: RocksPageStore, number: int) -> bytes | None:
    destination = bytearray(PAGE_BYTES)
    found = store.get_into(key(number), memoryview(destination))
    return None if found is None else bytes(destination[:found])


def scanned(store: RocksPageStore) -> set[int]:
    return {found.metadata.chunk_index for found in store.scan()}


@pytest.fixture(params=["files", "tables"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- kills

WRITER = """
import sys
from pathlib import Path
from tests.unit.pagestore.test_rocks import opened, page_write
store = opened(Path(sys.argv[1]), sys.argv[2])
store.save_value("incarnation", b"41")
for start in range(0, 100_000, 4):
    store.put_batch([page_write(n) for n in range(start, start + 4)], lambda key, failure: failure or print(
        int.from_bytes(key.chunk_hash, "big"), flush=True))
    if start:
        store.delete_batch([page_write(start - 1).key])
"""


@pytest.mark.parametrize("lines", [1, 41, 90])
def test_what_was_durable_is_there_after_a_kill(tmp_path: Path, way: str, lines: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "disk"), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}) as process:
        assert process.stdout is not None
        durable = [int(process.stdout.readline()) for _ in range(lines)]
        process.kill()
        durable += [int(line) for line in process.stdout if line.endswith(b"\n")]
    store = opened(tmp_path / "disk", way)
    last = max(durable)
    for number in durable:
        found = get(store, number)
        if number % 4 == 3 and number < last:
            assert found in (None, page(number))  # it may have been deleted
        else:
            assert found == page(number)
    assert {number for number in durable if number % 4 != 3} <= scanned(store) <= set(range(last + 5))
    assert store.load_value("incarnation") == b"41"
    assert list((tmp_path / "disk").glob("incoming/*")) == []
    store.close()


# ---- damage


def file_with(directory: Path, content: bytes) -> Path:
    """The table or volume file that holds some bytes."""
    paths = [*directory.glob("*.sst"), *directory.glob("volumes/*")]
    return next(path for path in paths if content in path.read_bytes())


def test_a_flipped_byte_is_damage_or_reaches_the_reader_whose_sums_catch_it(tmp_path: Path, way: str) -> None:
    store = opened(tmp_path, way)
    put(store, 1, 2, 3)
    store.close()
    path = file_with(tmp_path, page(2)[:4000])
    damaged = bytearray(path.read_bytes())
    at = damaged.index(page(2)[:4000])
    damaged[at + 100_000] ^= 1
    path.write_bytes(damaged)
    store = opened(tmp_path, way)
    if way == "files":
        found = get(store, 2)
        assert found is not None and found != page(2) and len(found) == PAGE_BYTES
    else:
        with pytest.raises(PageCorrupt):
            get(store, 2)
    assert (get(store, 1), get(store, 3)) == (page(1), page(3))
    put(store, 2)
    assert get(store, 2) == page(2)
    store.close()


@pytest.mark.parametrize("harm", ["cut", "zeroed", "removed", "noise"])
def test_a_ruined_file_costs_its_own_pages_and_nothing_else(tmp_path: Path, way: str, harm: str) -> None:
    store = opened(tmp_path, way, volume_bytes=PAGE_BYTES)  # every batch gets a volume of its own
    put(store, 1, 2)
    put(store, 3, 4)
    store.close()
    ruined = file_with(tmp_path, page(3)[:4000])
    size_bytes = ruined.stat().st_size
    if harm == "removed":
        ruined.unlink()
    elif harm == "cut":
        os.truncate(ruined, size_bytes // 2)
    else:
        ruined.write_bytes(bytes(size_bytes) if harm == "zeroed" else os.urandom(size_bytes))
    store = opened(tmp_path, way)
    assert (get(store, 1), get(store, 2)) == (page(1), page(2))
    for number in (3, 4):
        with contextlib.suppress(PageCorrupt):
            assert get(store, number) != page(number) or (harm == "cut" and number == 3)
    store.delete_batch([key(3), key(4)])
    put(store, 3, 5)
    assert (get(store, 3), get(store, 4), get(store, 5)) == (page(3), None, page(5))
    assert scanned(store) == {1, 2, 3, 5}
    store.close()
    store = opened(tmp_path, way)
    assert (get(store, 1), get(store, 3), get(store, 5)) == (page(1), page(3), page(5))
    store.close()


def test_damaged_records_cost_their_own_pages_and_nothing_else(tmp_path: Path, way: str) -> None:
    store = opened(tmp_path, way)
    for start in range(0, 400, 100):
        pages = [page_write(number, b"small page %d" % number) for number in range(start, start + 100)]
        store.put_batch(pages, lambda page_key, failure: None)
    store.close()
    opened(tmp_path, way).close()  # turns the log into tables
    records = file_with(tmp_path, b"p" * 16 + (5).to_bytes(8, "little"))
    damaged = bytearray(records.read_bytes())
    at = damaged.index(b"p" * 16 + (5).to_bytes(8, "little"))
    damaged[at] ^= 1
    records.write_bytes(damaged)
    store = opened(tmp_path, way)
    survivors = scanned(store)
    assert 5 not in survivors and len(survivors) >= 300
    assert all(get(store, number) == b"small page %d" % number for number in survivors)
    assert get(store, 5) is None
    put(store, 5)
    store.close()
    store = opened(tmp_path, way)
    assert scanned(store) == survivors | {5}
    store.close()


# ---- space


def test_space_comes_back_and_live_pages_stay_right_through_long_churn(tmp_path: Path, way: str) -> None:
    store = opened(tmp_path, way, volume_bytes=4 << 20)
    live: list[int] = []
    capacity_bytes = 60 << 20
    limit_bytes = live_limit_bytes(capacity_bytes, 4 << 20)
    highest_bytes = 0
    for number in range(0, 500, 4):
        put(store, *range(number, number + 4))
        live += range(number, number + 4)
        surplus = max(0, len(live) - limit_bytes // PAGE_BYTES)
        # Now an old one, now a new one: volumes become dead in parts.
        doomed = [live.pop((7 * number + 3 * n) % len(live)) for n in range(surplus)]
        store.delete_batch([key(dead) for dead in doomed])
        highest_bytes = max(highest_bytes, store.used_bytes())
    assert highest_bytes <= capacity_bytes
    assert len(live) * PAGE_BYTES >= limit_bytes - 5 * PAGE_BYTES
    assert scanned(store) == set(live)
    assert all(get(store, number) == page(number) for number in live)
    store.close()
    store = opened(tmp_path, way)
    assert scanned(store) == set(live)
    assert all(get(store, number) == page(number) for number in live)
    store.delete_keyspace(b"k" * 16)
    assert store.used_bytes() < 8 << 20
    store.close()


def test_readers_never_miss_a_page_that_is_being_moved(tmp_path: Path, way: str) -> None:
    store = opened(tmp_path, way)
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


def test_writers_at_once_are_all_kept(tmp_path: Path, way: str) -> None:
    store = opened(tmp_path, way)
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


def test_memory_and_files_stay_small_whatever_was_written(tmp_path: Path, way: str) -> None:
    script = """
import sys
from pathlib import Path
from kvpool_server.process import trim_memory, tune_process
from tests.unit.pagestore.test_rocks import opened, page_write, get
def resident_mib():
    return sum(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) / 1024
tune_process()
store = opened(Path(sys.argv[1]), sys.argv[2])
trim_memory()
before = resident_mib()
for start in range(0, 600, 10):
    store.put_batch([page_write(n) for n in range(start, start + 10)], lambda key, failure: None)
for number in range(600):
    get(store, number)
trim_memory()
print(resident_mib() - before)
"""
    command = [sys.executable, "-c", script, str(tmp_path), way]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout
    assert float(output) < 20
    assert sum(path.stat().st_size for path in tmp_path.glob("LOG*")) < 4 << 20


# ---- refusals


def refused(directory: Path, page_bytes: PageBytes = PageBytes.FILES) -> str:
    with pytest.raises(StartupFailed) as raised:
        RocksPageStore(directory, page_bytes=page_bytes).open()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_directory_in_use_is_refused_and_named(tmp_path: Path) -> None:
    store = opened(tmp_path, "files")
    message = refused(tmp_path)
    assert str(tmp_path) in message and "in use by another process" in message
    put(store, 1)
    store.close()


def test_a_directory_that_cannot_be_made_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert str(tmp_path / "file" / "disk") in refused(tmp_path / "file" / "disk")


def test_a_directory_of_another_format_is_refused(tmp_path: Path, way: str) -> None:
    store = opened(tmp_path, way)
    store.close()
    other = PageBytes.TABLES if way == "files" else PageBytes.FILES
    assert other.value in refused(tmp_path, other)
    opened(tmp_path, way).close()


def test_a_database_that_is_broken_beyond_repair_is_refused_with_the_cure(tmp_path: Path) -> None:
    opened(tmp_path, "files").close()
    (tmp_path / "CURRENT").write_bytes(b"MANIFEST-999999\n")
    assert "empty the directory" in refused(tmp_path)


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.scan(),
        lambda store: store.load_value("x"),
        lambda store: store.get_into(key(1), memoryview(bytearray(1))),
        lambda store: store.used_bytes(),
    ],
)
def test_a_closed_store_is_a_fault_not_a_miss(tmp_path: Path, call: Callable[[RocksPageStore], object]) -> None:
    store = opened(tmp_path, "files")
    store.close()
    with pytest.raises(StoreFault):
        call(store)


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_that_fails_is_reported_once_per_page_and_leaves_nothing(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, way)
    put(store, 1)
    failures: list[tuple[PageKey, KvPoolError | None]] = []
    if way == "tables":
        (tmp_path / "incoming").rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_space)
        store.put_batch([page_write(2), page_write(3)], lambda page_key, failure: failures.append((page_key, failure)))
    assert [(page_key, type(failure)) for page_key, failure in failures] == [(key(2), StoreFault), (key(3), StoreFault)]
    if way == "tables":
        (tmp_path / "incoming").mkdir()
    put(store, 3)
    assert scanned(store) == {1, 3}
    store.close()
