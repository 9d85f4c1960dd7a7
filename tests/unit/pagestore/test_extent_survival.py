"""Pages in extents after damage to any kind of file: it costs itself alone, and a start is never refused."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from rocksdict import WriteBatch

from kvpool.core.errors import PageCorrupt, StoreFault
from kvpool.core.page import PageKey
from kvpool_pagestore.adapters import page_store, salvage
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.adapters.rocks_database import RocksDatabase
from kvpool_pagestore.core.extents import BLOCK_BYTES, ExtentBudget, page_blocks
from kvpool_pagestore.ports import PageWrite
from tests.fixtures.stored_pages import stored_pages
from tests.unit.pagestore.rocks_pages import PAGE_BYTES, get, key, opened, page, page_write, put, scanned

COUNT = 300


def filled(directory: Path) -> None:
    """COUNT small pages, of which each tenth was deleted; records in tables and in the log."""
    store = opened(directory)
    store.remember_keyspace(b"a keyspace")
    for start in range(0, COUNT, 50):
        pages = [page_write(number, b"page %d" % number) for number in range(start, start + 50)]
        store.put_batch(pages, lambda _, failure: None)
        if start == 150:
            store.close()
            store = opened(directory)
    store.delete_batch([key(number) for number in range(0, COUNT, 10)])
    store.close()


LIVE = {number for number in range(COUNT) if number % 10}


def right(store: RocksPageStore) -> set[int]:
    """Pages that are found, all of them right."""
    contents = {number: get(store, number) for number in range(COUNT)}
    found = {number for number, content in contents.items() if content is not None}
    assert all(contents[number] == b"page %d" % number for number in found)
    assert scanned(store) == found
    return found


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


def noise(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def lose_database(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_file():
            path.unlink()


HARMS: dict[str, Callable[[Path], None]] = {
    "flipped at the start": lambda path: flip(path, 3),
    "flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "flipped at the end": lambda path: flip(path, path.stat().st_size - 3),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
    "noise": noise,
}
CASES = [
    *(("*.sst", harm) for harm in HARMS),
    *(("MANIFEST-*", harm) for harm in HARMS),
    *(("CURRENT", harm) for harm in ("flipped at the start", "emptied", "removed", "noise")),
    *((kind, harm) for kind in ("OPTIONS-*", "IDENTITY") for harm in ("removed", "noise")),
]


@pytest.mark.parametrize(("kind", "harm"), CASES)
@pytest.mark.slow
def test_no_page_is_lost_whatever_file_of_the_database_is_damaged(tmp_path: Path, kind: str, harm: str) -> None:
    filled(tmp_path)
    damaged = max(tmp_path.glob(kind), key=lambda path: path.stat().st_size)
    HARMS[harm](damaged)
    store = opened(tmp_path)
    found = right(store)
    assert found >= LIVE  # deleted ones may be back where no record of their deletion is left
    assert list(store.keyspaces()) == [b"a keyspace"]
    store.put_batch([page_write(0, b"page 0")], lambda _, failure: None)
    store.close()
    store = opened(tmp_path)
    assert right(store) == found | {0}
    store.close()


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.slow
def test_a_damaged_log_costs_what_was_written_since_the_last_table(tmp_path: Path, harm: str) -> None:
    filled(tmp_path)
    store = opened(tmp_path)
    for number in range(0, COUNT, 10):
        store.put_batch([page_write(number, b"page %d" % number)], lambda _, failure: None)
    # As a kill leaves it: copied while it is open.
    copy = tmp_path / "copy"
    (copy / "extents").mkdir(parents=True)
    for path in [*tmp_path.glob("*"), *tmp_path.glob("extents/*")]:
        if path.is_file() and path.name != "LOCK":
            (copy / path.relative_to(tmp_path)).write_bytes(path.read_bytes())
    store.close()
    HARMS[harm](max(copy.glob("*.log"), key=lambda path: path.stat().st_size))
    store = opened(copy)
    assert right(store) >= LIVE
    store.close()


def test_a_lost_database_is_rebuilt_from_the_pages(tmp_path: Path) -> None:
    filled(tmp_path)
    lose_database(tmp_path)
    store = opened(tmp_path)
    assert right(store) >= LIVE
    kept = {found.metadata.chunk_index: found.metadata for found in stored_pages(store)}
    assert kept[7] == page_write(7).metadata
    put(store, 1000)
    assert get(store, 1000) == page(1000)
    store.close()


@pytest.mark.slow
def test_salvage_holds_few_bytes_of_each_page_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(salvage, "_BATCH_ROWS", 256)
    monkeypatch.setattr(page_store, "_LOAD_ROWS", 256)
    peaks = list[int]()
    for count in (2_000, 8_000):
        directory = tmp_path / str(count)
        store = opened(directory)
        for start in range(0, count, 500):
            pages = [page_write(number, b"page %d" % number) for number in range(start, start + 500)]
            store.put_batch(pages, lambda _, failure: None)
        store.close()
        lose_database(directory)
        tracemalloc.start()
        store = opened(directory)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(scanned(store)) == count
        store.close()
    assert peaks[1] - peaks[0] <= 6_000 * 60


@pytest.mark.parametrize("batches", range(5))
@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.slow
def test_salvage_that_is_killed_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int, is_lost: bool
) -> None:
    monkeypatch.setattr(salvage, "_BATCH_ROWS", 100)
    filled(tmp_path)
    if is_lost:
        lose_database(tmp_path)
    else:
        flip(max(tmp_path.glob("*.sst"), key=lambda path: path.stat().st_size), 3)
    write, left = RocksDatabase.write, [batches]

    def killed_later(self: RocksDatabase, batch: WriteBatch, *, sync: bool) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StoreFault("killed")
        write(self, batch, sync=sync)

    with monkeypatch.context() as patch:
        patch.setattr(RocksDatabase, "write", killed_later)
        with pytest.raises(StoreFault):
            opened(tmp_path)
    store = opened(tmp_path)
    assert right(store) >= LIVE
    store.close()


def test_a_page_whose_blocks_others_have_overwritten_since_is_not_salvaged(tmp_path: Path) -> None:
    """Its trailer may be left, and those who overwrote it may be gone themselves."""
    store = opened(tmp_path, capacity_bytes=40 << 20)
    budget = ExtentBudget(40 << 20)
    count = budget.block_count // page_blocks(PAGE_BYTES)
    put(store, *range(count))
    store.delete_batch([key(number) for number in range(count)])
    small = [page_write(number, b"small") for number in range(1000, 1100)]
    store.put_batch(small, lambda _, failure: None)
    store.close()
    lose_database(tmp_path)
    store = opened(tmp_path, capacity_bytes=40 << 20)
    found = scanned(store)
    assert found >= set(range(1000, 1100))
    assert 0 < len(found & set(range(count))) < count
    assert all(get(store, number) == page(number) for number in found & set(range(count)))
    store.close()


def test_pages_that_were_cleared_do_not_come_back_when_the_database_is_lost(tmp_path: Path) -> None:
    filled(tmp_path)
    store = opened(tmp_path)
    store.delete_keyspace(b"k" * 16)
    put(store, 7)
    store.close()
    lose_database(tmp_path)
    store = opened(tmp_path)
    assert scanned(store) == {7}
    store.close()


@pytest.mark.parametrize(
    ("name", "harm"),
    [("start", "noise"), ("start", "emptied"), ("start", "removed"), ("*.cleared", "noise"), ("*.cleared", "emptied")],
)
@pytest.mark.slow
def test_cleared_pages_stay_gone_when_a_file_beside_the_pages_is_damaged_too(
    tmp_path: Path, name: str, harm: str
) -> None:
    filled(tmp_path)
    store = opened(tmp_path)
    store.delete_keyspace(b"k" * 16)
    store.close()
    for path in (tmp_path / "extents").glob(name):
        HARMS[harm](path)
    store = opened(tmp_path)
    put(store, 7)
    store.close()
    lose_database(tmp_path)
    store = opened(tmp_path)
    assert scanned(store) == ({7} if name == "start" else set())
    store.close()


def test_a_page_that_holds_the_likeness_of_another_is_not_taken_for_it(tmp_path: Path) -> None:
    """A tenant may write anything into its pages: blocks of another tenant, with all that lies behind them."""
    other = opened(tmp_path / "other")
    put(other, 5)
    other.close()
    blocks = next((tmp_path / "other" / "extents").glob("*.pages")).read_bytes()[: 60 * 4096]
    store = opened(tmp_path / "disk")
    store.put_batch(
        [PageWrite(key=PageKey(b"x" * 16, bytes(16), 0), page=memoryview(blocks), metadata=page_write(1).metadata)],
        lambda _, failure: None,
    )
    store.close()
    lose_database(tmp_path / "disk")
    store = opened(tmp_path / "disk")
    assert [found.key.keyspace for found in stored_pages(store)] == [b"x" * 16]
    store.close()


@pytest.mark.parametrize("harm", ["flipped in the middle", "cut", "emptied", "removed", "noise"])
@pytest.mark.slow
def test_a_damaged_file_of_pages_costs_the_pages_in_it(tmp_path: Path, harm: str) -> None:
    store = opened(tmp_path, capacity_bytes=220 << 20)
    for start in range(0, 600, 50):  # two files
        put(store, *range(start, start + 50))
    store.close()
    files = sorted((tmp_path / "extents").glob("*.pages"))
    assert len(files) == 2
    HARMS[harm](files[0])
    store = opened(tmp_path, capacity_bytes=220 << 20)

    def kept(number: int) -> bool:
        try:
            return get(store, number) == page(number)
        except PageCorrupt:
            return False

    survivors = {number for number in range(600) if kept(number)}
    in_first = (64 << 20) // (page_blocks(PAGE_BYTES) * BLOCK_BYTES)
    assert survivors >= set(range(in_first + 1, 600))
    if harm == "flipped in the middle":
        assert len(survivors) == 599
    store.delete_batch([key(number) for number in range(600) if number not in survivors])
    put(store, *range(600, 650))
    assert all(get(store, number) == page(number) for number in range(600, 650))
    store.close()


def test_a_fragmented_page_survives_as_any_other(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity_bytes=40 << 20)
    small = [page_write(number, b"x" * 9000) for number in range(1200)]
    failures: list[object] = []
    for start in range(0, 1200, 100):
        store.put_batch(small[start : start + 100], lambda _, failure: failures.append(failure))
    assert failures == [None] * 1200
    contiguous = ExtentBudget(40 << 20).block_count - 1200 * page_blocks(9000)
    assert 12 * page_blocks(PAGE_BYTES) > contiguous  # some have to be in pieces
    store.delete_batch([write.key for write in small[::2]])
    put(store, *range(2000, 2000 + 12))
    assert all(get(store, number) == page(number) for number in range(2000, 2012))
    store.close()
    store = opened(tmp_path, capacity_bytes=40 << 20)
    assert all(get(store, number) == page(number) for number in range(2000, 2012))
    assert len(scanned(store)) == 612
    store.close()
