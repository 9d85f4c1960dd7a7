"""The vLLM connector's scheduler against an agent: what a request that waits for blocks has leased."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial

import pytest

from kvpool.connectors.vllm.agent_connection import AgentConnection
from kvpool.connectors.vllm.kv_groups import KvCache, KvCacheGroup
from kvpool.connectors.vllm.scheduler import ConnectorScheduler
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.testing import eventually
from tests.fixtures.agent import BLOCK_TOKENS, CLIENT, SPEC, Agent, EngineProcess, World, running_agent
from tests.fixtures.agent import run_store as store_span
from tests.fixtures.patience import PATIENCE_S
from tests.unit.connectors.vllm_fakes import FakeRequest, a_request

CHUNKS = 3
BLOCKS = list(range(CHUNKS * SPEC.chunk_tokens // BLOCK_TOKENS + 1))


@dataclass
class Scheduler:
    """A scheduler's side, and a request whose prompt was stored."""

    side: ConnectorScheduler
    request: FakeRequest
    world: World
    agent: Agent

    @property
    def leased_chunks(self) -> float:
        """Of leases that were answered, whatever they could have."""
        return sum(self.agent.metric("leased_chunks_total", outcome=outcome) for outcome in ("held", "staged", "left"))

    @property
    def held(self) -> int:
        """Slots that are out."""
        return sum(pool.slots_out for pool in self.world.pools)

    async def waits(self) -> int:
        """The request is matched, gets no blocks, and has a lease."""
        self.side.on_new_request(self.request)
        await eventually(partial(_planned, self.side, self.request))
        tokens = self.side.get_num_new_matched_tokens(self.request, 0)
        self.side.build_jobs({}, (), lambda _: [BLOCKS])
        await eventually(lambda: self.held == CHUNKS)
        assert tokens is not None
        return tokens


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    world = World(window_pages=64)
    async with running_agent(world) as agent:
        world.index.answer = world.pages_here
        engine = EngineProcess(agent.endpoint)
        worker = await engine.open()
        connection = AgentConnection(lambda: [replace(engine.plan, regions=(), match_only=True)], CLIENT)
        await eventually(lambda: connection.pools)
        request = a_request(CHUNKS * SPEC.chunk_tokens + 1)
        chain = connection.pools[0].prompt(request.all_token_ids)
        engine.compute(chain, range(CHUNKS))
        await store_span(worker, engine.span(chain, range(CHUNKS)))
        settings = VllmSettings(
            agent=agent.endpoint, chunk_tokens=SPEC.chunk_tokens, min_load_tokens=1, match_timeout_s=PATIENCE_S
        )
        side = ConnectorScheduler(
            settings,
            connection,
            KvCache(groups=[KvCacheGroup(block_tokens=BLOCK_TOKENS, chunk_bytes=1 << 17)], prefix_caching=True),
            worker_count=1,
        )
        yield Scheduler(side, request, world, agent)
        assert await asyncio.to_thread(connection.close)
        await worker.close()
        engine.close()
    assert all(not pool.slots_out for pool in world.pools)


async def test_a_lease_is_held_while_the_request_waits_and_until_its_load_has_ended(scheduler: Scheduler) -> None:
    tokens = await scheduler.waits()
    scheduler.side.allocated(scheduler.request, [BLOCKS], tokens)
    scheduler.side.build_jobs({}, (), lambda _: [BLOCKS])
    assert scheduler.held == CHUNKS
    scheduler.side.finished_recving(["r"])
    await eventually(lambda: not scheduler.held)


async def test_an_aborted_request_has_no_lease(scheduler: Scheduler) -> None:
    await scheduler.waits()
    scheduler.side.request_finished(scheduler.request, [[]], "FINISHED_ABORTED")
    await eventually(lambda: not scheduler.held)


async def test_a_lease_that_is_given_back_before_it_was_sent_is_not_kept(scheduler: Scheduler) -> None:
    side, request = scheduler.side, scheduler.request
    side.on_new_request(request)
    await eventually(partial(_planned, side, request))
    side.build_jobs({}, (), lambda _: [BLOCKS])
    side.request_finished(request, [[]], "FINISHED_ABORTED")
    await eventually(lambda: scheduler.leased_chunks == CHUNKS)
    await eventually(lambda: not scheduler.held)


async def test_a_scheduler_that_closes_leaves_no_lease(scheduler: Scheduler) -> None:
    await scheduler.waits()


async def _planned(side: ConnectorScheduler, request: FakeRequest) -> bool:
    return bool(side.get_num_new_matched_tokens(request, 0))
