"""Leases of an engine's scheduler, over real sockets: on a real pagestore, and what ends or refuses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from kvpool.client import gpuagent
from kvpool.client.engine_requests import LeaseHandle
from kvpool.client.gpuagent import EngineSession
from kvpool.client.hashing import Prompt
from kvpool.client.pool import AsyncPool
from kvpool.core.errors import Draining, InvalidRequest, KvPoolError, NotServed, Overloaded
from kvpool.testing import eventually
from kvpool.v1.gpuagent_pb2 import EngineLeaseHeld, EngineRequest, EngineResponse
from kvpool.wire.convert import item_error_from_proto
from kvpool_pagestore.engine.removal import EvictTarget
from tests.fixtures.agent import CLIENT, Agent, EngineProcess, World, prompt, run_load, run_store, running_agent
from tests.fixtures.pagestore import TENANT, new_world
from tests.fixtures.pagestore_server import Served, served
from tests.fixtures.patience import PATIENCE_S
from tests.grpc.test_gpuagent_arena import KEYSPACE, ArenaWorld, agent_on

LONG_S = 1e4
CHUNKS = 6


class AnsweredLease(LeaseHandle):
    """One that shows its agent's answer."""

    def __init__(self, send: Callable[[EngineRequest], None], broken: asyncio.Event) -> None:
        super().__init__(send, broken)
        self.answer: asyncio.Future[EngineLeaseHeld] = asyncio.get_running_loop().create_future()

    def deliver(self, response: EngineResponse) -> bool:
        if response.HasField("error"):
            self.answer.set_exception(item_error_from_proto(response.error))
        else:
            self.answer.set_result(response.lease_held)
        return super().deliver(response)


@pytest.fixture(autouse=True)
def _answered_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpuagent, "LeaseHandle", AnsweredLease)


async def held(lease: LeaseHandle) -> EngineLeaseHeld:
    """How much of it could be had. raises: what refused it."""
    assert isinstance(lease, AnsweredLease)
    return await asyncio.wait_for(asyncio.shield(lease.answer), PATIENCE_S)


ALL_HELD = EngineLeaseHeld(held_chunks=CHUNKS, staged_chunks=CHUNKS)


@dataclass(kw_only=True)
class Host:
    """An agent beside a pagestore of 64 slots, an engine's worker and its scheduler. A chunk is one page."""

    store: Served
    agent: Agent
    world: ArenaWorld
    engine: EngineProcess
    worker: EngineSession
    scheduler: EngineSession

    async def stored(self, chunk_count: int = CHUNKS, seed: int = 1) -> Prompt:
        """A prompt whose chunks are staged and on disk."""
        chain = prompt(self.worker, chunk_count, seed)
        self.engine.compute(chain, range(chunk_count))
        stored = await run_store(self.worker, self.engine.span(chain, range(chunk_count)))
        assert stored.stored_chunks == chunk_count
        await self.store.running.engine.flush(TENANT, KEYSPACE)
        self.engine.clear()
        return chain

    async def press(self) -> None:
        """Store twice as much as the arena has room for."""
        for seed in range(100, 112):
            await self.stored(11, seed)

    async def lease(self, chain: Prompt, chunk_count: int = CHUNKS) -> EngineLeaseHeld:
        handle = await self.scheduler.lease(chain, range(chunk_count), hold_s=LONG_S)
        return await held(handle)

    async def load(self, chain: Prompt) -> Any:
        loaded = await run_load(self.worker, self.engine.span(chain, range(CHUNKS)))
        assert loaded.loaded_chunks == CHUNKS
        assert self.engine.holds(chain, range(CHUNKS))
        return loaded.tokens

    @property
    def leases(self) -> int:
        return self.store.running.engine.gauges().leases


@asynccontextmanager
async def host() -> AsyncIterator[Host]:
    with new_world() as world:
        async with served(world) as store, agent_on(world) as (agent, arena_world):
            engine = EngineProcess(agent.endpoint)
            worker, scheduler = await engine.open(), await scheduler_of(engine)
            yield Host(store=store, agent=agent, world=arena_world, engine=engine, worker=worker, scheduler=scheduler)
            await scheduler.close()
            await worker.close()
            await eventually(lambda: store.running.engine.gauges().leases == 0)
            engine.close()


async def scheduler_of(engine: EngineProcess) -> EngineSession:
    return await EngineSession.open(replace(engine.plan, regions=(), match_only=True), CLIENT)


@pytest.mark.parametrize("leases", [True, False])
async def test_leased_pages_are_still_there_when_the_arena_was_needed_by_others(leases: bool) -> None:
    async with host() as one:
        chain = await one.stored()
        if leases:
            assert await one.lease(chain) == ALL_HELD
        await one.press()
        tokens = await one.load(chain)
        assert tokens.staging == (CHUNKS * 32 if leases else 0)
        assert tokens.disk == (0 if leases else CHUNKS * 32)


@pytest.mark.parametrize("leases", [True, False])
async def test_pages_that_are_only_on_disk_are_staged_before_the_load_begins(leases: bool) -> None:
    async with host() as one:
        chain = await one.stored()
        wanted = EvictTarget(keyspace=KEYSPACE, whole_keyspace=True, staging_only=True)
        await one.store.running.engine.evicting.evict(TENANT, wanted)
        if leases:
            assert await one.lease(chain) == ALL_HELD
        tokens = await one.load(chain)
        assert (tokens.staging, tokens.disk) == ((CHUNKS * 32, 0) if leases else (0, CHUNKS * 32))


async def test_what_leases_hold_is_bounded_and_the_rest_is_staged() -> None:
    async with host() as one:
        chain = await one.stored(12)
        found = await one.lease(chain, 12)
        assert found.held_chunks < 8  # a quarter of the arena is 16 slots, and a session has half of that
        assert found.staged_chunks == 12
        await eventually(lambda: one.leases == found.held_chunks)  # those of the last window are on their way back
        for number in range(18):  # a hostile session: what does not fit passes through what is left, or is refused
            handle = await one.scheduler.lease(chain, range(number % 6, 12), hold_s=LONG_S)
            with suppress(Overloaded):
                await held(handle)
            await eventually(lambda: one.leases <= 8)
        await one.press()


async def test_a_lease_ends_when_its_engine_says_so_or_leaves() -> None:
    async with host() as one:
        chain = await one.stored()
        handle = await one.scheduler.lease(chain, range(3), hold_s=LONG_S)
        assert (await held(handle)).held_chunks == 3
        assert one.leases == 3
        handle.end()
        handle.end()
        assert handle.ended
        await eventually(lambda: one.leases == 0)
        await one.lease(chain)
        assert one.leases
        assert one.agent.metric("leased_pages") == CHUNKS
        await one.scheduler.close()
        await eventually(lambda: one.leases == 0)
        assert one.agent.metric("leased_pages") == 0


async def test_an_end_that_is_sent_with_the_lease_ends_it() -> None:
    async with host() as one:
        chain = await one.stored()
        for _ in range(20):
            handle = await one.scheduler.lease(chain, range(CHUNKS), hold_s=LONG_S)
            handle.end()
            await held(handle)
            await eventually(lambda: one.leases == 0)


async def test_a_lease_ends_after_its_time() -> None:
    async with host() as one:
        chain = await one.stored()
        handle = await one.scheduler.lease(chain, range(CHUNKS), hold_s=0.001)
        await held(handle)
        await eventually(lambda: one.leases == 0)


async def test_a_pagestore_that_dies_under_leases_is_used_again_when_it_is_back() -> None:
    """The agent's next session with it waits until every slot of the last one was given back."""
    with new_world() as world:
        async with agent_on(world) as (agent, arena_world):
            engine = EngineProcess(agent.endpoint)
            async with served(world) as store:
                worker, scheduler = await engine.open(), await scheduler_of(engine)
                chain = prompt(worker, 4)
                engine.compute(chain, range(4))
                await run_store(worker, engine.span(chain, range(4)))
                await store.running.engine.flush(TENANT, b"")
                lease = await scheduler.lease(chain, range(4), hold_s=LONG_S)
                assert (await held(lease)).held_chunks == 4
            await eventually(lambda: arena_world.link.slots_out == 0)
            async with served(world):
                await eventually(partial(_loads, worker, engine, chain))
                await scheduler.close()
                await worker.close()
            engine.close()


async def _loads(worker: EngineSession, engine: EngineProcess, chain: Prompt) -> bool:
    loaded = await run_load(worker, engine.span(chain, range(4)))
    return bool(loaded.loaded_chunks == 4)


async def test_without_a_pagestore_leases_are_refused_and_loads_go_on() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        worker, scheduler = await engine.open(), await scheduler_of(engine)
        for pool in world.pools:
            pool.arena_bytes = 0
        chain = prompt(worker, 2)
        engine.compute(chain, range(2))
        await run_store(worker, engine.span(chain, range(2)))
        handle = await scheduler.lease(chain, range(2), hold_s=LONG_S)
        with pytest.raises(NotServed):
            await held(handle)
        assert handle.ended
        assert (await run_load(worker, engine.span(chain, range(2)))).loaded_chunks == 2
        await scheduler.close()
        await worker.close()
        engine.close()


async def test_malformed_leases_are_refused_and_the_session_goes_on() -> None:
    async with running_agent(World(), max_request_chunks=4) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 6)
        broken = replace(chain, packed=b"x" * 16 + chain.packed[16:])
        for chunks, of in (
            (range(6), chain),
            (range(0), chain),
            (range(1, 3), replace(chain, packed=chain.packed[:45])),
        ):
            with pytest.raises(KvPoolError) as refused:
                await held(await session.lease(of, chunks, hold_s=1.0))
            assert isinstance(refused.value, InvalidRequest)
        assert (await held(await session.lease(broken, range(4), hold_s=1.0))).staged_chunks == 0
        await session.close()
        engine.close()


async def test_a_lease_of_a_broken_session_has_ended() -> None:
    async with running_agent(World(window_pages=64)) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 2)
        engine.compute(chain, range(2))
        await run_store(session, engine.span(chain, range(2)))
        handle = await session.lease(chain, range(2), hold_s=LONG_S)
        assert (await held(handle)).held_chunks == 2
        await agent.engine.close()
        await asyncio.wait_for(session.broken.wait(), PATIENCE_S)
        assert handle.ended
        handle.end()
        with pytest.raises(Draining):
            await session.lease(chain, range(2), hold_s=LONG_S)
        await session.close()
        engine.close()


async def test_a_pool_leases_what_one_request_may_name_and_nothing_without_an_agent() -> None:
    async with running_agent(World(window_pages=64), max_request_chunks=4) as agent:
        engine = EngineProcess(agent.endpoint)
        pool = await AsyncPool.open(engine.plan, CLIENT)
        chain = prompt(pool.session, 6)
        engine.compute(chain, range(6))
        for first in (0, 4):
            await run_store(pool.session, engine.span(chain, range(first, min(first + 4, 6))))
        handle = await pool.lease(chain, first_chunk=0, end_chunk=6, hold_s=LONG_S)
        assert handle is not None
        assert (await held(handle)).held_chunks == 4
        with pytest.raises(InvalidRequest):
            await pool.lease(chain, first_chunk=2, end_chunk=7, hold_s=LONG_S)
        await pool.close()
        assert await pool.lease(chain, first_chunk=0, end_chunk=6, hold_s=LONG_S) is None
        engine.close()
