"""Pulls that do not move: another source is asked, the first good copy counts, slots come back after their threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool.core.cancel import CancelToken
from kvpool.core.clock import Clock
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import DeadlineExceeded, KvPoolError, Stopped
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.testing import ManualClock, eventually
from kvpool_pagestore.engine.fetch import Acquired, Source
from kvpool_pagestore.ports import PullItem, Workers
from tests.fixtures.pagestore import (
    SLOT_BYTES,
    Running,
    ScriptedPeers,
    World,
    give,
    new_world,
    page_key,
    remote_source,
    running_engine,
    sealed_page,
)
from tests.fixtures.pagestore_calls import acquire, acquire_one, open_session, wanted
from tests.fixtures.patience import PATIENCE_S

QUICK = {"hedge_ms": 20, "pull_stall_ms": int(1000 * PATIENCE_S)}


class StuckPeers(ScriptedPeers):
    """Sources 1 to 9 send nothing until they are stopped or let go; the others answer at once."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.leave = threading.Event()  # a stopped pull still holds its slots until then
        self.leave.set()
        self.stopped: list[RemoteSource] = []
        self.calls: list[RemoteSource] = []
        self.wrong: set[RemoteSource] = set()

    def pull(
        self,
        source: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[PullItem],
        deadline_s: float,
        on_page: Callable[[int, KvPoolError | None, bool], None],
        stop: CancelToken,
    ) -> None:
        self.calls.append(source)
        if stop.cancelled:
            for index in range(len(items)):
                on_page(index, Stopped("not wanted"), False)
            return
        if source.incarnation < 10:
            woken = threading.Event()
            stop.on_cancel(woken.set)
            while not (woken.is_set() or self.go.is_set()):
                woken.wait(0.005)
            if woken.is_set():
                self.stopped.append(source)
                assert self.leave.wait(PATIENCE_S)
                for index, item in enumerate(items):
                    item.destination[:] = b"\xff" * len(item.destination)  # its slot is still its own
                    on_page(index, Stopped("not wanted"), False)
                return
        for index, item in enumerate(items):
            give(item)
            if source in self.wrong:
                item.destination[100] ^= 1
            on_page(index, None, True)


@contextmanager
def stuck_world(clock: Clock | None = None) -> Iterator[tuple[World, StuckPeers]]:
    with new_world(clock=clock) as world:
        peers = StuckPeers()
        world.peers = peers
        try:
            yield world, peers
        finally:
            peers.leave.set()
            peers.go.set()


def check(running: Running, answer: Acquired, number: int) -> None:
    assert answer.source is Source.REMOTE and answer.grant is not None
    assert running.engine.pages.view(answer.grant) == sealed_page(page_key(number))


async def test_a_source_that_hangs_is_overtaken_by_the_next() -> None:
    with stuck_world() as (world, peers):
        peers.leave.clear()
        async with running_engine(world, **QUICK) as running:
            peer = await open_session(running)
            check(running, await acquire_one(running, peer, wanted(1, remote_source(1), remote_source(11))), 1)
            assert running.metric("hedged_pages_total") == 1
            await eventually(lambda: peers.stopped == [remote_source(1)])
            # The slower source's thread may still write: its slot is its own until it has left.
            assert running.engine.gauges().arena_used_bytes == 2 * SLOT_BYTES
            peers.leave.set()
            await eventually(lambda: running.engine.gauges().arena_used_bytes == SLOT_BYTES)
            check(running, await acquire_one(running, peer, wanted(2, remote_source(11))), 2)
            assert not world.index.stale


async def test_a_hedge_that_brings_wrong_bytes_does_not_count() -> None:
    with stuck_world() as (world, peers):
        peers.wrong.add(remote_source(11))
        async with running_engine(world, **QUICK) as running:
            peer = await open_session(running)
            asked = asyncio.ensure_future(acquire_one(running, peer, wanted(1, remote_source(1), remote_source(11))))
            await eventually(lambda: world.index.stale == [(page_key(1), remote_source(11))])
            assert not asked.done()
            peers.go.set()
            check(running, await asked, 1)
            assert running.metric("verification_failures_total", place="peer") == 1


async def test_a_whole_window_moves_over_and_one_hung_peer_leaves_threads_to_others() -> None:
    with stuck_world() as (world, peers):
        roomy = {"arena_bytes": 128 * SLOT_BYTES}
        async with running_engine(world, **QUICK, **roomy, pull_streams_per_peer=1) as running:
            peer = await open_session(running)
            pages = [wanted(number, remote_source(1), remote_source(11)) for number in range(50)]
            answers = await acquire(running, peer, pages)
            for number, answer in enumerate(answers):
                check(running, answer, number)
            assert peers.calls.count(remote_source(1)) == 1  # the rest waited for that stream, and moved over too
            await eventually(lambda: running.engine.gauges().arena_used_bytes == 50 * SLOT_BYTES)


async def test_without_another_source_a_silent_one_is_given_up() -> None:
    with stuck_world() as (world, peers):
        async with running_engine(world, hedge_ms=10, pull_stall_ms=50) as running:
            peer = await open_session(running)
            answer = await acquire_one(running, peer, wanted(1, remote_source(1)))
            assert answer.grant is None and isinstance(answer.error, DeadlineExceeded)
            assert peers.stopped == [remote_source(1)]
            assert running.engine.gauges().arena_used_bytes == 0
            assert not world.index.stale  # silent is not wrong


async def test_pages_that_wait_for_a_silent_source_are_given_up_with_it() -> None:
    with stuck_world() as (world, peers):
        async with running_engine(world, hedge_ms=10, pull_stall_ms=50, pull_streams_per_peer=1) as running:
            peer = await open_session(running)
            pages = [wanted(number, remote_source(1)) for number in range(60)]  # more than one stream asks for
            answers = await acquire(running, peer, pages)
            assert all(isinstance(answer.error, DeadlineExceeded) for answer in answers)
            assert peers.calls == [remote_source(1)]  # the rest did not wait for its silence once more
            await eventually(lambda: running.engine.gauges().arena_used_bytes == 0)


async def test_hedging_can_be_turned_off() -> None:
    with stuck_world() as (world, peers):
        async with running_engine(world, hedge_ms=0, pull_stall_ms=60) as running:
            peer = await open_session(running)
            check(running, await acquire_one(running, peer, wanted(1, remote_source(1), remote_source(11))), 1)
            assert running.metric("hedged_pages_total") == 0  # it was asked once the first was given up
            assert peers.stopped == [remote_source(1)]


async def test_a_hedge_that_finds_no_room_is_tried_again() -> None:
    clock = ManualClock()
    with stuck_world(clock) as (world, _):
        async with running_engine(world, hedge_ms=20, pull_stall_ms=300, pull_streams_per_peer=1) as running:
            peer = await open_session(running)
            # 64 slots: 32 for the silent source and 32 for the other one, so that 28 pages find no room at first.
            pages = [wanted(number, remote_source(1), remote_source(11)) for number in range(60)]
            asking = asyncio.ensure_future(acquire(running, peer, pages))

            def a_little_later() -> bool:
                clock.advance(0.01)
                return asking.done()

            await eventually(a_little_later)
            for number, answer in enumerate(await asking):
                check(running, answer, number)
            await eventually(lambda: running.engine.gauges().arena_used_bytes == 60 * SLOT_BYTES)


async def test_a_page_whose_hedge_failed_still_gets_its_turn_with_the_first_source() -> None:
    with stuck_world() as (world, peers):
        peers.wrong.add(remote_source(11))
        async with running_engine(world, **QUICK, pull_streams_per_peer=1) as running:
            peer = await open_session(running)
            first = asyncio.ensure_future(acquire_one(running, peer, wanted(1, remote_source(1))))
            await eventually(lambda: peers.calls == [remote_source(1)])
            second = asyncio.ensure_future(acquire_one(running, peer, wanted(2, remote_source(1), remote_source(11))))
            await eventually(lambda: world.index.stale == [(page_key(2), remote_source(11))])
            peers.go.set()  # the stream that the second page waits for comes to its end
            check(running, await first, 1)
            check(running, await second, 2)


async def test_peers_that_hang_leave_pulls_from_healthy_ones_alone() -> None:
    with stuck_world() as (world, peers):
        roomy = {"arena_bytes": 512 * SLOT_BYTES, "segment_bytes": 256 * SLOT_BYTES, "pull_threads": 4}
        async with running_engine(world, pull_stall_ms=int(1000 * PATIENCE_S), **roomy) as running:
            peer = await open_session(running)
            hung = [wanted(number, remote_source(1 + number % 2)) for number in range(150)]
            asking = asyncio.ensure_future(acquire(running, peer, hung))
            await eventually(lambda: len(peers.calls) == 4)  # as many streams as may move at once
            for number in range(1000, 1010):
                check(running, await acquire_one(running, peer, wanted(number, remote_source(11 + number % 3))), number)
            assert not asking.done()
            peers.go.set()
            for number, answer in enumerate(await asking):
                check(running, answer, number)


class FewThreads:
    """A ports.Workers with so many threads as it says."""

    threads = 3

    def __init__(self, workers: Workers) -> None:
        self.run = workers.run


async def test_more_peers_that_hang_than_threads_give_up_the_quietest_of_them() -> None:
    with stuck_world() as (world, peers):
        world.wrap_workers = lambda name, workers: FewThreads(workers) if name == "pull" else workers
        async with running_engine(world, pull_stall_ms=int(1000 * PATIENCE_S), pull_threads=1) as running:
            peer = await open_session(running)
            hung = [
                asyncio.ensure_future(acquire_one(running, peer, wanted(number, remote_source(number))))
                for number in range(1, 4)
            ]
            await eventually(lambda: len(peers.calls) == 3)
            check(running, await acquire_one(running, peer, wanted(1000, remote_source(11))), 1000)
            first = await hung[0]
            assert isinstance(first.error, DeadlineExceeded) and peers.stopped == [remote_source(1)]
            assert not hung[1].done() and not hung[2].done()
            peers.go.set()
            await asyncio.gather(*hung)


class CountedClock(ManualClock):
    """Counts how often it is read: a watch that looks reads it."""

    reads = 0

    def monotonic_s(self) -> float:
        self.reads += 1
        return super().monotonic_s()


class GatedWorkers:
    """A ports.Workers that begins nothing while its gate is closed."""

    def __init__(self, workers: Workers, gate: asyncio.Event) -> None:
        self._workers = workers
        self._gate = gate
        self.threads = workers.threads

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        await self._gate.wait()
        return await self._workers.run(function, *args, **kwargs)


@pytest.mark.parametrize("threads", [1, 50])
async def test_a_stream_that_still_waits_for_slots_is_not_given_up(threads: int) -> None:
    clock, gate = CountedClock(), asyncio.Event()
    with stuck_world(clock) as (world, _):

        def wrap(name: str, workers: Workers) -> Workers:
            if name == "verify":  # also what makes segments of the arena
                return GatedWorkers(workers, gate)
            few = FewThreads(workers)
            few.threads = threads
            return few if name == "pull" else workers

        world.wrap_workers = wrap
        async with running_engine(world, hedge_ms=20, pull_stall_ms=50) as running:
            peer = await open_session(running)
            asking = [
                asyncio.ensure_future(acquire_one(running, peer, wanted(number, remote_source(10 + number))))
                for number in (1, 2)
            ]
            for _ in range(3):
                clock.advance(1.0)
                clock.reads = 0
                await eventually(lambda: clock.reads > 4)
            gate.set()
            for number, answer in enumerate(await asyncio.gather(*asking), 1):
                check(running, answer, number)
