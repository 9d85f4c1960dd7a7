"""A disk that fails now and then: what is called durable is, no space is lost, and it goes on afterwards."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool.core.errors import KvPoolError, StoreFault
from kvpool_pagestore.adapters.rocks import RocksPageStore
from tests.unit.pagestore.rocks_pages import PAGE_BYTES, VOLUME_BYTES, get, key, opened, page, page_write, put, scanned


@pytest.fixture(params=["files", "tables"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def put_failing(store: RocksPageStore, *numbers: int) -> list[KvPoolError | None]:
    """What each page was told, in order."""
    told: list[KvPoolError | None] = []
    store.put_batch([page_write(number) for number in numbers], lambda _, failure: told.append(failure))
    return told


def test_a_failed_sync_fails_every_batch_that_it_may_concern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of lost writes once per open file: whoever shares a descriptor with another may miss it."""
    store = opened(tmp_path, "files")
    put(store, 1)
    both, told_of = threading.Barrier(2, timeout=10), set[int]()

    def sync(descriptor: int) -> None:
        both.wait()
        if descriptor not in told_of:
            told_of.add(descriptor)
            raise OSError(errno.EIO, "Input/output error")

    told: dict[int, list[KvPoolError | None]] = {}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", sync)
        threads = [
            threading.Thread(target=lambda number=number: told.update({number: put_failing(store, number)}))
            for number in (2, 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [type(told[number][0]) for number in (2, 3)] == [StoreFault, StoreFault]
    put(store, 3)
    assert scanned(store) == {1, 3}
    store.close()


def test_writes_that_fail_half_way_take_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, "files")
    put(store, 1)
    before_bytes = store.used_bytes()
    pwrite = os.pwrite

    def full_after_one(descriptor: int, data: memoryview, offset: int) -> int:
        if bytes(data[:4]) != page(2)[:4]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_after_one)
        for _ in range(5):
            assert [type(failure) for failure in put_failing(store, 2, 3)] == [StoreFault, StoreFault]
    assert store.used_bytes() <= before_bytes + PAGE_BYTES // 2
    put(store, 2, 3)
    assert [get(store, number) for number in (1, 2, 3)] == [page(1), page(2), page(3)]
    store.close()


def test_a_volume_that_could_not_be_made_does_not_stand_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, "files")

    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)  # of the directory, once the file is there
        assert isinstance(put_failing(store, 1)[0], StoreFault)
    put(store, 1)
    assert get(store, 1) == page(1)
    assert len(list((tmp_path / "volumes").iterdir())) == 1
    store.close()


def test_the_names_of_new_directories_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    store = opened(tmp_path / "deep" / "tier", "files")
    put(store, 1)
    store.close()
    parents = [tmp_path, tmp_path / "deep", tmp_path / "deep" / "tier", tmp_path / "deep" / "tier" / "volumes"]
    assert {parent.stat().st_ino for parent in parents} <= set(synced)


def test_a_page_that_cannot_be_read_does_not_hold_the_space_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, "files")
    put(store, 0, 1, 2, 3, 4, 5)  # one volume, in which page 0 lies on a bad sector
    preadv = os.preadv

    def bad_sector(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 0:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", bad_sector)
    for start in range(6, 60, 6):
        put(store, *range(start, start + 6))
    kept = set(range(4, 60, 6)) - {4}
    store.delete_batch([key(number) for number in range(1, 60) if number not in kept])
    assert store.used_bytes() < len(kept) * PAGE_BYTES + 3 * VOLUME_BYTES
    monkeypatch.undo()
    assert scanned(store) == kept
    assert all(get(store, number) == page(number) for number in kept)
    store.close()


def test_space_that_was_dead_when_the_process_ended_comes_back_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    store = opened(tmp_path, way)
    for start in range(0, 60, 6):
        put(store, *range(start, start + 6))
    with monkeypatch.context() as patch:
        patch.setattr(RocksPageStore, "_reclaim", lambda _: None)
        store.delete_batch([key(number) for number in range(60)])
    store.close()
    store = opened(tmp_path, way)
    assert store.used_bytes() < 3 * VOLUME_BYTES
    store.close()


def test_a_directory_that_cannot_be_measured_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, "files")

    def failing(_: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing)
        with pytest.raises(StoreFault):
            store.used_bytes()
    store.close()
