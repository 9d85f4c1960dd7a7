"""Slow work of the disk tier on extents, and who does not wait for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.core.errors import KvPoolError
from kvpool_pagestore.adapters.extents import ExtentFiles
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.core import extents
from kvpool_pagestore.ports import PageWrite
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stored_pages import stored_pages
from tests.unit.pagestore.rocks_pages import get, key, opened, page, page_write, put, scanned


class Gate:
    """Where a thread waits until it may go on."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(PATIENCE_S)


@contextmanager
def running(gate: Gate, work: Callable[[], None]) -> Iterator[None]:
    """While `work` waits at the gate."""
    thread = threading.Thread(target=work)
    thread.start()
    assert gate.reached.wait(PATIENCE_S)
    try:
        yield
    finally:
        gate.open.set()
        thread.join()


def test_no_write_waits_for_a_file_that_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "_FILE_BYTES_MIN", 4 << 20)
    store, gate = opened(tmp_path, capacity_bytes=60 << 20), Gate()
    put(store, 1, 2)
    posix_fallocate = os.posix_fallocate

    def slow(descriptor: int, offset: int, size_bytes: int) -> None:
        gate()
        posix_fallocate(descriptor, offset, size_bytes)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    many = range(100, 100 + (4 << 20) // len(page(0)))  # more than the first file has room for
    with running(gate, lambda: put(store, *many)):
        assert get(store, 1) == page(1)
        put(store, 3)
        store.delete_batch([key(2)])
        store.set_metadata([(key(1), replace(page_write(1).metadata, priority=5))])
    assert scanned(store) == {1, 3, *many}
    assert all(get(store, number) == page(number) for number in (1, 3, *many[:3]))
    store.close()


def small(keyspace: bytes, number: int) -> PageWrite:
    write = page_write(number, b"small")
    return replace(write, key=write.key._replace(keyspace=keyspace))


def put_small(store: RocksPageStore, keyspace: bytes, count: int) -> None:
    failures: list[KvPoolError | None] = []
    store.put_batch([small(keyspace, number) for number in range(count)], lambda _, failure: failures.append(failure))
    assert failures == [None] * count


def test_a_keyspace_is_cleared_while_others_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate = opened(tmp_path, capacity_bytes=28 << 20), Gate()
    mine, other = b"m" * 16, b"o" * 16
    put_small(store, mine, 300)
    keep = ExtentFiles.keep

    def slow(self: ExtentFiles, name: str, content: bytes) -> None:
        gate()
        keep(self, name, content)

    monkeypatch.setattr(ExtentFiles, "keep", slow)
    with running(gate, lambda: store.delete_keyspace(mine)):
        put_small(store, other, 10)
    assert {found.key.keyspace for found in stored_pages(store)} == {other}
    for _ in range(4):  # a thousand blocks are there
        put_small(store, mine, 300)
        store.delete_keyspace(mine)
    store.close()
    store = opened(tmp_path, capacity_bytes=28 << 20)
    assert len(stored_pages(store)) == 10
    store.close()
