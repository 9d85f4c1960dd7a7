"""What moves pages between nodes goes on after a restart of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvpool.core.errors import ArenaFull, DrainBlocked, Draining, KvPoolError, StoreUnavailable
from kvpool.testing import eventually
from kvpool_pagestore.engine.drain import Drain, DrainState
from tests.fixtures.movement import Cluster, Member, MemberPlacement, cluster_of, join, start
from tests.fixtures.pagestore import TENANT
from tests.fixtures.pagestore_calls import open_session, reserve_item, store
from tests.fixtures.patience import PATIENCE_S

PAGES = range(192)  # twelve chain groups, of which four are moved at once


@dataclass
class Restarting:
    """A member whose process can be ended and started."""

    cluster: Cluster
    member: Member
    process: AsyncExitStack
    blocked: threading.Event = field(default_factory=threading.Event)
    unblocked: threading.Event = field(default_factory=threading.Event)

    @property
    def drain(self) -> Drain:
        return self.member.run.engine.drain

    def block(self) -> None:
        """Hold up the sender of a page, on its thread."""
        self.blocked.set()
        self.unblocked.wait(PATIENCE_S)

    def is_in(self, state: DrainState) -> bool:
        return self.drain.state is state

    async def restart(self, **changes: Any) -> None:
        await self.process.aclose()
        self.process = AsyncExitStack()
        await start(self.member, self.process, **changes)
        self.member.alive = True

    async def fill(self) -> None:
        peer = await open_session(self.member.run)
        for first in range(PAGES.start, PAGES.stop, 8):
            assert await store(self.member.run, peer, range(first, first + 8)) == [None] * 8
            await self.member.run.engine.flush(TENANT, b"")

    def held_by(self, at: int) -> int:
        return sum(at in self.cluster.holders_of(number) for number in PAGES)

    async def begin_drain(self) -> None:
        """Drain until some pages are away; then the watch ends."""
        watching = self.drain.watch()
        async for progress in watching:
            if progress.moved_pages:
                break
        await watching.aclose()


async def _watched(drain: Drain) -> None:
    async with aclosing(drain.watch()) as progresses:
        async for _ in progresses:
            pass


@asynccontextmanager
async def restarting(**changes: Any) -> AsyncIterator[Restarting]:
    async with cluster_of(1) as cluster, AsyncExitStack() as worlds:
        process = AsyncExitStack()
        member = await join(cluster, worlds, 1, host="restarts", process=process, **changes)
        one = Restarting(cluster, member, process)
        try:
            yield one
        finally:
            await one.process.aclose()


async def test_a_drain_goes_on_after_a_restart_until_it_is_done() -> None:
    async with restarting() as one:
        await one.fill()
        await one.begin_drain()
        assert 0 < one.held_by(0) < len(PAGES)
        await one.restart()
        assert one.is_in(DrainState.DRAINING), "no page is taken from the start"
        peer = await open_session(one.member.run)
        (refused,) = await one.member.run.engine.pages.reserve(peer, [reserve_item(1000)])
        assert isinstance(refused, Draining)
        one.drain.start()
        await eventually(lambda: one.is_in(DrainState.DRAINED))
        assert one.held_by(0) == len(PAGES)
        await eventually(lambda: not one.member.alive)  # it says that it is drained, and leaves
        await one.restart()
        assert one.is_in(DrainState.SERVING), "a restart takes a drained node back into service"


async def test_a_drain_that_goes_on_is_watched_joined_and_cancelled_like_any() -> None:
    async with restarting() as one:
        await one.fill()
        await one.begin_drain()
        await one.restart()
        one.cluster.members[0].refuse = lambda item: ArenaFull("full")
        one.drain.start()
        with pytest.raises(KvPoolError):
            async for _ in one.drain.watch():
                pass
        await one.drain.cancel()
        assert one.is_in(DrainState.SERVING) and not one.member.node.draining
        await one.restart()
        assert one.is_in(DrainState.SERVING)


def keep_the_beginning_late(one: Restarting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word that a drain began is written when the word that it was cancelled has been, if nothing forbids that."""
    memory, cancelled = one.member.world.memory, threading.Event()
    true = memory.save_value

    def slow(name: str, value: bytes) -> None:
        if name == "draining" and value:
            cancelled.wait(0.2)
        true(name, value)
        if name == "draining" and not value:
            cancelled.set()

    monkeypatch.setattr(memory, "save_value", slow)


async def test_a_drain_that_is_cancelled_at_once_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word that it began must not reach the disk after the word that it was cancelled."""
    async with restarting() as one:
        await one.fill()
        one.cluster.members[0].refuse = lambda item: ArenaFull("full")
        keep_the_beginning_late(one, monkeypatch)
        watching = one.drain.watch()
        first = asyncio.ensure_future(anext(watching))
        await eventually(lambda: one.is_in(DrainState.DRAINING))
        await one.drain.cancel()
        with suppress(KvPoolError):
            await first
        await watching.aclose()
        await one.restart()
        assert one.is_in(DrainState.SERVING)


async def test_a_drain_whose_watcher_hangs_up_as_it_begins_can_be_cancelled_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that keeps the first word goes on without its caller."""
    async with restarting() as one:
        await one.fill()
        one.cluster.members[0].refuse = lambda item: ArenaFull("full")
        keep_the_beginning_late(one, monkeypatch)
        watching = one.drain.watch()
        first = asyncio.ensure_future(anext(watching))
        await eventually(lambda: one.is_in(DrainState.DRAINING))
        first.cancel()
        await asyncio.wait([first])
        await one.drain.cancel()
        await one.restart()
        assert one.is_in(DrainState.SERVING)


async def test_a_watcher_that_hangs_up_at_the_very_end_leaves_a_drained_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async with restarting() as one:
        memory, ending = one.member.world.memory, threading.Event()
        true, hung_up = memory.save_value, threading.Event()

        def slow(name: str, value: bytes) -> None:
            if name == "draining" and not value:
                ending.set()
                hung_up.wait(PATIENCE_S)
            true(name, value)

        monkeypatch.setattr(memory, "save_value", slow)
        watching = asyncio.ensure_future(_watched(one.drain))
        await eventually(ending.is_set)
        watching.cancel()
        await asyncio.wait([watching])
        hung_up.set()
        assert one.is_in(DrainState.DRAINED) and not one.member.alive
        with pytest.raises(DrainBlocked, match="is drained"):
            await one.drain.cancel()
        assert [progress.done async for progress in one.drain.watch()] == [True]
        await one.restart()
        assert one.is_in(DrainState.SERVING)


async def test_a_cancel_that_the_index_does_not_hear_ends_the_watching_too() -> None:
    async with restarting() as one:
        await one.fill()
        one.cluster.members[0].refuse = lambda item: one.block()
        watching = asyncio.ensure_future(_watched(one.drain))
        await eventually(one.blocked.is_set)
        one.cluster.reachable = False
        cancelling = asyncio.ensure_future(one.drain.cancel())
        one.unblocked.set()
        with pytest.raises(StoreUnavailable):
            await cancelling
        with pytest.raises(KvPoolError):
            await asyncio.wait_for(watching, PATIENCE_S)
        assert one.is_in(DrainState.DRAINING), "to be cancelled again"


async def test_a_watch_during_the_cancel_of_a_drain_starts_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with restarting() as one:
        await one.fill()
        one.cluster.members[0].refuse = lambda item: ArenaFull("full")
        with pytest.raises(KvPoolError):
            await _watched(one.drain)
        heard, true = asyncio.Event(), MemberPlacement.set_draining

        async def slow(placement: MemberPlacement, draining: bool) -> None:
            if not draining:
                await heard.wait()
            await true(placement, draining)

        monkeypatch.setattr(MemberPlacement, "set_draining", slow)
        one.cluster.members[0].refuse = lambda item: one.block()
        cancelling = asyncio.ensure_future(one.drain.cancel())
        await asyncio.sleep(0)
        watching = asyncio.ensure_future(_watched(one.drain))
        for _ in range(5):
            await asyncio.sleep(0)
        heard.set()
        await cancelling
        await eventually(one.blocked.is_set)
        assert one.is_in(DrainState.DRAINING) and one.member.node.draining, "no pages are taken while it moves them"
        one.unblocked.set()
        await watching
        assert one.is_in(DrainState.DRAINED) and one.held_by(0) == len(PAGES)


async def test_a_drain_that_fails_without_watchers_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_pagestore.engine.drain._GO_ON_FIRST_S", 0.001)
    async with restarting() as one:
        await one.fill()
        await one.begin_drain()
        await one.restart()
        one.cluster.reachable = False
        asked = one.cluster.places
        one.drain.start()
        await eventually(lambda: one.cluster.places >= asked + 3)
        one.cluster.reachable = True
        await eventually(lambda: one.is_in(DrainState.DRAINED))
        assert one.held_by(0) == len(PAGES)


async def test_what_a_new_node_has_not_got_yet_is_brought_after_a_restart() -> None:
    fast: dict[str, Any] = {"rebalance_bytes_per_s": 1 << 30}
    async with restarting(**fast) as one, AsyncExitStack() as stack:
        await one.fill()
        await one.member.run.engine.replication.sweep()  # who is there counts as settled
        await one.restart(**fast)
        joined = await join(one.cluster, stack, 2, host="new", **fast)
        await one.member.run.engine.replication.load()
        await one.member.run.engine.replication.sweep()
        await eventually(lambda: one.held_by(2) > 0)
        assert joined.pushed_bytes


async def test_a_group_that_a_new_node_did_not_take_is_brought_by_the_next_walk() -> None:
    fast: dict[str, Any] = {"rebalance_bytes_per_s": 1 << 30}
    async with restarting(**fast) as one, AsyncExitStack() as stack:
        await one.fill()
        sweep = one.member.run.engine.replication
        await sweep.sweep()
        joined = await join(one.cluster, stack, 2, host="new", **fast)
        one.cluster.clock.advance(2.0)  # it asks the index again who is there
        joined.refuse = lambda item: ArenaFull("full just now")
        await sweep.sweep()
        refused = joined.pushed_bytes
        assert refused == 0
        joined.refuse = lambda item: None
        await sweep.sweep()
        taken = joined.pushed_bytes
        assert taken
        await sweep.sweep()
        assert joined.pushed_bytes == taken, "once it has its share, no more"
