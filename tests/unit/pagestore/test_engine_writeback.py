"""Write-back meets clears, failures and pages that are stored again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import ArenaFull, Draining, StoreFault
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool.core.page import PageKey
from kvpool.core.retention import PINNED_FOREVER_US
from kvpool.testing import eventually
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.writeback import DirtyPage
from kvpool_pagestore.engine import writeback
from kvpool_pagestore.engine.fetch import PageRequest
from kvpool_pagestore.engine.removal import EvictTarget
from kvpool_pagestore.engine.sessions import PeerSession
from kvpool_pagestore.engine.store import PageStoreEngine
from tests.fixtures.movement import cluster_of
from tests.fixtures.pagestore import (
    KEYSPACE,
    KEYSPACES,
    PAGE_BYTES,
    SLOT_BYTES,
    SPEC,
    TENANT,
    Gate,
    Running,
    ScriptedPeers,
    World,
    fill_page,
    give,
    new_world,
    page_key,
    remote_source,
    running_engine,
)
from tests.fixtures.pagestore_calls import acquire, open_session, reserve_item, store, wanted
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stored_pages import stored_pages

OTHER_SPEC = replace(SPEC, model_revision="other")
OTHER = keyspace_id(encode_keyspace(TENANT, OTHER_SPEC))
PATIENT_MS = 60_000  # nothing is written before a request
ONE_PAGE_AND_NO_MORE = {"write_back_bytes_per_s": 1}  # the first one goes at once, the next one hours later


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushing:
    """A flush whose write waits at the gate."""

    running: Running
    peer: PeerSession
    gate: Gate
    flush: asyncio.Future[tuple[int, int]]

    async def end(self) -> tuple[int, int]:
        """Let it go on; what it answers."""
        self.gate.set()
        async with asyncio.timeout(PATIENCE_S):
            return await self.flush


@asynccontextmanager
async def flushing(world: World, numbers: Sequence[int], **changes: Any) -> AsyncIterator[Flushing]:
    """An engine in the middle of writing these pages, as a flush asked for."""
    async with running_engine(world, linger_ms=PATIENT_MS, **changes) as running:
        peer = await open_session(running)
        world.memory.gate = gate = Gate()
        await store(running, peer, numbers)
        flush = asyncio.ensure_future(running.engine.flush(TENANT, b""))
        await eventually(gate.reached.is_set)
        yield Flushing(running=running, peer=peer, gate=gate, flush=flush)


def pinned_until_us(world: World) -> dict[PageKey, int]:
    """As the records on disk have it."""
    return {found.key: found.metadata.pinned_until_us for found in stored_pages(world.memory)}


async def test_a_page_cleared_just_when_its_write_begins_stops_neither_clear_nor_flush() -> None:
    with new_world() as world:
        async with running_engine(world, linger_ms=PATIENT_MS) as running:
            engine, peer = running.engine, await open_session(running)
            await store(running, peer, [1, 2])
            async with asyncio.timeout(PATIENCE_S):
                # Both take their first step now: the clear drops the pages that the flush has just picked.
                cleared, flushed = await asyncio.gather(engine.clear(TENANT, b""), engine.flush(TENANT, b""))
                assert cleared == 2
                assert stored_pages(world.memory) == [] and flushed[1] == 0
                await store(running, peer, [3])
                assert await engine.flush(TENANT, b"") == (1, 0)
            await eventually(lambda: engine.gauges().arena_used_bytes > 0)


async def test_a_write_that_fails_in_an_unforeseen_way_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        async with running_engine(world, linger_ms=PATIENT_MS) as running:
            engine, peer = running.engine, await open_session(running)
            await store(running, peer, [1])
            with monkeypatch.context() as patch:

                def broken(*_: object) -> None:
                    raise OSError("an unforeseen fault")

                patch.setattr(world.memory, "put_batch", broken)
                async with asyncio.timeout(PATIENCE_S):
                    assert await engine.flush(TENANT, b"") == (0, 1)
            async with asyncio.timeout(PATIENCE_S):
                assert await engine.flush(TENANT, b"") == (1, 0)
            assert [found.key for found in stored_pages(world.memory)] == [page_key(1)]


async def test_a_page_stored_again_while_its_old_bytes_are_written_stays_durable() -> None:
    with new_world() as world:
        async with running_engine(world, linger_ms=1) as running:
            engine, peer = running.engine, await open_session(running)
            world.memory.gate = gate = Gate()
            await store(running, peer, [1])
            await eventually(gate.reached.is_set)
            (read,) = await acquire(running, peer, [PageRequest(key=page_key(1))])
            assert read.grant is not None
            engine.pages.release(peer, [], corrupt_ids=[read.grant.lease_id])
            await store(running, peer, [1])
            await asyncio.sleep(0.05)
            world.memory.gate.set()
            async with asyncio.timeout(PATIENCE_S):
                await engine.flush(TENANT, b"")
                await eventually(lambda: engine.gauges().disk_pages == 1)
            await eventually(lambda: [found.key for found in stored_pages(world.memory)] == [page_key(1)])
            async with asyncio.timeout(PATIENCE_S):
                await engine.flush(TENANT, b"")
            assert [found.key for found in stored_pages(world.memory)] == [page_key(1)]


async def test_pages_that_are_added_wake_no_waiter_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, undecided = list[object](), writeback._undecided

    def noted(page: DirtyPage, failures_before: int) -> bool:
        looked.append(page)
        return undecided(page, failures_before)

    monkeypatch.setattr(writeback, "_undecided", noted)
    with new_world() as world:
        async with running_engine(world, linger_ms=PATIENT_MS) as running:
            engine, peer = running.engine, await open_session(running)
            world.memory.gate = threading.Event()
            await store(running, peer, [1])
            flush = asyncio.ensure_future(engine.flush(TENANT, b""))
            await eventually(lambda: bool(looked))
            looked.clear()
            for number in range(2, 12):
                await store(running, peer, [number])
            looked_count = len(looked)
            world.memory.gate.set()
            async with asyncio.timeout(PATIENCE_S):
                assert await flush == (1, 0)
            assert looked_count == 0


async def test_a_page_pinned_while_it_is_written_is_durable_with_its_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        true = world.memory.set_metadata

        def slow(changes: Sequence[tuple[PageKey, PageMetadata]]) -> None:
            time.sleep(0.1)
            true(changes)

        monkeypatch.setattr(world.memory, "set_metadata", slow)
        async with flushing(world, [1, 2]) as write:
            engine = write.running.engine
            assert await engine.retention.pin(TENANT, KEYSPACE, [page_key(1).chunk_hash], PINNED_FOREVER_US) == 1
            assert await write.end() == (2, 0)
            assert pinned_until_us(world) == {page_key(1): PINNED_FOREVER_US, page_key(2): 0}


@pytest.mark.parametrize("error", [StoreFault("the disk fails"), OSError("an unforeseen fault")], ids=repr)
async def test_a_page_is_not_durable_before_the_pin_it_got_meanwhile_is(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_world() as world:

        def failing(changes: object) -> None:
            raise error

        monkeypatch.setattr(world.memory, "set_metadata", failing)
        async with flushing(world, [1, 2]) as write:
            engine = write.running.engine
            assert await engine.retention.pin(TENANT, KEYSPACE, [page_key(1).chunk_hash], PINNED_FOREVER_US) == 1
            assert await write.end() == (1, 1)
            async with asyncio.timeout(PATIENCE_S):
                await engine.flush(TENANT, b"")  # writes the page once more, with its pin, unless that was done
            assert pinned_until_us(world) == {page_key(1): PINNED_FOREVER_US, page_key(2): 0}


async def test_pages_wait_for_the_budget_and_a_flush_has_none() -> None:
    with new_world() as world:
        async with running_engine(world, **ONE_PAGE_AND_NO_MORE) as running:
            engine, peer = running.engine, await open_session(running)
            await store(running, peer, [1])
            await eventually(lambda: engine.gauges().disk_pages == 1)
            await store(running, peer, [2, 3])
            assert engine.gauges().write_back_waiting_bytes == 2 * PAGE_BYTES
            async with asyncio.timeout(PATIENCE_S):
                assert await engine.flush(TENANT, b"") == (2, 0)
            assert engine.gauges().write_back_waiting_bytes == 0
            await store(running, peer, [4])
        assert {found.key for found in stored_pages(world.memory)} == {page_key(number) for number in (1, 2, 3, 4)}


async def test_a_caller_that_wants_its_page_durable_waits_for_no_budget() -> None:
    with new_world() as world:
        async with running_engine(world, **ONE_PAGE_AND_NO_MORE) as running:
            engine, peer = running.engine, await open_session(running)
            await store(running, peer, [1])
            await eventually(lambda: engine.gauges().disk_pages == 1)
            await store(running, peer, [2])
            (grant,) = await engine.pages.reserve(peer, [reserve_item(20)])
            assert isinstance(grant, Grant)
            fill_page(engine.pages.view(grant), page_key(20))
            async with asyncio.timeout(PATIENCE_S):
                assert await engine.pages.commit(peer, [grant.lease_id], durable=True) == [None]
            assert {found.key for found in stored_pages(world.memory)} == {page_key(1), page_key(20)}
            assert engine.gauges().write_back_waiting_bytes == PAGE_BYTES


async def test_a_page_that_is_to_be_durable_takes_its_group_along_and_no_more() -> None:
    with new_world() as world:
        async with running_engine(world, **ONE_PAGE_AND_NO_MORE) as running:
            engine, peer = running.engine, await open_session(running)
            await store(running, peer, [1])
            await eventually(lambda: engine.gauges().disk_pages == 1)
            await store(running, peer, [2, 3, 20])
            async with asyncio.timeout(PATIENCE_S):
                assert await engine.pages.make_durable(page_key(3)) is None
            assert {found.key for found in stored_pages(world.memory)} == {page_key(number) for number in (1, 2, 3)}
            assert engine.gauges().write_back_waiting_bytes == PAGE_BYTES


async def test_the_budget_is_lifted_while_more_than_half_of_the_cap_waits() -> None:
    with new_world() as world:
        async with running_engine(world, **ONE_PAGE_AND_NO_MORE) as running:
            engine, peer = running.engine, await open_session(running)
            await store(running, peer, [0])
            await eventually(lambda: engine.gauges().disk_pages == 1)
            half = running.config.writer_bytes // 2
            within, beyond = half // SLOT_BYTES, 100
            for number in range(1, 1 + within):
                assert await store(running, peer, [number]) == [None]
            assert engine.gauges().arena_dirty_bytes == within * SLOT_BYTES
            for number in range(1 + within, beyond):  # the arena has 64 slots
                assert await store(running, peer, [number]) == [None]
                await eventually(lambda: engine.gauges().arena_dirty_bytes <= half)
            waiting_count = engine.dirty_page_count
            assert 0 < engine.gauges().disk_pages == beyond - waiting_count
            async with asyncio.timeout(PATIENCE_S):
                assert await engine.flush(TENANT, b"") == (waiting_count, 0)
        assert {found.key for found in stored_pages(world.memory)} == {page_key(number) for number in range(beyond)}


async def read_once(running: Running, peer: PeerSession, number: int) -> bool:
    """Whether a page is here; it counts as used."""
    (read,) = await acquire(running, peer, [wanted(number)])
    if read.grant is not None:
        running.engine.pages.release(peer, [read.grant.lease_id])
    return read.grant is not None


async def test_stores_are_refused_at_the_cap_and_no_page_is_lost_for_them() -> None:
    with new_world() as world:
        async with running_engine(world, **ONE_PAGE_AND_NO_MORE) as running:
            engine, peer = running.engine, await open_session(running)
            world.memory.gate = gate = Gate()
            cap = running.config.writer_bytes // SLOT_BYTES
            stored = range(3 * cap // 4)
            for number in stored:
                assert await store(running, peer, [number]) == [None]
            being_written = [reserve_item(number) for number in range(len(stored), cap)]
            assert all(isinstance(one, Grant) for one in await engine.pages.reserve(peer, being_written))
            (refused,) = await engine.pages.reserve(peer, [reserve_item(100)])
            assert isinstance(refused, ArenaFull)
            assert engine.dirty_page_count == len(stored)
            gate.set()
            async with asyncio.timeout(PATIENCE_S):
                await engine.flush(TENANT, b"")
            assert {found.key for found in stored_pages(world.memory)} == {page_key(number) for number in stored}


@asynccontextmanager
async def behind(world: World, count: int, **changes: Any) -> AsyncIterator[tuple[Running, PeerSession, Gate, int]]:
    """An engine that was given so many pages while its disk wrote none, and how many of them are dirty."""
    async with running_engine(world, **changes) as running:
        peer = await open_session(running)
        world.memory.gate = gate = Gate()
        for number in range(count):
            assert await store(running, peer, [number]) == [None]
        yield running, peer, gate, running.engine.dirty_page_count


async def test_while_the_disk_is_behind_pages_are_stored_all_the_same_and_a_flush_writes_them() -> None:
    with new_world() as world:
        async with behind(world, 40, **ONE_PAGE_AND_NO_MORE) as (running, peer, gate, dirty):
            cap = running.config.writer_bytes // SLOT_BYTES  # 32 of 64 slots
            assert 3 * cap // 4 <= dirty <= 3 * cap // 4 + 1
            assert [await read_once(running, peer, number) for number in range(40)] == [True] * 40
            assert running.engine.dirty_page_count == dirty
            gate.set()
            async with asyncio.timeout(PATIENCE_S):
                assert await running.engine.flush(TENANT, b"") == (40, 0)
            assert {found.key for found in stored_pages(world.memory)} == {page_key(number) for number in range(40)}
            async with asyncio.timeout(PATIENCE_S):
                assert await running.engine.flush(TENANT, b"") == (0, 0)


async def test_a_disk_that_has_caught_up_gets_what_was_postponed() -> None:
    with new_world() as world:
        async with behind(world, 40) as (running, _, gate, dirty):
            assert dirty < 40
            gate.set()
            await eventually(lambda: running.engine.gauges().disk_pages == 40)
            assert running.engine.dirty_page_count == 0


async def test_pages_that_are_postponed_give_way_to_new_ones() -> None:
    with new_world() as world:
        async with behind(world, 100) as (running, peer, gate, dirty):  # of 64 slots
            here = [await read_once(running, peer, number) for number in range(100)]
            assert sum(here) <= 64 and all(here[:dirty]) and here[-1]
            gate.set()
            async with asyncio.timeout(PATIENCE_S):
                durable, failed = await running.engine.flush(TENANT, b"")
            assert (durable, failed) == (sum(here), 0)


async def store_other(running: Running, peer: PeerSession, numbers: Sequence[int]) -> None:
    """The same as `store`, in another keyspace."""
    items = [replace(reserve_item(number), key=page_key(number, keyspace=OTHER)) for number in numbers]
    grants = [one for one in await running.engine.pages.reserve(peer, items) if isinstance(one, Grant)]
    assert len(grants) == len(numbers)
    for grant in grants:
        fill_page(running.engine.pages.view(grant), grant.slot.page.key)
    assert await running.engine.pages.commit(peer, [grant.lease_id for grant in grants]) == [None] * len(grants)


async def test_a_flush_writes_what_was_postponed_however_much_of_other_keyspaces_is_dirty() -> None:
    with new_world() as world:
        async with running_engine(world, linger_ms=PATIENT_MS, batch_pages=100) as running:
            engine, peer = running.engine, await open_session(running, keyspaces=(*KEYSPACES, (OTHER, OTHER_SPEC)))
            cap = running.config.writer_bytes // SLOT_BYTES
            for number in range(3 * cap // 4 + 1):
                await store_other(running, peer, [number])
            assert await store(running, peer, range(4)) == [None] * 4
            dirty = engine.dirty_page_count
            assert dirty == 3 * cap // 4 + 1
            being_written = await engine.pages.reserve(peer, [reserve_item(100 + one) for one in range(cap - dirty)])
            assert all(isinstance(one, Grant) for one in being_written)
            async with asyncio.timeout(PATIENCE_S):
                assert await engine.flush(TENANT, KEYSPACE) == (4, 0)
            assert {found.key for found in stored_pages(world.memory)} == {page_key(number) for number in range(4)}


async def test_what_was_postponed_is_not_forgotten_while_others_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        async with running_engine(world, linger_ms=PATIENT_MS, batch_pages=100) as running:
            engine, peer = running.engine, await open_session(running, keyspaces=(*KEYSPACES, (OTHER, OTHER_SPEC)))
            cap = running.config.writer_bytes // SLOT_BYTES
            for number in range(3 * cap // 4 + 1):
                await store_other(running, peer, [number])
            assert await store(running, peer, range(4)) == [None] * 4
            gate, delete = Gate(), world.memory.delete_keyspace

            def delete_late(*arguments: Any) -> Any:
                gate.wait(PATIENCE_S)
                return delete(*arguments)

            monkeypatch.setattr(world.memory, "delete_keyspace", delete_late)
            clearing = asyncio.ensure_future(engine.clear(TENANT, OTHER))
            await eventually(gate.reached.is_set)
            being_written = await engine.pages.reserve(peer, [reserve_item(100 + one) for one in range(cap)])
            assert all(isinstance(one, Grant) for one in being_written)
            gate.set()
            await clearing
            assert engine.dirty_page_count == 0
        assert {found.key for found in stored_pages(world.memory)} == {page_key(number) for number in range(4)}


async def test_a_flush_counts_a_page_once_that_was_postponed_and_then_waited_for() -> None:
    with new_world() as world:
        async with behind(world, 40, linger_ms=PATIENT_MS, batch_pages=100) as (running, _, gate, dirty):
            assert dirty < 39
            gate.set()
            async with asyncio.timeout(PATIENCE_S):
                assert await running.engine.pages.make_durable(page_key(39)) is None
                assert await running.engine.flush(TENANT, b"") == (39, 0)


async def test_a_flush_of_what_was_postponed_leaves_room_for_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        async with behind(world, 60, linger_ms=PATIENT_MS, batch_pages=100) as (running, _, gate, dirty):
            gate.set()
            most_bytes, put = list[int](), world.memory.put_batch

            def watched(*arguments: Any, **named: Any) -> Any:
                most_bytes.append(running.engine.gauges().arena_dirty_bytes)
                return put(*arguments, **named)

            monkeypatch.setattr(world.memory, "put_batch", watched)
            async with asyncio.timeout(PATIENCE_S):
                assert await running.engine.flush(TENANT, b"") == (60, 0)
            assert max(most_bytes) <= dirty * SLOT_BYTES


async def test_a_flush_writes_a_page_that_a_peer_brought_first_while_the_disk_was_behind() -> None:
    with new_world() as world:
        world.peers = ScriptedPeers(lambda _, item: give(item))
        async with behind(world, 30, linger_ms=PATIENT_MS, batch_pages=100) as (running, peer, gate, dirty):
            assert dirty < 30
            (grant,) = await running.engine.pages.reserve(peer, [reserve_item(100)])
            assert isinstance(grant, Grant)
            fill_page(running.engine.pages.view(grant), page_key(100))
            (pulled,) = await acquire(running, peer, [wanted(100, remote_source(1))])
            assert pulled.grant is not None
            assert await running.engine.pages.commit(peer, [grant.lease_id]) == [None]
            gate.set()
            async with asyncio.timeout(PATIENCE_S):
                assert await running.engine.flush(TENANT, b"") == (31, 0)
            assert page_key(100) in {found.key for found in stored_pages(world.memory)}


async def test_a_caller_that_waits_for_the_disk_gets_it_while_it_is_behind() -> None:
    with new_world() as world:
        async with running_engine(world, **ONE_PAGE_AND_NO_MORE) as running:
            engine, peer = running.engine, await open_session(running)
            world.memory.gate = gate = Gate()
            for number in range(running.config.writer_bytes // SLOT_BYTES):
                assert await store(running, peer, [number]) == [None]
            (grant,) = await engine.pages.reserve(peer, [reserve_item(100)])
            assert isinstance(grant, Grant)
            fill_page(engine.pages.view(grant), page_key(100))
            commit = asyncio.ensure_future(engine.pages.commit(peer, [grant.lease_id], durable=True))
            gate.set()
            async with asyncio.timeout(PATIENCE_S):
                assert await commit == [None]
            assert page_key(100) in {found.key for found in stored_pages(world.memory)}


async def test_a_page_that_is_being_written_or_waited_for_is_not_evicted() -> None:
    with new_world() as world:
        async with flushing(world, [1, 2], dirty_bytes=2 * SLOT_BYTES) as write:
            (answer,) = await write.running.engine.pages.reserve(write.peer, [reserve_item(3)])
            assert isinstance(answer, ArenaFull)
            assert await write.end() == (2, 0)


async def flush_all(engine: PageStoreEngine) -> None:
    _, failed_count = await engine.flush(TENANT, b"")
    assert failed_count == 0


async def drain(engine: PageStoreEngine) -> None:
    async for _ in engine.drain.watch():
        pass


@pytest.mark.parametrize("wait_for_all", [flush_all, drain])
async def test_a_flush_or_drain_loses_no_page_that_it_waits_for(
    wait_for_all: Callable[[PageStoreEngine], Awaitable[None]],
) -> None:
    changes: dict[str, Any] = {"batch_pages": 4, "write_threads": 1, **ONE_PAGE_AND_NO_MORE}
    async with cluster_of(2, linger_ms=PATIENT_MS, **changes) as cluster:
        world, running = cluster.members[0].world, cluster.members[0].run
        engine, peer = running.engine, await open_session(running)
        on_disk_alone, unwritten = range(60), range(100, 124)  # of 64 slots, three eighths for dirty ones
        for number in on_disk_alone:
            assert await store(running, peer, [number]) == [None]
            await flush_all(engine)
        hashes = [page_key(number).chunk_hash for number in on_disk_alone]
        await engine.evicting.evict(TENANT, EvictTarget(keyspace=KEYSPACE, chunk_hashes=hashes, staging_only=True))
        world.memory.gate = gate = Gate()
        for number in unwritten:
            assert await store(running, peer, [number]) == [None]
        assert engine.dirty_page_count == len(unwritten)
        waiting = asyncio.ensure_future(wait_for_all(engine))
        await eventually(gate.reached.is_set)
        promoted = await acquire(running, peer, [wanted(number) for number in on_disk_alone])
        (refused,) = await engine.pages.reserve(peer, [reserve_item(200)])
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            await waiting
        assert {found.key for found in stored_pages(world.memory)} >= {page_key(number) for number in unwritten}
        assert sum(one.grant is not None for one in promoted) == 64 - len(unwritten)
        assert isinstance(refused, ArenaFull | Draining)
        assert engine.gauges().arena_dirty_bytes == 0


async def test_pages_that_a_flush_could_not_write_give_way_to_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = {"linger_ms": PATIENT_MS, "write_retry_ms": PATIENT_MS, "write_retry_max_ms": PATIENT_MS}
    with new_world() as world:

        def broken(*_: object) -> None:
            raise OSError("an unforeseen fault")

        async with running_engine(world, batch_pages=100, **patient) as running:
            engine, peer = running.engine, await open_session(running)
            for number in range(24):
                assert await store(running, peer, [number]) == [None]
            with monkeypatch.context() as patch:
                patch.setattr(world.memory, "put_batch", broken)
                async with asyncio.timeout(PATIENCE_S):
                    assert await engine.flush(TENANT, b"") == (0, 24)
            assert engine.gauges().arena_dirty_bytes == 0
            for number in range(100, 124):
                assert await store(running, peer, [number]) == [None]
