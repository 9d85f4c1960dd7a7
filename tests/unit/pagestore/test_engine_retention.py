"""Retention in a running engine: time to live, pins, and later stores that want more; over restarts too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import ParamSpec, TypeVar

import pytest

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import InvalidRequest, QuotaExceeded, SessionUnknown, StoreFault
from kvpool.core.outcome import Admission, Tier
from kvpool.core.page import PageKey, page_bytes
from kvpool.core.payload import payload_bytes
from kvpool.core.policy import KeyspacePolicy, VersionedPolicy
from kvpool.core.retention import PINNED_FOREVER_US, Retention
from kvpool.testing import ManualClock, eventually
from kvpool_pagestore.core.page_table import Grant, PageTable
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.engine.pages import ReserveAnswer
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.ports import Workers
from tests.fixtures.pagestore import (
    GRID,
    KEYSPACE,
    PAGE_BYTES,
    SPEC,
    TENANT,
    Running,
    World,
    fill_page,
    metadata,
    new_world,
    page_key,
    page_span,
    running_engine,
)
from tests.fixtures.pagestore_calls import acquire_one, open_session, wanted
from tests.fixtures.stored_pages import stored_pages

P = ParamSpec("P")
T = TypeVar("T")
HASHES = [page_key(number).chunk_hash for number in range(16)]


async def reserve(running: Running, peer: PeerSession, number: int, shard: int = 0, **retention: int) -> ReserveAnswer:
    kept = replace(metadata(number), **retention)  # type: ignore[arg-type]
    size_bytes = page_bytes(payload_bytes(SPEC, GRID, shard))
    item = PageRecord(key=page_key(number, shard), page_bytes=size_bytes, metadata=kept)
    (answer,) = await running.engine.pages.reserve(peer, [item])
    return answer


async def put(running: Running, peer: PeerSession, number: int, shard: int = 0, **retention: int) -> None:
    answer = await reserve(running, peer, number, shard, **retention)
    assert isinstance(answer, Grant), answer
    fill_page(running.engine.pages.view(answer), page_key(number, shard))
    assert await running.engine.pages.commit(peer, [answer.lease_id]) == [None]


def on_disk(world: World) -> dict[int, PageMetadata]:
    return {page.metadata.chunk_index: page.metadata for page in stored_pages(world.memory)}


@asynccontextmanager
async def engine_at(world: World, **changes: object) -> AsyncIterator[tuple[Running, PeerSession, ManualClock]]:
    clock = world.clock
    assert isinstance(clock, ManualClock)
    async with running_engine(world, **changes) as running:
        yield running, await open_session(running), clock


async def test_an_expired_page_is_a_miss_everywhere_and_removed_from_the_index() -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world) as (running, peer, clock):
            await put(running, peer, 1, ttl_ms=1000)
            await put(running, peer, 2)
            await running.engine.flush(TENANT, b"")
            assert world.index.shards(1, Tier.DISK) == world.index.shards(1, Tier.STAGING) == 1
            clock.advance(1.0)
            assert (await acquire_one(running, peer, wanted(1))).grant is None
            assert (await acquire_one(running, peer, wanted(2))).grant is not None
            await eventually(lambda: set(on_disk(world)) == {2})
            assert world.index.shards(1, Tier.DISK) == world.index.shards(1, Tier.STAGING) == 0


async def test_a_sweep_forgets_what_is_never_requested() -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world) as (running, peer, clock):
            await put(running, peer, 1, ttl_ms=1000)
            await running.engine.flush(TENANT, b"")
            assert running.engine.retention.sweep() == 0
            clock.advance(1.0)
            assert running.engine.retention.sweep() == 1
            await eventually(lambda: not on_disk(world))
            assert running.engine.gauges().staging_pages == 0
            assert running.metric("expired_pages_total") == 1


async def test_the_end_of_a_page_holds_over_a_restart() -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world) as (running, peer, _):
            await put(running, peer, 1, ttl_ms=1000)
            await running.engine.flush(TENANT, b"")
        async with engine_at(world) as (running, peer, clock):
            assert (await acquire_one(running, peer, wanted(1))).grant is not None
            clock.advance(1.0)
            assert running.engine.retention.sweep() == 1


async def test_an_expired_page_may_be_stored_again() -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world) as (running, peer, clock):
            await put(running, peer, 1, ttl_ms=1000)
            await running.engine.flush(TENANT, b"")
            clock.advance(1.0)
            await put(running, peer, 1, ttl_ms=1000)
            clock.advance(0.5)
            assert (await acquire_one(running, peer, wanted(1))).grant is not None


@pytest.mark.parametrize("durable", [True, False])
async def test_a_later_store_that_wants_more_prolongs_the_page_durably(durable: bool) -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world, linger_ms=1 if durable else 60_000) as (running, peer, clock):
            await put(running, peer, 1, ttl_ms=1000)
            if durable:
                await running.engine.flush(TENANT, b"")
            before_us = clock.wall_us()
            assert await reserve(running, peer, 1, ttl_ms=9000, priority=5) is Admission.EXISTS
            assert await reserve(running, peer, 1, ttl_ms=10, priority=-5) is Admission.EXISTS, "shortens nothing"
            await running.engine.flush(TENANT, b"")
            kept = on_disk(world)[1]
            assert (kept.expires_us, kept.priority) == (before_us + 9_000_000, 5)
            clock.advance(1.0)
            assert (await acquire_one(running, peer, wanted(1))).grant is not None


async def test_the_default_retention_of_a_keyspace_is_that_of_pages_which_say_nothing() -> None:
    with new_world(clock=ManualClock()) as world:
        policy = KeyspacePolicy(retention=Retention(ttl_ms=1000, priority=3))
        world.index.policies[KEYSPACE] = VersionedPolicy(keyspace=KEYSPACE, policy=policy, version=1)
        async with engine_at(world) as (running, peer, clock):
            await put(running, peer, 1)
            await put(running, peer, 2, ttl_ms=5000)
            await running.engine.flush(TENANT, b"")
            assert [on_disk(world)[number].priority for number in (1, 2)] == [3, 0]
            clock.advance(1.0)
            assert running.engine.retention.sweep() == 1


async def test_pins_are_kept_on_disk_for_durable_pages_and_taken_along_by_others() -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world) as (running, peer, clock):
            until_us = clock.wall_us() + 1_000_000
            both_bytes = sum(page_bytes(payload_bytes(SPEC, GRID, shard)) for shard in (0, 1))
            await put(running, peer, 1)
            await put(running, peer, 1, shard=1)
            await running.engine.flush(TENANT, b"")
            assert await running.engine.retention.pin(TENANT, KEYSPACE, HASHES[1:3], until_us) == 2
            assert {page.metadata.pinned_until_us for page in stored_pages(world.memory)} == {until_us}
            assert running.engine.gauges().pinned_bytes == both_bytes
        async with engine_at(world, linger_ms=60_000) as (running, peer, clock):
            assert running.engine.gauges().pinned_bytes == both_bytes
            await put(running, peer, 4)
            assert await running.engine.retention.pin(TENANT, KEYSPACE, [HASHES[4]], until_us) == 1
            await running.engine.flush(TENANT, b"")
            assert on_disk(world)[4].pinned_until_us == until_us
            assert await running.engine.retention.pin(TENANT, KEYSPACE, HASHES, 0) == 3
            assert {page.metadata.pinned_until_us for page in stored_pages(world.memory)} == {0}
            assert running.engine.gauges().pinned_bytes == 0


async def test_pins_end_by_themselves() -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world) as (running, peer, clock):
            await put(running, peer, 1, pinned_until_us=clock.wall_us() + 1_000_000)
            await put(running, peer, 2, pinned_until_us=PINNED_FOREVER_US)
            assert running.engine.gauges().pinned_bytes == 2 * PAGE_BYTES
            clock.advance(1.0)
            assert running.engine.gauges().pinned_bytes == PAGE_BYTES


async def test_more_than_a_share_of_the_tier_cannot_be_pinned() -> None:
    with new_world(clock=ManualClock()) as world:
        changes = {"disk_bytes": 64 << 20, "max_pinned_share": 2.5 * PAGE_BYTES / (64 << 20)}
        async with engine_at(world, **changes) as (running, peer, _):
            for number in range(4):
                await put(running, peer, number)
            with pytest.raises(QuotaExceeded, match="max_pinned_share"):
                await running.engine.retention.pin(TENANT, KEYSPACE, HASHES[:4], PINNED_FOREVER_US)
            assert running.engine.gauges().pinned_bytes == 0
            assert await running.engine.retention.pin(TENANT, KEYSPACE, HASHES[:2], PINNED_FOREVER_US) == 2
            assert isinstance(await reserve(running, peer, 9, pinned_until_us=PINNED_FOREVER_US), QuotaExceeded)
            assert isinstance(await reserve(running, peer, 3, pinned_until_us=PINNED_FOREVER_US), QuotaExceeded)


async def test_another_tenants_pages_cannot_be_pinned_and_do_not_show() -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world) as (running, peer, _):
            await put(running, peer, 1)
            assert await running.engine.retention.pin("other", KEYSPACE, HASHES, PINNED_FOREVER_US) == 0
            assert running.engine.gauges().pinned_bytes == 0


async def test_a_pin_that_cannot_be_kept_is_refused() -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world) as (running, peer, _):
            await put(running, peer, 1)
            await running.engine.flush(TENANT, b"")
            world.memory.fault = StoreFault("the disk is gone")
            with pytest.raises(StoreFault):
                await running.engine.retention.pin(TENANT, KEYSPACE, HASHES, PINNED_FOREVER_US)
            with pytest.raises(InvalidRequest, match="at most 4096"):
                await running.engine.retention.pin(TENANT, KEYSPACE, HASHES * 300, 0)
            world.memory.fault = None


async def test_a_page_that_expires_while_it_is_written_is_not_served() -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world) as (running, peer, clock):
            answer = await reserve(running, peer, 1, ttl_ms=1000)
            assert isinstance(answer, Grant)
            fill_page(running.engine.pages.view(answer), page_key(1))
            clock.advance(1.0)
            assert running.engine.retention.sweep() == 0, "it is nowhere yet"
            assert await running.engine.pages.commit(peer, [answer.lease_id]) == [None]
            assert (await acquire_one(running, peer, wanted(1))).grant is None


async def test_nothing_is_remembered_of_pages_that_have_gone() -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world, max_pinned_share=1.0) as (running, peer, _):
            retention = running.engine.retention
            for number in range(8):
                await put(running, peer, number, ttl_ms=10**9, pinned_until_us=1 << 60)
            refused = await reserve(running, peer, 8, ttl_ms=10**9, pinned_until_us=1 << 60)
            assert isinstance(refused, Grant)
            running.engine.pages.abort(peer, [refused.lease_id])
            await running.engine.flush(TENANT, b"")
            assert retention.pinned_bytes == 8 * PAGE_BYTES and len(retention._expiry) == 8
            assert await running.engine.clear(TENANT, b"") == 8
            assert retention.pinned_bytes == 0 and len(retention._expiry) == 0


async def test_a_pin_that_is_turned_away_does_not_count() -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world) as (running, peer, _):
            answer = await reserve(running, peer, 1)
            assert isinstance(answer, Grant)
            assert await reserve(running, peer, 1, pinned_until_us=1 << 60) is Admission.PENDING
            assert running.engine.retention.pinned_bytes == 0


class HeldWorkers:
    """A ports.Workers whose calls wait for `go`."""

    def __init__(self, workers: Workers, go: asyncio.Event) -> None:
        self._workers = workers
        self._go = go
        self.threads = workers.threads

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        await self._go.wait()
        return await self._workers.run(function, *args, **kwargs)


@asynccontextmanager
async def no_room_yet() -> AsyncIterator[tuple[Running, PeerSession, asyncio.Event]]:
    """An engine that makes no room for pages until the event is set."""
    go = asyncio.Event()
    with new_world(clock=ManualClock()) as world:
        world.wrap_workers = lambda name, workers: HeldWorkers(workers, go) if name == "verify" else workers
        async with engine_at(world) as (running, peer, _):
            try:
                yield running, peer, go
            finally:
                go.set()


async def reserve_pinned(running: Running, peer: PeerSession, as_span: bool) -> object:
    if not as_span:
        return await reserve(running, peer, 1, pinned_until_us=PINNED_FOREVER_US)
    retention = ((1, Retention(pinned_until_us=PINNED_FOREVER_US)),)
    return await running.engine.spans.reserve(peer, page_span(1, 1, retention=retention))


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize("as_span", [False, True])
async def test_a_pin_does_not_count_when_its_reserve_ends_while_room_is_made(as_span: bool, cancelled: bool) -> None:
    async with no_room_yet() as (running, peer, go):
        begun = asyncio.ensure_future(reserve_pinned(running, peer, as_span))
        await eventually(lambda: running.engine.retention.pinned_bytes == PAGE_BYTES)
        if cancelled:
            begun.cancel()
        else:
            running.engine.sessions.close(peer)
        go.set()
        await asyncio.wait([begun])
        assert begun.cancelled() or isinstance(begun.exception(), SessionUnknown)
        assert running.engine.retention.pinned_bytes == 0


@pytest.mark.parametrize("as_span", [False, True])
async def test_a_pin_does_not_count_when_another_writer_gets_the_page_while_room_is_made(as_span: bool) -> None:
    async with no_room_yet() as (running, peer, go):
        first = asyncio.ensure_future(reserve(running, peer, 1))
        second = asyncio.ensure_future(reserve_pinned(running, await open_session(running), as_span))
        await eventually(lambda: running.engine.retention.pinned_bytes == PAGE_BYTES)
        go.set()
        answer = await first
        assert isinstance(answer, Grant)
        await second
        fill_page(running.engine.pages.view(answer), page_key(1))
        assert await running.engine.pages.commit(peer, [answer.lease_id]) == [None]
        assert running.engine.retention.pinned_bytes == 0


@pytest.mark.parametrize("pinned", [True, False])
async def test_what_happens_to_other_chunks_while_many_are_pinned_is_not_undone(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world, linger_ms=60_000) as (running, peer, _):
            retention = running.engine.retention
            for number in (0, 1, 19):
                await put(running, peer, number, pinned_until_us=0 if pinned else 1 << 60)
            await put(running, peer, 2)
            keys_of = PageTable.keys

            def keys_later(table: PageTable, keyspace: bytes, chunk_hash: bytes) -> list[PageKey]:
                if chunk_hash == page_key(19).chunk_hash and table.find(page_key(0)) is not None:
                    table.drop(page_key(0))
                    longer = replace(metadata(1), priority=7)
                    assert retention.extend(page_key(1), PAGE_BYTES, longer, []) is None
                return keys_of(table, keyspace, chunk_hash)

            monkeypatch.setattr(PageTable, "keys", keys_later)
            hashes = [page_key(number).chunk_hash for number in range(20) if number != 2]
            until_us = 1 << 60 if pinned else 0
            assert await retention.pin(TENANT, KEYSPACE, hashes, until_us) == 2
            assert retention.pinned_bytes == (2 * PAGE_BYTES if pinned else 0), "a page that has gone counts no more"
            listing = running.engine.listing.chunks(TENANT, b"", most_read=0, pinned_only=False)
            listed = {chunk.chunk_hash: chunk.metadata async for part in listing for chunk in part}
            kept = listed[page_key(1).chunk_hash]
            assert (kept.priority, kept.pinned_until_us) == (7, until_us)


async def test_storing_many_pages_again_costs_one_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world(clock=ManualClock()) as world:
        async with engine_at(world) as (running, peer, clock):
            items = []
            for number in range(8):
                await put(running, peer, number, ttl_ms=1000)
                kept = replace(metadata(number), ttl_ms=1000)
                items.append(PageRecord(key=page_key(number), page_bytes=PAGE_BYTES, metadata=kept))
            await running.engine.flush(TENANT, b"")
            set_metadata, calls = world.memory.set_metadata, list[int]()

            def counted(changes: Sequence[tuple[PageKey, PageMetadata]]) -> None:
                calls.append(len(changes))
                set_metadata(changes)

            monkeypatch.setattr(world.memory, "set_metadata", counted)
            clock.advance(0.5)
            assert await running.engine.pages.reserve(peer, items) == [Admission.EXISTS] * 8
            assert calls == [8]
            assert {kept.expires_us for kept in on_disk(world).values()} == {clock.wall_us() + 1_000_000}
            world.memory.fault = StoreFault("the disk is gone")
            clock.advance(0.1)
            answers = await running.engine.pages.reserve(peer, items)
            assert [type(answer) for answer in answers] == [StoreFault] * 8, "it could not be promised durably"
            world.memory.fault = None


async def test_a_page_that_expired_while_the_node_was_down_is_not_served() -> None:
    clock = ManualClock()
    with new_world(clock=clock) as world:
        async with engine_at(world) as (running, peer, _):
            await put(running, peer, 1, ttl_ms=1000)
            await put(running, peer, 2)
            await running.engine.flush(TENANT, b"")
        clock.advance(5.0)
        async with engine_at(world) as (running, peer, _):
            assert (await acquire_one(running, peer, wanted(1))).grant is None
            assert (await acquire_one(running, peer, wanted(2))).grant is not None
