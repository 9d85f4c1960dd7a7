"""Room on disk: what is given up for new pages, when that is not enough, and what must not be given up twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvpool.core.errors import QuotaExceeded
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey
from kvpool.core.retention import PINNED_FOREVER_US
from kvpool.testing import eventually
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.slots import PageRecord
from tests.fixtures.pagestore import (
    KEYSPACE,
    PAGE_BYTES,
    TENANT,
    Running,
    World,
    fill_page,
    metadata,
    new_world,
    page_key,
    running_engine,
)
from tests.fixtures.pagestore_calls import acquire_one, open_session, store, wanted
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stored_pages import stored_pages

FOUR_PAGES = {"disk_bytes": 4 * PAGE_BYTES, "max_pinned_share": 1.0}


def stored(world: World) -> set[int]:
    return {page.metadata.chunk_index for page in stored_pages(world.memory)}


async def pin(running: Running, numbers: Sequence[int]) -> None:
    hashes = [page_key(number).chunk_hash for number in numbers]
    await running.engine.retention.pin(TENANT, KEYSPACE, hashes, PINNED_FOREVER_US)


async def test_a_page_that_is_written_again_outlives_the_deletion_that_made_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with new_world() as world:
        delete_batch, calls, go = world.memory.delete_batch, list[Sequence[PageKey]](), threading.Event()

        def slow(keys: Sequence[PageKey]) -> None:
            calls.append(keys)
            if len(calls) == 1:
                assert go.wait(PATIENCE_S)
            delete_batch(keys)

        monkeypatch.setattr(world.memory, "delete_batch", slow)
        async with running_engine(world, **FOUR_PAGES) as running:
            engine, peer = running.engine, await open_session(running)
            await store(running, peer, [1, 2, 3, 4])
            await engine.flush(TENANT, b"")
            await store(running, peer, [20])
            await eventually(lambda: calls)
            ((given_up,),) = calls
            number = int.from_bytes(given_up.chunk_hash[:8], "big")
            read = (await acquire_one(running, peer, wanted(number))).grant
            assert read is not None
            engine.pages.release(peer, [], corrupt_ids=[read.lease_id])
            await store(running, peer, [number])
            try:
                with pytest.raises(AssertionError):
                    await eventually(lambda: world.index.shards(number, Tier.DISK), deadline_s=0.2)
            finally:
                go.set()
            await engine.flush(TENANT, b"")
            assert {number, 20} <= stored(world)


@pytest.mark.parametrize("batch_pages", [1, 64])
async def test_what_pins_leave_is_filled_and_never_exceeded(batch_pages: int) -> None:
    # A retry of the refused page would give up the other new one, and be half done when the pages are counted.
    never = {"linger_ms": 60_000, "write_retry_ms": 60_000, "write_retry_max_ms": 60_000}
    with new_world() as world:
        async with running_engine(world, **FOUR_PAGES, **never, batch_pages=batch_pages) as running:
            peer = await open_session(running)
            await store(running, peer, [1, 2, 3])
            await running.engine.flush(TENANT, b"")
            await pin(running, [1, 2, 3])
            await store(running, peer, [20, 40])
            await running.engine.flush(TENANT, b"")
            assert running.engine.gauges().disk_pages == 4
            assert {1, 2, 3} < stored(world) and len(stored(world)) == 4


async def test_a_tier_full_of_pins_refuses_and_serves_on() -> None:
    with new_world() as world:
        async with running_engine(world, **FOUR_PAGES, write_policy="write-through", drain_ms=100) as running:
            peer = await open_session(running)
            await store(running, peer, [1, 2, 3, 4])
            await pin(running, [1, 2, 3, 4])
            (error,) = await store(running, peer, [20])
            assert isinstance(error, QuotaExceeded)
            assert not running.engine.disk_fault
            assert (await acquire_one(running, peer, wanted(20))).grant is not None
        async with running_engine(world, disk_bytes=2 * PAGE_BYTES) as running:
            assert running.engine.gauges().disk_pages == 2, "a budget is hard, pins or not"
            assert len(stored(world)) == 2


async def test_pins_that_end_first_go_first_when_the_tier_shrinks() -> None:
    with new_world() as world:
        async with running_engine(world, **FOUR_PAGES) as running:
            peer = await open_session(running)
            for number, pinned_until_us in ((1, 1 << 61), (20, 1 << 62), (40, 1 << 60)):
                kept = replace(metadata(number), pinned_until_us=pinned_until_us)
                (answer,) = await running.engine.pages.reserve(
                    peer, [PageRecord(key=page_key(number), page_bytes=PAGE_BYTES, metadata=kept)]
                )
                assert isinstance(answer, Grant)
                fill_page(running.engine.pages.view(answer), page_key(number))
                assert await running.engine.pages.commit(peer, [answer.lease_id]) == [None]
            await store(running, peer, [60])
            await running.engine.flush(TENANT, b"")
        async with running_engine(world, disk_bytes=2 * PAGE_BYTES):
            assert stored(world) == {1, 20}
