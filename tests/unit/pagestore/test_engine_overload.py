"""A full queue of worker threads delays what needs them; once it has room again, nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from kvpool.core.errors import Overloaded
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool.core.page import PageKey
from kvpool.testing import eventually
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.engine.fetch import Source
from kvpool_pagestore.ports import Workers
from tests.fixtures.pagestore import (
    PAGE_BYTES,
    SPEC,
    TENANT,
    Running,
    ScriptedPeers,
    World,
    chunk_hash,
    fill_page,
    give,
    metadata,
    new_world,
    remote_source,
    running_engine,
)
from tests.fixtures.pagestore_calls import acquire, acquire_one, open_session, reserve_item, store, wanted

P = ParamSpec("P")
T = TypeVar("T")

OTHER_TENANT = "another"
OTHER_KEYSPACE = keyspace_id(encode_keyspace(OTHER_TENANT, SPEC))


class FullWorkers:
    """A ports.Workers whose queue is full while `is_full`; counts what it refuses."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.threads = workers.threads
        self.is_full = False
        self.refused_count = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self.is_full:
            self.refused_count += 1
            raise Overloaded("the queue is full")
        return await self._workers.run(function, *args, **kwargs)


@contextmanager
def world_with_full_workers(**kwargs: Any) -> Iterator[tuple[World, dict[str, FullWorkers]]]:
    with new_world(**kwargs) as world:
        workers: dict[str, FullWorkers] = {}

        def wrap(name: str, made: Workers) -> Workers:
            workers[name] = FullWorkers(made)
            return workers[name]

        world.wrap_workers = wrap
        yield world, workers


async def give_arena_to_other_tenant(running: Running) -> None:
    """All segments hold clean pages of another tenant: room for a page comes only from destroying one of them."""
    peer = await open_session(running, tenant=OTHER_TENANT, keyspaces=((OTHER_KEYSPACE, SPEC),))
    for start in range(0, 64, 16):
        items = [
            PageRecord(
                key=PageKey(OTHER_KEYSPACE, chunk_hash(number), 0), page_bytes=PAGE_BYTES, metadata=metadata(number)
            )
            for number in range(start, start + 16)
        ]
        grants = [one for one in await running.engine.pages.reserve(peer, items) if isinstance(one, Grant)]
        assert len(grants) == len(items)
        for grant in grants:
            fill_page(running.engine.pages.view(grant), grant.slot.page.key)
        assert await running.engine.pages.commit(peer, [one.lease_id for one in grants]) == [None] * len(items)
        await running.engine.flush(OTHER_TENANT, b"")


async def test_slots_of_an_ended_session_come_back_after_the_queue_was_full() -> None:
    with world_with_full_workers() as (world, workers):
        async with running_engine(world) as running:
            peer = await open_session(running)
            await running.engine.pages.reserve(peer, [reserve_item(1)])
            workers["verify"].is_full = True
            running.engine.sessions.end(peer, "killed")
            await eventually(lambda: workers["verify"].refused_count > 1)
            assert running.engine.gauges().arena_quarantined_bytes
            workers["verify"].is_full = False
            await eventually(lambda: running.engine.gauges().arena_quarantined_bytes == 0)
            assert running.engine.gauges().arena_used_bytes == 0


async def test_session_files_are_removed_after_the_queue_was_full() -> None:
    with world_with_full_workers() as (world, workers):
        async with running_engine(world, quarantine_poll_ms=1) as running:
            peer = await open_session(running, wants_arena=True)
            assert list(running.arena.old_sessions()) == [peer.session.session_id]
            workers["verify"].is_full = True
            running.engine.sessions.close(peer)
            await eventually(lambda: workers["verify"].refused_count > 0)
            workers["verify"].is_full = False
            await eventually(lambda: not running.arena.old_sessions())


async def test_segments_of_an_earlier_process_are_given_back_after_the_queue_was_full() -> None:
    with world_with_full_workers() as (world, workers):
        async with running_engine(world) as running:
            peer = await open_session(running, wants_arena=True)
            await store(running, peer, range(16))
            session_file = running.engine.sessions.descriptor(peer.token, 0)
            for segment_id in running.engine.prepare(peer, 0)[0]:
                running.engine.sessions.descriptor(peer.token, segment_id)
        os.close(session_file.fd)  # the peer ends
        true_wrap = world.wrap_workers

        def full_from_the_start(name: str, made: Workers) -> Workers:
            wrapped = true_wrap(name, made)
            workers[name].is_full = name == "verify"
            return wrapped

        world.wrap_workers = full_from_the_start
        async with running_engine(world) as running:
            await eventually(lambda: workers["verify"].refused_count > 1)
            workers["verify"].is_full = False
            await eventually(lambda: running.engine.gauges().arena_segment_bytes == 0)
            assert running.engine.gauges().arena_quarantined_bytes == 0


async def test_a_page_on_disk_can_be_read_after_no_slot_was_found_for_it_while_the_queue_was_full() -> None:
    with world_with_full_workers() as (world, workers):
        async with running_engine(world) as running:
            await store(running, await open_session(running), [1])
            await running.engine.flush(TENANT, b"")
        async with running_engine(world) as running:
            peer = await open_session(running)
            await give_arena_to_other_tenant(running)
            workers["verify"].is_full = True
            answer = await acquire_one(running, peer, wanted(1))
            assert answer.grant is None and isinstance(answer.error, Overloaded)
            workers["verify"].is_full = False
            answer = await acquire_one(running, peer, wanted(1))
            assert answer.grant is not None and answer.source is Source.DISK


async def test_pages_of_a_peer_can_be_pulled_after_no_slot_was_found_for_them_while_the_queue_was_full() -> None:
    with world_with_full_workers() as (world, workers):
        world.peers = ScriptedPeers(lambda _, item: give(item))
        async with running_engine(world) as running:
            peer = await open_session(running)
            await give_arena_to_other_tenant(running)
            workers["verify"].is_full = True
            pages = [wanted(number, remote_source(1)) for number in range(4)]
            for answer in await acquire(running, peer, pages):
                assert answer.grant is None and isinstance(answer.error, Overloaded)
            workers["verify"].is_full = False
            for answer in await acquire(running, peer, pages):
                assert answer.grant is not None and answer.source is Source.REMOTE


async def test_a_page_is_refused_and_not_the_session_when_no_slot_can_be_made_while_the_queue_is_full() -> None:
    with world_with_full_workers() as (world, workers):
        async with running_engine(world) as running:
            peer = await open_session(running)
            await give_arena_to_other_tenant(running)
            workers["verify"].is_full = True
            (answer,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
            assert isinstance(answer, Overloaded)
            workers["verify"].is_full = False
            (answer,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
            assert isinstance(answer, Grant)
