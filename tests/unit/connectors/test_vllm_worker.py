"""What a worker's side of the vLLM connector does with its jobs, whatever the pool does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any

from kvpool.client.engine_items import LoadResult, StoreResult, TierTokens
from kvpool.client.handle import AsyncHandle
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_events import StepEvents
from kvpool.connectors.vllm.step_jobs import LoadJob, LoadReport, StepJobs, StoreReport
from kvpool.connectors.vllm.worker import ConnectorWorker
from kvpool.connectors.vllm.worker_stores import WorkerKvCache, WorkerKvCacheGroup
from kvpool.core.errors import ServiceUnavailable
from kvpool.core.tracing import TraceParent
from kvpool.testing import ManualClock
from tests.fixtures.patience import PATIENCE_S
from tests.unit.connectors.vllm_fakes import FakeConnection
from tests.unit.connectors.vllm_jobs import BLOCK, CHUNK, CHUNK_BYTES, a_load, a_store

BLOCKS = tuple(range(100, 108))


class Pool:
    """Loads `loaded` chunks of what it is asked for, and stores everything."""

    def __init__(self, loaded: int = 4) -> None:
        self.loaded = loaded
        self.session = SimpleNamespace(max_request_chunks=0)
        self.fails = False
        self.asked: list[dict[str, Any]] = []
        self.kept: list[bool] = []
        self.before_kept: Callable[[], None] = lambda: None
        self.hold_ends = True

    async def start_load(self, chain: Any, blocks: Any, **values: Any) -> AsyncHandle[LoadResult]:
        return AsyncHandle(lambda _: self.load(chain, blocks, **values))

    async def load(self, chain: Any, blocks: Any, **values: Any) -> LoadResult:
        self.asked.append({"chain": chain, "blocks": blocks.tolist(), **values})
        if self.fails:
            raise RuntimeError("planted")
        first, end = values["first_chunk"], values["end_chunk"]
        loaded = min(self.loaded, end - first)
        failed = tuple(range(first + loaded, end))
        error = ServiceUnavailable("gone") if failed else None
        return LoadResult(first, loaded, failed, error=error, tokens=TierTokens(staging=loaded * CHUNK))

    async def begin_store(self, chain: Any, blocks: Any, chunks: range, *, still_valid: Any, **values: Any) -> Any:
        span = {"first_chunk": chunks.start, "end_chunk": chunks.stop}
        self.asked.append({"chain": chain, "blocks": blocks.tolist(), **span, **values})
        self.before_kept()
        valid = still_valid(len(chunks))
        self.kept.append(await valid if isawaitable(valid) else valid)
        return Ticket(len(chunks), self.hold_ends)


class Ticket:
    """Of a store."""

    def __init__(self, chunks: int, hold_ends: bool) -> None:
        self._chunks, self._hold_ends = chunks, hold_ends

    async def wait_released(self) -> None:
        if not self._hold_ends:
            raise asyncio.CancelledError  # stands for a wait that has no end here

    async def done(self, timeout_s: float) -> StoreResult:
        return StoreResult(self._chunks, 0, {})


class World:
    """A worker's side over such a pool."""

    def __init__(self, pool: Pool | None, *, load_only: bool = False, **settings: Any) -> None:
        self.clock, self.connection = ManualClock(), FakeConnection(pool)
        self.side = ConnectorWorker(
            VllmSettings(agent="unix:/x", chunk_tokens=CHUNK, **settings),
            self.connection,  # type: ignore[arg-type]
            WorkerKvCache(
                groups=[WorkerKvCacheGroup(block_tokens=BLOCK, page_bytes=CHUNK_BYTES, step_events=StepEvents(None))],
                load_only=load_only,
            ),
            now_s=self.clock.monotonic_s,
        )

    def load(self, *, first_token: int = 0, end_token: int = 128, trace: TraceParent | None = None) -> None:
        first_chunk = first_token // CHUNK
        job = a_load("r", BLOCKS, first_chunk=first_chunk, first_token=first_token, end_token=end_token, trace=trace)
        self.side.start_loads(StepJobs(step=1, loads=[job]))

    def store(self, *, release: bool = False, trace: TraceParent | None = None) -> None:
        job = a_store(1, "r", BLOCKS, first_chunk=1, trace=trace)
        self.side.start_stores(StepJobs(step=1, stores=[job], release=["r"] if release else []))


def an_unknown_load() -> LoadJob:
    """Of which nothing is known but its blocks, all of them."""
    return a_load("r", BLOCKS, end_chunk=0, end_token=128, timeout_s=0.0)


def end_of(world: World) -> LoadReport | StoreReport:
    (end,) = world.side.take_reports()
    return end


def test_a_load_ends_for_the_engine_only_when_the_agent_has_stopped_writing() -> None:
    told_before: list[set[str]] = []

    class Held(AsyncHandle[LoadResult]):
        async def wait_released(self, timeout_s: float | None = None) -> None:
            told_before.append(set(world.side.take_finished_recving()))

    class HoldingPool(Pool):
        async def start_load(self, chain: Any, blocks: Any, **values: Any) -> AsyncHandle[LoadResult]:
            return Held(lambda _: self.load(chain, blocks, **values))

    world = World(HoldingPool(loaded=2))
    world.load()
    assert told_before == [set()]
    assert world.side.take_finished_recving() == {"r"}


def test_a_load_that_comes_in_whole() -> None:
    pool = Pool()
    world = World(pool)
    world.load(first_token=48)
    assert world.side.take_finished_recving() == {"r"}
    assert world.side.take_failed_blocks() == set()
    assert (pool.asked[0]["first_chunk"], pool.asked[0]["skip_tokens"]) == (1, 16)
    end = end_of(world)
    assert isinstance(end, LoadReport)
    assert (end.result.loaded_chunks, end.failed_chunks, end.size_bytes, end.result.tokens.staging) == (3, 0, 3000, 96)
    assert world.side.take_finished_recving() == set()


def test_blocks_that_did_not_come_are_named_with_the_request() -> None:
    world = World(Pool(loaded=1))
    world.load(end_token=127)
    assert world.side.take_finished_recving() == {"r"}
    assert world.side.take_failed_blocks() == set(BLOCKS[2:])
    end = end_of(world)
    assert isinstance(end, LoadReport) and end.result.error is not None


def test_a_load_without_an_agent_fails_at_once() -> None:
    world = World(None)
    world.load()
    assert world.side.take_finished_recving() == {"r"}
    assert world.side.take_failed_blocks() == set(BLOCKS)


def test_an_unexpected_error_costs_the_load_only() -> None:
    pool = Pool()
    pool.fails = True
    world = World(pool)
    world.load()
    assert world.side.take_finished_recving() == {"r"}
    assert world.side.take_failed_blocks() == set(BLOCKS)


def test_a_load_under_way_is_not_received() -> None:
    world = World(Pool())
    world.connection.held = True
    world.load()
    assert world.side.take_finished_recving() == set()
    world.connection.go()
    assert world.side.take_finished_recving() == {"r"}


def test_blocks_are_released_when_their_stores_have_ended() -> None:
    world = World(Pool())
    world.connection.held = True
    world.store(release=True)
    assert world.side.take_finished_sending() == set()
    world.connection.go()
    assert world.side.take_finished_sending() == {"r"}
    end = end_of(world)
    assert isinstance(end, StoreReport)
    assert (end.stored_chunks, end.size_bytes) == (3, 3000)


def test_an_engine_that_goes_waits_for_the_stores_that_have_begun() -> None:
    world = World(Pool())
    world.connection.held = True
    world.store(release=True)
    waiting = threading.Thread(target=world.side.finish_stores, args=[PATIENCE_S])
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    world.connection.go()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    world.side.finish_stores(PATIENCE_S)  # nothing runs any more
    end = end_of(world)
    assert isinstance(end, StoreReport)
    assert end.stored_chunks == 3


def test_blocks_of_a_running_request_are_never_reported() -> None:
    world = World(Pool())
    world.store()
    assert world.side.take_finished_sending() == set()
    world.side.start_stores(StepJobs(step=2, release=["r"]))
    assert world.side.take_finished_sending() == {"r"}


def test_blocks_are_kept_for_a_bounded_time() -> None:
    pool = Pool()
    world = World(pool, store_hold_max_s=20.0)
    world.connection.held = True
    world.store(release=True)
    world.clock.advance(21.0)
    assert world.side.take_finished_sending() == {"r"}
    world.connection.go()
    assert world.side.take_finished_sending() == set()
    end = end_of(world)
    assert isinstance(end, StoreReport)
    assert (end.skipped_chunks, end.failed_chunks, pool.asked) == (3, 0, [])


def test_what_is_read_while_the_hold_ends_is_thrown_away() -> None:
    pool = Pool()
    world = World(pool, store_hold_max_s=20.0)

    def wait_too_long() -> None:
        world.clock.advance(21.0)
        released.update(world.side.take_finished_sending())

    pool.before_kept, released = wait_too_long, set[str]()
    world.connection.held = True
    world.store(release=True)
    world.connection.go()
    assert (released, pool.kept) == ({"r"}, [False])


def test_what_was_read_of_a_preempted_requests_blocks_is_thrown_away() -> None:
    pool = Pool()
    world = World(pool)
    pool.before_kept = lambda: world.side.handle_preemptions(StepJobs(step=2, preempted=["r", "another"]))
    world.store()
    assert pool.kept == [False]


def test_a_request_that_is_preempted_gives_up_what_it_has_queued() -> None:
    pool = Pool()
    world = World(pool)
    world.connection.held = True
    world.store()
    world.side.handle_preemptions(StepJobs(step=2, preempted=["r"]))
    world.connection.go()
    end = end_of(world)
    world.side.take_finished_sending()
    assert isinstance(end, StoreReport)
    assert (end.skipped_chunks, pool.asked) == (3, [])


def test_a_rank_with_anothers_heads_stores_nothing() -> None:
    pool = Pool()
    world = World(pool, load_only=True)
    world.store(release=True)
    assert pool.asked == []
    assert world.side.take_finished_sending() == {"r"}


def test_a_store_without_an_agent_holds_nothing() -> None:
    world = World(None)
    world.store(release=True)
    assert world.side.take_finished_sending() == {"r"}
    end = end_of(world)
    assert isinstance(end, StoreReport)
    assert end.failed_chunks == 3


def test_chunks_that_were_not_stored_are_counted() -> None:
    class Partial(Ticket):
        async def done(self, timeout_s: float) -> StoreResult:
            return StoreResult(2, 0, {1: ServiceUnavailable("gone")})

    class PartialPool(Pool):
        async def begin_store(self, chain: Any, blocks: Any, chunks: range, *, still_valid: Any, **values: Any) -> Any:
            return Partial(3, True)

    world = World(PartialPool())
    world.store()
    end = end_of(world)
    assert isinstance(end, StoreReport)
    assert (end.stored_chunks, end.failed_chunks) == (2, 1)
    assert "gone" in end.failure


def test_a_scheduler_in_the_same_process_hears_of_whole_loads_itself() -> None:
    world = World(Pool())
    world.load()
    assert world.side.take_finished_recving() == {"r"}, "the scheduler has not asked yet"
    assert isinstance(end_of(world), LoadReport)
    assert world.side.take_arrived() == ()
    world.load()
    assert world.side.take_finished_recving() == set()
    assert world.side.take_reports() == ()
    (end,) = world.side.take_arrived()
    assert (end.request_id, end.result.loaded_chunks, end.failed_chunks) == ("r", 4, 0)
    assert world.side.take_arrived() == ()


def test_a_load_that_failed_is_heard_of_together_with_its_blocks() -> None:
    world = World(Pool(loaded=3))
    world.side.take_arrived()
    world.load()
    assert world.side.take_arrived() == ()
    assert world.side.take_finished_recving() == {"r"}
    assert world.side.take_failed_blocks() == set(BLOCKS[6:])
    assert end_of(world).failed_chunks == 1


def test_a_load_of_which_nothing_is_known_did_not_come_in_whole() -> None:
    world = World(Pool())
    world.side.take_arrived()
    world.side.start_loads(StepJobs(step=1, loads=[an_unknown_load()]))
    assert world.side.take_arrived() == ()
    assert (world.side.take_finished_recving(), world.side.take_failed_blocks()) == ({"r"}, set(BLOCKS))
