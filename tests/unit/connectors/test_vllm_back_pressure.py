"""Stores and loads beyond what an agent takes at once wait; none fails for that. On a real loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.client.engine_events import EventSlots
from kvpool.client.engine_items import LoadResult, StoreResult
from kvpool.client.handle import AsyncHandle
from kvpool.client.sync import BackgroundLoop
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_events import StepEvents
from kvpool.connectors.vllm.step_jobs import LoadJob, LoadReport, StepJobs, StoreJob, StoreReport
from kvpool.connectors.vllm.worker import ConnectorWorker
from kvpool.connectors.vllm.worker_stores import WorkerKvCache, WorkerKvCacheGroup
from kvpool.core.ipc import EngineEvent, IpcEvent
from kvpool.testing import eventually_sync
from tests.unit.connectors.vllm_jobs import BLOCK, CHUNK, CHUNK_BYTES, a_load, a_store


class Link:
    """A loop of its own."""

    def __init__(self, pool: SlowPool) -> None:
        self.pools, self.loop = (pool,), BackgroundLoop("test stores")

    def start(self, work: Any, trace: Any = None) -> Any:
        return self.loop.start(work)


class SlowPool:
    """Ends stores and loads when it is let."""

    def __init__(self, step_events: StepEvents) -> None:
        self.session = SimpleNamespace(max_request_chunks=0)
        self.running: list[tuple[int, range]] = []  # first block and chunks
        self.events: list[EngineEvent | None] = []
        self._work, self._may_end, self.at_once = step_events, asyncio.Semaphore(0), 0

    def let(self, connection: Link, count: int) -> None:
        async def let() -> None:
            for _ in range(count):
                self._may_end.release()

        connection.loop.run(let)

    async def _transfer(self, blocks: Any, values: dict[str, Any]) -> range:
        chunks = range(values["first_chunk"], values["end_chunk"])
        self.running.append((int(blocks[0]), chunks))
        self.events.append(values["wait_event"])
        self.at_once = max(self.at_once, len(self.running))
        try:
            await self._may_end.acquire()
        finally:
            self.running.remove((int(blocks[0]), chunks))
            if values["wait_event"] is not None:
                self._work.slots.give_back(values["wait_event"])  # type: ignore[union-attr]
        return chunks

    async def begin_store(self, chain: Any, blocks: Any, chunks: range, **values: Any) -> Any:
        values |= {"first_chunk": chunks.start, "end_chunk": chunks.stop}
        task = asyncio.create_task(self._transfer(blocks, values))
        await asyncio.sleep(0)
        return Ticket(task)

    async def start_load(self, chain: Any, blocks: Any, **values: Any) -> AsyncHandle[LoadResult]:
        async def load(_: AsyncHandle[LoadResult]) -> LoadResult:
            chunks = await self._transfer(blocks, values)
            return LoadResult(chunks.start, len(chunks))

        return AsyncHandle(load)


class Ticket:
    def __init__(self, task: asyncio.Task[range]) -> None:
        self._task = task

    async def wait_released(self) -> None:
        await self._task

    async def done(self, timeout_s: float) -> StoreResult:
        return StoreResult(len(await self._task), 0, {})


class Gpu:
    """Events of a GPU."""

    def __init__(self, count: int) -> None:
        self.slots = EventSlots([IpcEvent("GPU-", bytes(64))] * count)

    def try_record(self) -> EngineEvent | None:
        return self.slots.try_take()


class World:
    def __init__(self, events: Gpu | None = None, *, loads_wait_for_gpu: bool = True, **settings: Any) -> None:
        self.events, self.step_events = events, StepEvents(events)
        self.pool = SlowPool(self.step_events)
        self.connection = Link(self.pool)
        self.now_s = 0.0
        self.side = ConnectorWorker(
            VllmSettings(agent="unix:/x", chunk_tokens=CHUNK, **settings),
            self.connection,  # type: ignore[arg-type]
            WorkerKvCache(
                groups=[WorkerKvCacheGroup(block_tokens=BLOCK, page_bytes=CHUNK_BYTES, step_events=self.step_events)]
            ),
            loads_wait_for_gpu=loads_wait_for_gpu,
            now_s=lambda: self.now_s,
        )
        self.step, self.ends = 0, list[LoadReport | StoreReport]()

    def run(self, *, stores: list[StoreJob] | None = None, loads: list[LoadJob] | None = None, **more: Any) -> None:
        self.step += 1
        jobs = StepJobs(step=self.step, stores=stores or [], loads=loads or [], **more)
        self.side.handle_preemptions(jobs)
        self.side.start_loads(jobs)
        self.side.start_stores(jobs)

    def let_go(self) -> None:
        """The transfer that holds the only event ends."""
        self.pool.let(self.connection, 1)
        eventually_sync(lambda: self.events is not None and self.events.slots.free_count == 1)

    def ended(self, count: int) -> list[LoadReport | StoreReport]:
        """Wait for so many ends in all."""

        def enough() -> bool:
            self.ends += self.side.take_reports()
            return len(self.ends) >= count

        eventually_sync(enough)
        return self.ends


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.connection.loop.stop()


def store_of(number: int, chunks: int = 4) -> StoreJob:
    return a_store(number, f"r{number}", range(100 * number, 100 * number + 2 * chunks), end_chunk=chunks)


def load_of(number: int, timeout_s: float = 60.0) -> LoadJob:
    return a_load(f"r{number}", range(100 * number, 100 * number + 4), end_chunk=2, timeout_s=timeout_s)


def test_a_prompt_larger_than_what_may_be_in_flight_is_stored_window_by_window(worlds: list[World]) -> None:
    world = World(store_bytes_in_flight_max=4 * CHUNK_BYTES)
    worlds.append(world)
    world.run(stores=[store_of(1, chunks=10), store_of(2)], release=["r1", "r2"])
    eventually_sync(lambda: len(world.pool.running) == 2)
    assert world.pool.running == [(100, range(2)), (100, range(2, 4))]
    assert world.side.take_finished_sending() == set(), "what waits keeps its blocks"
    world.pool.let(world.connection, 5)
    eventually_sync(lambda: world.side.take_finished_sending() == {"r1"})
    world.pool.let(world.connection, 2)
    eventually_sync(lambda: world.side.take_finished_sending() == {"r2"})
    ends = [
        (end.number, end.stored_chunks, end.failed_chunks) for end in world.ended(2) if isinstance(end, StoreReport)
    ]
    assert ends == [(1, 10, 0), (2, 4, 0)]
    assert world.pool.at_once == 2


def test_a_hundred_stores_and_loads_share_one_event_of_their_step(worlds: list[World]) -> None:
    world = World(Gpu(2))
    worlds.append(world)
    world.run(stores=[store_of(number) for number in range(100)], loads=[load_of(number) for number in range(100, 200)])
    eventually_sync(lambda: len(world.pool.running) == 56)
    world.pool.let(world.connection, 200)
    assert all(not end.failed_chunks for end in world.ended(200))
    assert world.pool.at_once == 56, "an agent takes 64 at once"
    assert world.events is not None
    world.side.start_loads(StepJobs(step=9))
    assert world.events.slots.free_count == 2
    assert len({event.slot for event in world.pool.events if event is not None}) == 2  # one before the step, one behind


def test_orders_without_a_free_event_wait_for_a_later_step(worlds: list[World]) -> None:
    world = World(Gpu(1))
    worlds.append(world)
    world.run(stores=[store_of(1)])
    eventually_sync(lambda: len(world.pool.running) == 1)
    began_s = time.monotonic()
    world.run(stores=[store_of(2)], loads=[load_of(3), load_of(4, timeout_s=1.0), load_of(5)], cancel=["r5"])
    assert time.monotonic() - began_s < 5.0, "the engine does not wait"
    assert len(world.pool.running) == 1
    world.now_s = 2.0
    world.let_go()
    world.run()  # the loads have the event
    eventually_sync(lambda: len(world.pool.running) == 1)
    assert world.side.take_finished_recving() >= {"r4", "r5"}
    ends = {end.request_id: str(end.result.error) for end in world.ended(3) if isinstance(end, LoadReport)}
    assert "no event became free" in ends["r4"]
    world.let_go()
    world.run()
    world.pool.let(world.connection, 1)
    assert [end.stored_chunks for end in world.ended(5) if isinstance(end, StoreReport)] == [4, 4]


def test_loads_whose_blocks_have_no_writer_wait_for_nothing(worlds: list[World]) -> None:
    world = World(Gpu(1), loads_wait_for_gpu=False)
    worlds.append(world)
    world.run(loads=[load_of(1)], stores=[store_of(2)])
    eventually_sync(lambda: len(world.pool.running) == 2)
    assert sorted(event is None for event in world.pool.events) == [False, True]


def test_a_load_that_does_not_come_to_its_turn_in_time_is_late(worlds: list[World]) -> None:
    world = World()
    worlds.append(world)
    world.run(loads=[load_of(number) for number in range(40)])
    eventually_sync(lambda: len(world.pool.running) == 40)
    world.run(loads=[load_of(50, timeout_s=0.01)])
    (end,) = world.ended(1)
    assert isinstance(end, LoadReport)
    assert (end.timed_out, end.result.loaded_chunks) == (True, 0)
    assert world.side.take_finished_recving() == {"r50"}
