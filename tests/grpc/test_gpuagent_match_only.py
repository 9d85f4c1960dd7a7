"""An engine's scheduler, which has no cache: it asks what exists, of any shards, on any device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.client.gpuagent import EngineSession
from kvpool.core.errors import InvalidRequest
from kvpool.core.grid import ShardGrid
from tests.fixtures.agent import CLIENT, EngineProcess, World, prompt, run_load, run_store, running_agent


async def test_a_scheduler_asks_for_all_shards_and_can_do_nothing_else() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        rank = await engine.open()
        scheduler = await EngineSession.open(replace(engine.plan, regions=(), match_only=True), CLIENT)
        chain = prompt(rank, 4)
        assert scheduler.hash_key == rank.hash_key
        await scheduler.match(chain.hashes)
        assert world.index.queries[0].shards == ShardGrid.of(rank.spec).all_shards
        for run in (run_store, run_load):
            with pytest.raises(InvalidRequest, match="match_only"):
                await run(scheduler, engine.span(chain, range(3)))
        assert await scheduler.close()
        assert scheduler.released.is_set()
        assert await rank.close()
        engine.close()


async def test_a_scheduler_comes_back_to_an_agent_that_ended_its_session() -> None:
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        scheduler = await EngineSession.open(replace(engine.plan, regions=(), match_only=True), CLIENT)
        again = await scheduler.reopen()
        assert (await again.match([b"h" * 16])).matched_chunks == 0
        assert await again.close()
        engine.close()


async def test_a_scheduler_brings_no_memory() -> None:
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        with pytest.raises(InvalidRequest, match="match_only"):
            await EngineSession.open(replace(engine.plan, match_only=True), CLIENT)
        engine.close()
