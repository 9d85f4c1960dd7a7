"""What a disk tier is good for while it fails: read-only or off, said so, and well again by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvpool.core.errors import KvPoolError, StoreFault
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from kvpool_pagestore.engine.disk_upkeep import DiskState
from kvpool_pagestore.engine.fetch import Source
from kvpool_pagestore.ports import PageWrite
from tests.fixtures.pagestore import PAGE_BYTES, TENANT, World, new_world, page_key, running_engine
from tests.fixtures.pagestore_calls import acquire_one, open_session, store, wanted


async def stored(world: World, numbers: Sequence[int]) -> None:
    """These pages are on disk, and their engine has ended."""
    async with running_engine(world) as running:
        await store(running, await open_session(running), list(numbers))
        await running.engine.flush(TENANT, b"")


def full(pages: Sequence[PageWrite], on_durable: Callable[[PageKey, KvPoolError | None], None]) -> None:
    for page in pages:
        on_durable(page.key, StoreFault("no space left"))


def failing(*_: object) -> None:
    raise StoreFault("no space left")


async def test_a_full_disk_is_read_only_and_loses_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        await stored(world, range(1, 5))
        async with running_engine(world) as running:
            engine, peer = running.engine, await open_session(running)
            with monkeypatch.context() as patch:
                patch.setattr(world.memory, "put_batch", full)
                patch.setattr(world.memory, "probe", failing)
                await store(running, peer, [9])
                await eventually(lambda: engine.disk_fault)
                assert engine.gauges().disk_state == DiskState.READ_ONLY and engine.gauges().disk_faulty == 1
                assert "no space left" in engine.disk_fault
                for number in range(1, 5):
                    assert (await acquire_one(running, peer, wanted(number))).source is Source.DISK
                assert (await acquire_one(running, peer, wanted(9))).source is Source.STAGING
                assert engine.gauges().disk_pages == 4
            await eventually(lambda: not engine.disk_fault)
            assert engine.gauges().disk_state == DiskState.READ_WRITE
            await engine.flush(TENANT, b"")
            assert engine.gauges().disk_pages == 5


async def test_a_full_disk_does_not_flood_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with new_world() as world:
        monkeypatch.setattr(world.memory, "put_batch", full)
        monkeypatch.setattr(world.memory, "probe", failing)
        async with running_engine(world) as running:
            peer = await open_session(running)
            for number in range(30):
                await store(running, peer, [number])
            await eventually(lambda: running.metric("written_pages_total", outcome="failed") >= 30)
            reported = [text for text in caplog.messages if "not durable yet" in text]
            assert len(reported) == 1 and "no space left" in reported[0]


async def test_a_shutdown_tries_few_times_to_write_what_the_disk_tier_has_no_room_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with new_world() as world:
        async with running_engine(world, disk_bytes=0) as running:
            peer = await open_session(running)
            await store(running, peer, [1, 2, 3])
        assert running.metric("written_pages_total", outcome="failed") <= 3 * 100, "it goes on as long as there is time"
        assert any("3 pages are lost with this process" in text for text in caplog.messages)


async def test_a_read_only_tier_gives_up_no_pages_for_what_it_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        await stored(world, [1, 2])
        async with running_engine(world, disk_bytes=world.memory.used_bytes() + PAGE_BYTES) as running:
            engine, peer = running.engine, await open_session(running)
            monkeypatch.setattr(world.memory, "probe", failing)
            with monkeypatch.context() as patch:
                patch.setattr(world.memory, "put_batch", full)
                await store(running, peer, [8])  # nothing has to go for it
                await eventually(lambda: engine.disk_fault)
            await store(running, peer, [9, 10])
            with pytest.raises(StoreFault):
                await engine.flush(TENANT, b"")
            assert engine.gauges().disk_pages == 2


async def test_a_disk_that_fails_at_every_read_is_off_until_it_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        await stored(world, range(1, 9))
        async with running_engine(world) as running:
            engine, peer = running.engine, await open_session(running)
            with monkeypatch.context() as patch:
                patch.setattr(world.memory, "get_into", failing)
                patch.setattr(world.memory, "probe", failing)
                for number in range(1, 4):
                    missed = await acquire_one(running, peer, wanted(number))
                    assert isinstance(missed.error, StoreFault)
                assert engine.gauges().disk_state == DiskState.OFF
                gone = await acquire_one(running, peer, wanted(4))  # a plain miss: a dead disk is not waited for
                assert gone.grant is None and gone.error is None
            await eventually(lambda: not engine.disk_fault)
            assert (await acquire_one(running, peer, wanted(4))).source is Source.DISK


async def test_bad_sectors_here_and_there_do_not_end_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        await stored(world, range(1, 13))
        get_into, bad = world.memory.get_into, {page_key(number).chunk_hash for number in range(1, 13, 2)}

        def some(key: PageKey, destination: memoryview) -> int | None:
            if key.chunk_hash in bad:
                raise StoreFault("Input/output error")
            return get_into(key, destination)

        monkeypatch.setattr(world.memory, "get_into", some)
        async with running_engine(world) as running:
            peer = await open_session(running)
            for number in range(1, 13):
                answer = await acquire_one(running, peer, wanted(number))
                assert isinstance(answer.error, StoreFault) if number % 2 else answer.source is Source.DISK
            assert running.engine.gauges().disk_state == DiskState.READ_WRITE
