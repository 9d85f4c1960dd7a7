"""The disk tier puts itself in order: at its start, and after faults."""

from __future__ import annotations

import threading

import pytest

from kvpool.core.errors import KvPoolError, StoreFault
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from kvpool_pagestore.engine import disk_tier
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.ports import PageWrite
from tests.fixtures.pagestore import (
    KEYSPACE,
    PAGE_BYTES,
    TENANT,
    Running,
    World,
    new_world,
    page_key,
    running_engine,
)
from tests.fixtures.pagestore import metadata as page_metadata
from tests.fixtures.pagestore_calls import acquire_one, open_session, store, wanted
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stored_pages import stored_pages


async def test_a_smaller_budget_is_kept_from_the_start() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            peer = await open_session(running)
            for number in range(4):
                await store(running, peer, [number])
                await running.engine.flush(TENANT, b"")
        async with running_engine(world, disk_bytes=2 * PAGE_BYTES) as running:
            assert running.engine.gauges().disk_used_bytes == 2 * PAGE_BYTES
            assert running.engine.gauges().disk_pages == 2


async def test_pages_that_no_request_can_name_are_dropped() -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), [1])
            await running.engine.flush(TENANT, b"")
        strange = [
            page_key(2, keyspace=b"?" * 16),  # a keyspace that is not remembered
            page_key(3),  # a page of another size
            PageKey(KEYSPACE, bytes(16), 63),  # a shard that its grid does not have
        ]
        failures: list[KvPoolError | None] = []
        writes = [PageWrite(key=key, page=memoryview(b"x"), metadata=page_metadata(3)) for key in strange]
        world.memory.put_batch(writes, lambda _, failure: failures.append(failure))
        assert failures == [None] * 3
        async with running_engine(world) as running:
            assert [found.key for found in stored_pages(world.memory)] == [page_key(1)]
            assert running.engine.gauges().disk_pages == 1


async def test_pages_whose_deletion_failed_are_deleted_when_the_disk_is_well_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with new_world() as world:
        async with running_engine(world, disk_bytes=2 * PAGE_BYTES) as running:
            engine, peer = running.engine, await open_session(running)
            for number in (0, 16):  # chains of one page each
                await store(running, peer, [number])
                await engine.flush(TENANT, b"")
            with monkeypatch.context() as patch:

                def failing(_: object) -> None:
                    raise StoreFault("the disk fails")

                patch.setattr(world.memory, "delete_batch", failing)
                await store(running, peer, [32])  # needs the room of page 0
                await eventually(lambda: engine.disk_fault)
            await eventually(lambda: not engine.disk_fault)
            await engine.flush(TENANT, b"")
            await eventually(
                lambda: {found.key for found in stored_pages(world.memory)} == {page_key(16), page_key(32)}
            )
            assert engine.gauges().disk_pages == 2


async def test_a_page_that_can_never_be_read_does_not_take_the_tier_down_permanently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with new_world() as world:
        async with running_engine(world) as running:
            await store(running, await open_session(running), [1, 2])
            await running.engine.flush(TENANT, b"")
        get_into = world.memory.get_into

        def bad_sector(key: PageKey, destination: memoryview) -> int | None:
            if key == page_key(1):
                raise StoreFault("Input/output error")
            return get_into(key, destination)

        monkeypatch.setattr(world.memory, "get_into", bad_sector)
        async with running_engine(world) as running:
            engine, peer = running.engine, await open_session(running)
            for _ in range(2):
                missed = await acquire_one(running, peer, wanted(1))
                assert isinstance(missed.error, StoreFault)
                await eventually(lambda: not engine.disk_fault)
            gone = await acquire_one(running, peer, wanted(1))
            assert gone.grant is None and gone.error is None and not engine.disk_fault
            assert (await acquire_one(running, peer, wanted(2))).grant is not None
            await eventually(lambda: [found.key for found in stored_pages(world.memory)] == [page_key(2)])


class CountedFiles:
    """What a store's files take, each time that they are counted. held: the next count waits for it."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts = list[int]()
        self.held: threading.Event | None = None
        self.failure: StoreFault | None = None
        self._count, self.at_once, self.most_at_once = world.memory.used_bytes, 0, 0
        monkeypatch.setattr(world.memory, "used_bytes", self._counted)

    def _counted(self) -> int:
        found, (held, self.held), (failure, self.failure) = self._count(), (self.held, None), (self.failure, None)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if held is not None:
            assert held.wait(PATIENCE_S)
        self.at_once -= 1
        if failure is not None:
            raise failure
        self.counts.append(found)
        return found


async def write(running: Running, peer: PeerSession, *numbers: int) -> None:
    for number in numbers:
        await store(running, peer, [number])
        await running.engine.flush(TENANT, b"")


async def test_the_files_are_counted_once_a_second_however_much_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        files = CountedFiles(world, monkeypatch)
        async with running_engine(world) as running:
            engine, peer = running.engine, await open_session(running)
            monkeypatch.setattr(disk_tier, "_COUNTED_EVERY_S", 3600.0)
            await write(running, peer, *range(5))
            assert engine.gauges().disk_used_bytes == 0
            assert files.counts == [0]
            monkeypatch.setattr(disk_tier, "_COUNTED_EVERY_S", 0.0)
            await eventually(lambda: engine.gauges().disk_used_bytes == 5 * PAGE_BYTES)
            assert files.counts == [0, 5 * PAGE_BYTES], "nothing has changed since"


async def test_a_count_that_failed_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        files = CountedFiles(world, monkeypatch)
        monkeypatch.setattr(disk_tier, "_COUNTED_EVERY_S", 0.0)
        async with running_engine(world) as running:
            files.failure = StoreFault("EIO")
            await write(running, await open_session(running), 0)
            await eventually(lambda: running.engine.gauges().disk_used_bytes == PAGE_BYTES)


async def test_a_count_that_takes_long_is_no_reason_for_another_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        files = CountedFiles(world, monkeypatch)
        monkeypatch.setattr(disk_tier, "_COUNTED_EVERY_S", 0.0)
        async with running_engine(world) as running:
            engine, peer = running.engine, await open_session(running)
            files.held = held = threading.Event()
            await write(running, peer, 0)
            await eventually(lambda: files.at_once == 1)
            await write(running, peer, 1)
            engine.gauges()
            held.set()
            await eventually(lambda: engine.gauges().disk_used_bytes == 2 * PAGE_BYTES)
            assert files.most_at_once == 1
