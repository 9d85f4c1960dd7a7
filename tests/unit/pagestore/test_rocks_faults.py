"""A disk that fails now and then: what is called durable is, no space is lost, and it goes on afterwards."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from rocksdict import WriteBatch

from kvpool.core.errors import KvPoolError, StoreFault
from kvpool_pagestore.adapters import page_store
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.adapters.rocks_database import RocksDatabase
from tests.fixtures.patience import PATIENCE_S
from tests.unit.pagestore.rocks_pages import PAGE_BYTES, get, key, opened, page, page_write, put, scanned


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def put_failing(store: RocksPageStore, *numbers: int) -> list[KvPoolError | None]:
    """Write pages; return the result of each, in order."""
    reported: list[KvPoolError | None] = []
    store.put_batch([page_write(number) for number in numbers], lambda _, failure: reported.append(failure))
    return reported


def test_a_failed_sync_fails_every_batch_that_it_may_concern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports lost writes once per open file: a user of a shared descriptor may miss it."""
    store = opened(tmp_path)
    put(store, 1)
    both, reported_of = threading.Barrier(2, timeout=PATIENCE_S), set[int]()

    def sync(descriptor: int) -> None:
        both.wait()
        if descriptor not in reported_of:
            reported_of.add(descriptor)
            raise OSError(errno.EIO, "Input/output error")

    reported: dict[int, list[KvPoolError | None]] = {}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", sync)
        threads = [
            threading.Thread(target=lambda number=number: reported.update({number: put_failing(store, number)}))
            for number in (2, 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [type(reported[number][0]) for number in (2, 3)] == [StoreFault, StoreFault]
    put(store, 3)
    assert scanned(store) == {1, 3}
    store.close()


def test_writes_that_fail_half_way_take_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, capacity_bytes=40 << 20)
    put(store, 1)
    before_bytes = store.used_bytes()
    pwritev = os.pwritev

    def full_after_one(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if bytes(buffers[0][:4]) != page(2)[:4]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwritev(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full_after_one)
        for _ in range(100):
            assert [type(failure) for failure in put_failing(store, 2, 3)] == [StoreFault, StoreFault]
    assert store.used_bytes() <= before_bytes + PAGE_BYTES // 2
    put(store, *range(2, 60))
    assert all(get(store, number) == page(number) for number in range(1, 60))
    store.close()


def test_writes_whose_records_cannot_be_synced_take_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, capacity_bytes=40 << 20)
    put(store, 1)

    def failing(_: RocksDatabase) -> None:
        raise StoreFault("the log cannot be synced")

    with monkeypatch.context() as patch:
        patch.setattr(RocksDatabase, "sync_log", failing)
        assert [type(failure) for failure in put_failing(store, *range(2, 60))] == [StoreFault] * 58
        assert scanned(store) == {1}
    put(store, *range(2, 60))
    put(store, *range(2, 20))
    assert all(get(store, number) == page(number) for number in range(1, 60))
    store.close()


def test_a_clear_whose_records_cannot_all_be_deleted_loses_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_store, "_FORGOTTEN_ROWS", 10)
    store = opened(tmp_path, capacity_bytes=40 << 20)
    count = next(at for at in range(1000) if put_failing(store, at) != [None])  # as many as there is room for
    write, left = RocksDatabase.write, [2]

    def failing(database: RocksDatabase, batch: WriteBatch, *, sync: bool) -> None:
        if not left[0]:
            raise StoreFault("the log cannot be written")
        left[0] -= 1
        write(database, batch, sync=sync)

    with monkeypatch.context() as patch:
        patch.setattr(RocksDatabase, "write", failing)
        with pytest.raises(StoreFault):
            store.delete_keyspace(key(0).keyspace)
    kept = scanned(store)
    assert len(kept) == count - 20
    put(store, *range(1000, 1020))
    assert all(get(store, number) == page(number) for number in (*kept, *range(1000, 1020)))
    store.close()


def test_a_transfer_that_ends_early_is_taken_up_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    pwritev, preadv = os.pwritev, os.preadv

    def some(buffers: Sequence[memoryview]) -> list[memoryview]:
        return [buffers[0][:8192]]

    monkeypatch.setattr(os, "pwritev", lambda descriptor, buffers, at: pwritev(descriptor, some(buffers), at))
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, at: preadv(descriptor, some(buffers), at))
    put(store, 1, 2)
    assert [get(store, number) for number in (1, 2)] == [page(1), page(2)]
    aligned = memoryview(mmap.mmap(-1, PAGE_BYTES))
    store.put_batch([page_write(3, page(3))], lambda _, failure: None)
    assert store.get_into(key(3), aligned) == PAGE_BYTES and bytes(aligned) == page(3)
    store.close()


def test_a_file_that_could_not_be_made_does_not_stand_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        assert isinstance(put_failing(store, 1)[0], StoreFault)
        assert list((tmp_path / "extents").glob("*.pages")) == []
    put(store, 1)
    assert get(store, 1) == page(1)
    store.close()


def test_the_names_of_new_directories_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    store = opened(tmp_path / "deep" / "tier")
    put(store, 1)
    store.close()
    parents = [tmp_path, tmp_path / "deep", tmp_path / "deep" / "tier", tmp_path / "deep" / "tier" / "extents"]
    assert {parent.stat().st_ino for parent in parents} <= set(synced)


def test_blocks_of_a_page_that_is_being_read_are_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, capacity_bytes=40 << 20)
    put(store, *range(70))
    begun, go_on, found = threading.Event(), threading.Event(), list[bytes | None]()
    preadv = os.preadv

    def slow(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    reader = threading.Thread(target=lambda: found.append(get(store, 7)))
    reader.start()
    assert begun.wait(PATIENCE_S)
    store.delete_batch([key(number) for number in range(70)])
    put(store, *range(100, 169))
    go_on.set()
    reader.join()
    assert found == [page(7)]
    store.delete_batch([key(number) for number in range(100, 169)])
    put(store, *range(200, 270))  # and then they are
    store.close()


def test_a_directory_that_cannot_be_measured_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)

    def failing(_: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing)
        with pytest.raises(StoreFault):
            store.used_bytes()
    store.close()
