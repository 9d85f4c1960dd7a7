"""How calls of the pool without an agent end over a real pagestore: cancelled, too late, closed, or with a bad copy."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.pagestore import PageStoreSession
from kvpool.client.store_config import StoreConfig
from kvpool.client.store_pool import AsyncStorePages
from kvpool.client.store_sync import StorePages
from kvpool.client.store_values import ChunkPlace, KeyspaceShards, OpenedShards
from kvpool.core.grid import ShardGrid
from kvpool.testing import eventually
from tests.fixtures.pagestore import KEYSPACE, SPEC, new_world
from tests.fixtures.pagestore_calls import open_session, reserve_item
from tests.fixtures.pagestore_server import Served, served
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.standstill import stood_still
from tests.unit.client.test_store_pool import Index

REPOSITORY = Path(__file__).parents[3]
CHAIN = ChunkPlace.chain([bytes([number]) * 16 for number in range(1, 4)])
SPACE = OpenedShards(
    space=KeyspaceShards.of("test", SPEC, ShardGrid.of(SPEC).whole_chunk(2)), keyspace=KEYSPACE, hash_key=bytes(32)
)
WAIT_S = PATIENCE_S


class Copies:
    """A copy that begins, and goes on until it is let go."""

    def __init__(self) -> None:
        self.began, self.go_on, self.running = threading.Event(), threading.Event(), 0

    def __call__(self, position: int, shard: int, payload: memoryview) -> None:
        self.running += 1
        self.began.set()
        assert self.go_on.wait(WAIT_S)
        self.running -= 1

    async def begun(self) -> None:
        await asyncio.to_thread(self.began.wait, WAIT_S)


def config(store: Served, **changes: Any) -> StoreConfig:
    limits = ("match_timeout_s", "load_timeout_s", "store_timeout_s", "room_wait_s", "connect_timeout_s")
    given = {"index_endpoints": ["unused:1"], "pagestore": store.endpoint}
    return StoreConfig.of(given | dict.fromkeys(limits, PATIENCE_S) | changes)


@asynccontextmanager
async def pool_of(store: Served, **changes: Any) -> AsyncIterator[AsyncStorePages]:
    index: Any = Index(*[len(CHAIN)] * 20)
    pool = AsyncStorePages(config(store, **changes), "test", index=index)
    try:
        yield pool
    finally:
        await pool.close()


async def stored(pool: AsyncStorePages) -> None:
    def fill(position: int, shard: int, payload: memoryview) -> None:
        payload[:] = bytes([position + 1]) * payload.nbytes

    assert await pool.put(SPACE, CHAIN, fill) == [True] * len(CHAIN)


async def test_memory_is_mapped_before_the_first_call_and_no_more_once_it_is_closed() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:")

    gc.collect()  # mappings of tests before
    with new_world() as world:
        async with served(world) as store:
            store.running.engine.preparation.start()
            await eventually(lambda: not store.running.engine.preparation.goes_on, WAIT_S)
            own = mapped()  # of the pagestore, which is in this process
            assert own
            async with pool_of(store) as pool:
                pool.prepare()
                await eventually(lambda: mapped() > own, WAIT_S)
                assert mapped() == own + 1, "what the tenant has: others may need the rest"
                await stored(pool)
            await eventually(lambda: mapped() == own, WAIT_S)


@pytest.mark.parametrize("kind", ["get", "put"])
async def test_a_cancelled_call_ends_after_its_last_copy(kind: str) -> None:
    with new_world() as world:
        async with served(world) as store, pool_of(store) as pool:
            if kind == "get":
                await stored(pool)
            copies = Copies()
            call = asyncio.create_task(getattr(pool, kind)(SPACE, CHAIN, copies))
            await copies.begun()
            everything = asyncio.all_tasks() - {asyncio.current_task()}
            for task in everything:  # as a loop that ends does it
                if task is call or task.get_name() == "kvpool copy":
                    task.cancel()
            await asyncio.wait([call], timeout=0.05)
            assert not call.done() and copies.running
            copies.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not copies.running


async def test_a_copy_that_fails_costs_its_caller_and_leaks_no_slot() -> None:
    def bad(position: int, shard: int, payload: memoryview) -> None:
        raise ValueError("no such tensor")

    with new_world() as world:
        async with served(world) as store, pool_of(store) as pool:
            with pytest.raises(ValueError, match="no such tensor"):
                await pool.put(SPACE, CHAIN, bad)
            await stored(pool)
            with pytest.raises(ValueError, match="no such tensor"):
                await pool.get(SPACE, CHAIN, bad)
            await eventually(lambda: store.running.engine.gauges().leases == 0, WAIT_S)
            assert await pool.get(SPACE, CHAIN, lambda *_: None) == [True] * 3


async def test_a_call_behind_others_waits_no_longer_than_its_own_limit() -> None:
    with new_world() as world:
        async with served(world) as store, pool_of(store, calls_in_flight=1) as pool:
            await stored(pool)
            copies = Copies()
            first = asyncio.create_task(pool.get(SPACE, CHAIN, copies))
            await copies.begun()
            second = asyncio.create_task(pool.get(SPACE, CHAIN, copies))
            await asyncio.sleep(0)
            stood_still(2 * PATIENCE_S)
            assert await second == [False] * 3
            assert "its time" in pool.counts.last_failure
            copies.go_on.set()
            await first


async def test_a_store_that_is_faster_than_the_disk_waits_for_it() -> None:
    chain = ChunkPlace.chain([bytes([number]) * 16 for number in range(1, 41)])  # 80 pages, and 32 may be dirty
    with new_world() as world:
        async with served(world) as store, pool_of(store, pages_in_flight=80) as pool:
            assert await pool.put(SPACE, chain, lambda *_: None) == [True] * len(chain)


async def test_a_store_for_which_no_room_comes_is_refused_soon() -> None:
    with new_world() as world:
        async with served(world) as store, pool_of(store, room_wait_s=0.05) as pool:
            peer = await open_session(store.running)
            await store.running.engine.pages.reserve(peer, [reserve_item(number) for number in range(100, 132)])
            assert await asyncio.wait_for(pool.put(SPACE, CHAIN, lambda *_: None), WAIT_S) == [False] * 3
            assert "cap" in pool.counts.last_failure


async def test_closing_the_pool_ends_calls_with_misses_after_their_copies() -> None:
    with new_world() as world:
        async with served(world) as store:
            pool: Any = await asyncio.to_thread(StorePages, config(store), "test")
            copies = Copies()
            waiting = asyncio.create_task(asyncio.to_thread(pool.put, SPACE, CHAIN, copies))
            await copies.begun()
            closing = asyncio.create_task(asyncio.to_thread(pool.close))

            async def refuses() -> bool:
                await asyncio.to_thread(pool.put, SPACE, [], copies)
                return str(pool.counts.last_failure).startswith("store: ")

            await eventually(refuses, WAIT_S)
            assert not waiting.done()
            copies.go_on.set()
            assert await waiting == [False] * 3 and not copies.running
            await closing
            assert await asyncio.to_thread(pool.get, SPACE, CHAIN, copies) == [False] * 3
            assert not await asyncio.to_thread(pool.clear, SPACE)
            assert await asyncio.to_thread(pool.open, SPACE.space) is None


def use_a_pool_in_a_forked_process() -> None:
    given = {"index_endpoints": ["127.0.0.1:1"], "pagestore": "unix:/nobody", "connect_timeout_s": 0.2}
    pool = StorePages(StoreConfig.of(given), "test")
    child = os.fork()
    if not child:  # pragma: no cover - another process
        missed = pool.get(SPACE, CHAIN, lambda *_: None) == pool.put(SPACE, CHAIN, lambda *_: None) == [False] * 3
        pool.close()
        os._exit(0 if missed and pool.open(SPACE.space) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.find(SPACE, CHAIN) == [False] * 3 and pool.counts.failed_calls == 1
    pool.close()


def test_a_forked_process_misses_and_harms_nothing_of_its_parent() -> None:
    """In a process of its own: gRPC hangs or crashes where a forked process collects channels of earlier tests."""
    run = f"from {__name__} import use_a_pool_in_a_forked_process; use_a_pool_in_a_forked_process()"
    ended = subprocess.run(
        [sys.executable, "-c", run], capture_output=True, text=True, timeout=PATIENCE_S, cwd=REPOSITORY, check=False
    )
    assert ended.returncode == 0, ended.stderr


async def test_pages_of_a_pool_that_trusts_the_arena_are_sealed_once_by_the_pagestore_for_one_that_does_not() -> None:
    taken: list[bytes] = []

    def take(position: int, shard: int, payload: memoryview) -> None:
        taken.append(bytes(payload[:1]))

    with new_world() as world:
        async with (
            served(world, linger_ms=60_000) as store,
            pool_of(store, trusts_arena=True) as pool,
            pool_of(store) as other,
        ):
            await stored(pool)
            assert await pool.get(SPACE, CHAIN, take) == [True] * len(CHAIN)
            pages = len(taken)
            assert store.running.metric("sealed_pages_total") == 0
            for _ in range(2):
                assert await other.get(SPACE, CHAIN, take) == [True] * len(CHAIN)
            assert store.running.metric("sealed_pages_total") == pages
            assert len(taken) == 3 * pages and set(taken) == {b"\1", b"\2", b"\3"}


async def test_a_slot_of_another_size_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        async with served(world) as store, pool_of(store) as pool:
            reserve = PageStoreSession.reserve

            async def smaller(*arguments: Any, **named: Any) -> Any:
                results = await reserve(*arguments, **named)
                slot = results[0].slot
                assert slot is not None
                object.__setattr__(slot, "page_bytes", slot.page_bytes - 8)
                return results

            monkeypatch.setattr(PageStoreSession, "reserve", smaller)
            touched: set[tuple[int, int]] = set()
            stored = await pool.put(SPACE, CHAIN, lambda position, shard, _: touched.add((position, shard)))
            assert stored == [False, True, True] and (0, 1) not in touched and (0, 2) in touched


async def test_an_idle_pool_lets_go_of_the_arena_of_a_pagestore_that_crashed() -> None:
    with new_world() as world:
        async with served(world) as store:
            index: Any = Index(*[len(CHAIN)] * 20)
            pool = AsyncStorePages(config(store), "test", index=index)
            await stored(pool)
        async with served(world) as store:
            await eventually(lambda: store.running.engine.gauges().sessions == 1)
            await eventually(lambda: store.running.engine.gauges().arena_quarantined_bytes == 0)
            await pool.close()
