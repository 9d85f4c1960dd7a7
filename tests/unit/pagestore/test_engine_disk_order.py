"""Changes on disk land in the order that they were asked for, and what was refused for lack of room is done later."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError, Overloaded, StoreFault
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from kvpool_pagestore.engine.disk_tier import DiskTier
from tests.fixtures.pagestore import TENANT, Running, new_world, page_key, running_engine
from tests.fixtures.pagestore import metadata as page_metadata
from tests.fixtures.pagestore_calls import open_session, store
from tests.fixtures.stored_pages import stored_pages

Change = tuple[PageKey, PageMetadata]


async def disk_with(running: Running, numbers: Sequence[int]) -> DiskTier:
    await store(running, await open_session(running), numbers)
    await running.engine.flush(TENANT, b"")
    assert running.engine._disk is not None
    return running.engine._disk


async def test_of_two_changes_of_a_page_the_later_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads write: the first change is held back on its one until the second has had its chance to overtake."""
    with new_world() as world:
        async with running_engine(world) as running:
            disk = await disk_with(running, [1, 2])
            true, begun, second = world.memory.set_metadata, list[list[Change]](), threading.Event()

            def slow_first(changes: Sequence[Change]) -> None:
                begun.append(list(changes))
                if len(begun) == 1:
                    second.wait(0.2)
                true(changes)
                if len(begun) > 1:
                    second.set()

            monkeypatch.setattr(world.memory, "set_metadata", slow_first)
            changes = [(page_key(1), replace(page_metadata(1), pinned_until_us=at)) for at in (1, 2, 3)]
            other = (page_key(2), replace(page_metadata(2), pinned_until_us=9))
            calls = [disk.set_metadata([one]) for one in changes[:1]]
            first = asyncio.gather(*calls)
            await eventually(lambda: bool(begun))
            await asyncio.gather(first, disk.set_metadata([changes[1], other]), disk.set_metadata([changes[2]]))
            kept = {found.key: found.metadata.pinned_until_us for found in stored_pages(world.memory)}
            assert kept == {page_key(1): 3, page_key(2): 9}
            assert len(begun) == 2, "what comes while one is written is written together"


async def test_a_change_that_fails_is_reported_to_its_caller_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            disk = await disk_with(running, [1])
            change = (page_key(1), replace(page_metadata(1), pinned_until_us=1))
            with monkeypatch.context() as patch:

                def failing(changes: object) -> None:
                    raise StoreFault("the disk fails")

                patch.setattr(world.memory, "set_metadata", failing)
                with pytest.raises(StoreFault):
                    await disk.set_metadata([change])
            await disk.set_metadata([change])
            await disk.set_metadata([(page_key(77), page_metadata(77))])


async def test_a_deletion_that_is_refused_while_too_much_waits_is_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            disk = await disk_with(running, [1, 2])
            true, refusals = disk._writers.run, list[KvPoolError]()

            async def busy(function: Any, *args: Any) -> Any:
                if function == world.memory.delete_batch and len(refusals) < 2:
                    refusals.append(Overloaded("the queue is full"))
                    raise refusals[-1]
                return await true(function, *args)

            monkeypatch.setattr(disk._writers, "run", busy)
            disk.discard([page_key(1)])
            await eventually(lambda: [found.key for found in stored_pages(world.memory)] == [page_key(2)])
            assert len(refusals) == 2 and not disk.fault
