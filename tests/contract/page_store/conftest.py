"""Every page store: the one on disk, the fake in memory, and that of the simulation."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from kvpool.core.errors import StoreFault
from kvpool.testing.page_store import MemoryPageStore
from kvpool_pagestore.adapters.page_store import RocksPageStore
from kvpool_pagestore.adapters.rocks_database import RocksDatabase
from kvpool_pagestore.core.stored_pages import StoredPages
from kvpool_pagestore.ports import PageStore
from tests.contract.page_store.pages import Reopen
from tests.sim.disk import SimDisk, SimPageStore


@pytest.fixture
def memory() -> MemoryPageStore[StoredPages]:
    return MemoryPageStore(StoredPages.of)


@pytest.fixture
def sim_disk() -> SimDisk:
    return SimDisk()


@pytest.fixture(params=["rocks", "memory", "simulated"])
def reopen(
    request: pytest.FixtureRequest, tmp_path: Path, memory: MemoryPageStore[StoredPages], sim_disk: SimDisk
) -> Iterator[Reopen]:
    opened: list[PageStore] = []

    def open_again() -> PageStore:
        while opened:
            opened.pop().close()
        store: PageStore = memory
        if request.param == "simulated":
            store = SimPageStore(sim_disk)
        elif request.param != "memory":
            store = RocksPageStore(tmp_path / "disk", 256 << 20)
        store.open()
        opened.append(store)
        return store

    yield open_again
    for store in opened:
        store.close()


@pytest.fixture
def reopen_without_index(request: pytest.FixtureRequest, tmp_path: Path, reopen: Reopen) -> Reopen:
    """Close the store, lose whatever names its pages apart from the pages, and open it again."""

    def open_again() -> PageStore:
        reopen().close()
        for path in (tmp_path / "disk").glob("*"):
            if path.is_file():
                path.unlink()
        return reopen()

    return open_again


@pytest.fixture
def store(reopen: Reopen) -> PageStore:
    return reopen()


def _no_sync(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def _no_write(*_: object, **__: object) -> None:
    raise StoreFault("the disk cannot be written")


@pytest.fixture(params=["sync", "records"])
def failing_disk(
    request: pytest.FixtureRequest,
    memory: MemoryPageStore[StoredPages],
    sim_disk: SimDisk,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], AbstractContextManager[None]]:
    """While it lasts, no write of any store becomes durable: page bytes cannot be synced, or records not be written."""

    @contextmanager
    def failing() -> Iterator[None]:
        memory.fault = StoreFault("the disk is gone")
        sim_disk.fault_share = 1.0
        with monkeypatch.context() as patch:
            if request.param == "sync":
                patch.setattr(os, "fdatasync", _no_sync)
                patch.setattr(os, "fsync", _no_sync)
            else:
                patch.setattr(RocksDatabase, "write", _no_write)
            yield
        memory.fault = None
        sim_disk.fault_share = 0.0

    return failing
