"""Changes on disk land in the order that they were asked for, and what was refused for lack of room is done later."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import ParamSpec, TypeVar

import pytest
from prometheus_client import CollectorRegistry

from kvpool.core.clock import SystemClock
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import Overloaded, StoreFault
from kvpool.core.page import PageKey
from kvpool.core.tracing import NO_TRACER
from kvpool.testing import eventually
from kvpool.testing.page_store import MemoryPageStore
from kvpool_pagestore.core.disk_map import DiskMap
from kvpool_pagestore.core.events import PageEvents
from kvpool_pagestore.core.keyspaces import KeyspaceBook
from kvpool_pagestore.core.stored_pages import StoredPages
from kvpool_pagestore.engine.context import EngineContext, EngineTasks
from kvpool_pagestore.engine.disk_tier import DiskTier
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.ports import PageWrite, Workers
from kvpool_server.tasks import BoundedExecutor
from tests.fixtures.pagestore import KEYSPACE, PAGE_BYTES, SPEC, TENANT, page_key, sealed_page
from tests.fixtures.pagestore import metadata as page_metadata
from tests.fixtures.stored_pages import stored_pages

Change = tuple[PageKey, PageMetadata]
Memory = MemoryPageStore[StoredPages]
P = ParamSpec("P")
T = TypeVar("T")


class BusyWriters:
    """Workers whose queue is full for the first calls of one function."""

    def __init__(self, workers: Workers, function: Callable[..., object], refusals: int) -> None:
        self.threads = workers.threads
        self.refusals_left = refusals
        self._workers, self._function = workers, function

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if function == self._function and self.refusals_left:
            self.refusals_left -= 1
            raise Overloaded("the queue is full")
        return await self._workers.run(function, *args, **kwargs)


@asynccontextmanager
async def disk_with(
    memory: Memory, numbers: Sequence[int], wrap_writers: Callable[[Workers], Workers] = lambda workers: workers
) -> AsyncIterator[DiskTier]:
    """A tier on which these pages are."""
    keyspaces, events, clock, tasks = KeyspaceBook(), PageEvents(), SystemClock(), EngineTasks()
    keyspaces.admit(TENANT, KEYSPACE, SPEC)
    metrics = PageStoreMetrics(CollectorRegistry())
    context = EngineContext(clock=clock, tasks=tasks, events=events, metrics=metrics, tracer=NO_TRACER)
    disk_map = DiskMap(lambda key: PAGE_BYTES, events, clock.wall_us)
    workers = BoundedExecutor("disk", threads=2, queue_limit=1000)
    disk = DiskTier(memory, 1 << 30, disk_map, keyspaces, workers, wrap_writers(workers), context)
    await disk.load()
    pages = [
        PageWrite(key=key, page=memoryview(sealed_page(key)), metadata=page_metadata(number))
        for number in numbers
        for key in [page_key(number)]
    ]
    assert set((await disk.write(pages)).values()) == {None}
    yield disk
    await tasks.drain()
    await disk.close()
    await workers.close()


async def test_of_two_changes_of_a_page_the_later_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads write: the first change is held back on its one until the second has had its chance to overtake."""
    memory: Memory = MemoryPageStore(StoredPages.of)
    async with disk_with(memory, [1, 2]) as disk:
        true, begun, second = memory.set_metadata, list[list[Change]](), threading.Event()

        def slow_first(changes: Sequence[Change]) -> None:
            begun.append(list(changes))
            if len(begun) == 1:
                second.wait(0.2)
            true(changes)
            if len(begun) > 1:
                second.set()

        monkeypatch.setattr(memory, "set_metadata", slow_first)
        changes = [(page_key(1), replace(page_metadata(1), pinned_until_us=at)) for at in (1, 2, 3)]
        other = (page_key(2), replace(page_metadata(2), pinned_until_us=9))
        calls = [disk.set_metadata([one]) for one in changes[:1]]
        first = asyncio.gather(*calls)
        await eventually(lambda: bool(begun))
        await asyncio.gather(first, disk.set_metadata([changes[1], other]), disk.set_metadata([changes[2]]))
        kept = {found.key: found.metadata.pinned_until_us for found in stored_pages(memory)}
        assert kept == {page_key(1): 3, page_key(2): 9}
        assert len(begun) == 2, "what comes while one is written is written together"


async def test_a_change_that_fails_is_reported_to_its_caller_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory: Memory = MemoryPageStore(StoredPages.of)
    async with disk_with(memory, [1]) as disk:
        change = (page_key(1), replace(page_metadata(1), pinned_until_us=1))
        with monkeypatch.context() as patch:

            def failing(changes: object) -> None:
                raise StoreFault("the disk fails")

            patch.setattr(memory, "set_metadata", failing)
            with pytest.raises(StoreFault):
                await disk.set_metadata([change])
        await disk.set_metadata([change])
        await disk.set_metadata([(page_key(77), page_metadata(77))])


async def test_a_deletion_that_is_refused_while_too_much_waits_is_done_later() -> None:
    memory: Memory = MemoryPageStore(StoredPages.of)
    writers: list[BusyWriters] = []

    def busy(workers: Workers) -> Workers:
        writers.append(BusyWriters(workers, memory.delete_batch, refusals=2))
        return writers[-1]

    async with disk_with(memory, [1, 2], busy) as disk:
        disk.discard([page_key(1)])
        await eventually(lambda: [found.key for found in stored_pages(memory)] == [page_key(2)])
        assert writers[0].refusals_left == 0 and not disk.fault
