"""An engine's session with an agent, over real sockets: register, match, store, load, close."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvpool.client.engine_items import EngineSource
from kvpool.client.gpuagent_control import AgentControl
from kvpool.core.cluster import ChainMatch, Location, MatchRun, NodeInfo, NodeKind
from kvpool.core.errors import InvalidRequest, Stopped
from kvpool.core.outcome import Tier
from kvpool.core.page import HEADER_BYTES, PageKey
from kvpool.core.retention import Retention
from kvpool.testing import eventually
from kvpool_gpuagent.engine.loading import LoadRun
from tests.fixtures.agent import (
    CLIENT,
    NODE_ID,
    EngineProcess,
    World,
    prompt,
    run_load,
    run_store,
    running_agent,
)
from tests.fixtures.agent_fakes import MemoryPool

LOCAL = MemoryPool.local_node_id
OTHER = b"o" * 16


async def test_what_one_engine_stores_another_loads() -> None:
    world = World()
    async with running_agent(world) as agent:
        writer, reader = EngineProcess(agent.endpoint), EngineProcess(agent.endpoint)
        first, second = await writer.open(), await reader.open()
        chain = prompt(first, 6)
        writer.compute(chain, range(6))
        stored = await run_store(first, writer.span(chain, range(6)))
        assert (stored.stored_chunks, stored.deduplicated_chunks, stored.failed_chunks) == (6, 0, {})
        assert len(world.cluster.pages) == 6

        loaded = await run_load(second, reader.span(chain, range(6), at=3))
        assert (loaded.loaded_chunks, loaded.failed_chunks, loaded.error) == (6, (), None)
        assert (loaded.tokens.staging, loaded.tokens.total) == (6 * 32, 6 * 32)
        assert reader.holds(chain, range(6), at=3)

        assert await first.close()
        assert await second.close()
        assert first.released.is_set()
        await eventually(lambda: not agent.engine.sessions)
        assert all(pool.closed and not pool.slots_out for pool in world.pools)
        assert agent.metric("abnormal_session_ends_total") == 0
        assert agent.metric("loaded_tokens_total", source="staging") == 6 * 32
        writer.close()
        reader.close()


async def test_a_second_store_is_deduplicated() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 3)
        engine.compute(chain, range(3))
        await run_store(session, engine.span(chain, range(2)))
        stored = await run_store(session, engine.span(chain, range(3)))
        assert (stored.stored_chunks, stored.deduplicated_chunks) == (1, 2)
        await session.close()
        engine.close()


async def test_the_first_tokens_of_a_chunk_may_be_the_engines_own() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 1)
        engine.compute(chain, range(1))
        await run_store(session, engine.span(chain, range(1)))
        before = [layer.copy() for layer in engine.memory()]
        engine.clear()
        await run_load(session, engine.span(chain, range(1), skip_tokens=11))
        blocks = engine.blocks[0]
        for now, then in zip(engine.memory(), before, strict=True):
            tokens_now = now[:, blocks].reshape(2, 32, -1)
            tokens_then = then[:, blocks].reshape(2, 32, -1)
            assert not tokens_now[:, :11].any()
            assert np.array_equal(tokens_now[:, 11:], tokens_then[:, 11:])
        await session.close()
        engine.close()


async def test_progress_comes_layer_by_layer_group() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 2)
        engine.compute(chain, range(2))
        await run_store(session, engine.span(chain, range(2)))
        seen: list[tuple[int, tuple[int, ...]]] = []
        handle = await session.load(
            engine.span(chain, range(2)), wait_s=60, on_progress=lambda *progress: seen.append(progress)
        )
        await handle.done(60)
        assert seen == [(4, ())]  # this small a grid has one layer group
        await session.close()
        engine.close()


async def test_pages_come_layer_by_layer_where_the_engine_hears_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class Noted(LoadRun):
        def __init__(self, *arguments: Any, by_layer: bool) -> None:
            asked.append(by_layer)
            super().__init__(*arguments, by_layer=by_layer)

    monkeypatch.setattr("kvpool_gpuagent.engine.session.LoadRun", Noted)
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 1)
        engine.compute(chain, range(1))
        await run_store(session, engine.span(chain, range(1)))
        await run_load(session, engine.span(chain, range(1)))
        heard = await session.load(engine.span(chain, range(1)), wait_s=60, on_progress=lambda *_: None)
        await heard.done(60)
        assert asked == [False, True]
        await session.close()
        engine.close()


async def test_a_match_names_the_sources_and_counts_what_the_engine_holds() -> None:
    world = World()
    nodes = {
        LOCAL: NodeInfo(node_id=LOCAL, kind=NodeKind.PAGESTORE, bulk_endpoint="here:1"),
        OTHER: NodeInfo(node_id=OTHER, kind=NodeKind.PAGESTORE, bulk_endpoint="there:1"),
    }

    def run(count: int, node_id: bytes, tier: Tier) -> MatchRun:
        return MatchRun(chunk_count=count, locations=(Location(node_id=node_id, incarnation=7, tier=tier, shards=0b1),))

    world.index.answer = lambda query: ChainMatch(
        matched_chunks=6,
        runs=(run(3, LOCAL, Tier.STAGING), run(2, LOCAL, Tier.DISK), run(1, OTHER, Tier.DISK)),
        nodes=nodes,
    )
    async with running_agent(world, host_id="here") as agent:
        engine = EngineProcess(agent.endpoint, chunk_count=40)
        session = await engine.open()
        chain = prompt(session, 30)
        found = await session.match(chain.hashes, held_chunks=18)
        assert found.matched_chunks == 18 + 6
        assert [(one.chunk_count, one.source) for one in found.runs] == [
            (3, EngineSource.STAGING),
            (2, EngineSource.DISK),
            (1, EngineSource.REMOTE),
        ]
        assert found.estimated_load_ms == 0  # nothing was measured yet
        (query,) = world.index.queries
        assert (query.first_chunk_index, query.chunk_count, query.shards, query.host_id) == (18, 12, 0b1, "here")
        assert query.group_head_hash == chain.hashes[16]

        # The load that follows asks the sources of the match, without another look-up.
        await run_load(session, engine.span(chain, range(22, 24)))
        assert len(world.index.queries) == 1
        asked = {one.metadata.chunk_index: one for one in world.pools[0].asked}
        assert [source.bulk_endpoint for source in asked[23].sources] == ["there:1"]
        assert asked[22].sources == ()
        await session.close()
        engine.close()


async def test_an_engine_that_holds_everything_asks_no_agent() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 3)
        assert (await session.match(chain.hashes, held_chunks=3)).matched_chunks == 3
        assert world.index.queries == []
        for held in (-1, 4):
            with pytest.raises(InvalidRequest, match="held_chunks"):
                await session.match(chain.hashes, held_chunks=held)
        await session.close()
        engine.close()


async def test_estimates_come_from_measured_loads() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 4)
        engine.compute(chain, range(4))
        await run_store(session, engine.span(chain, range(4)))
        await run_load(session, engine.span(chain, range(4)))
        local = (Location(node_id=LOCAL, incarnation=7, tier=Tier.STAGING, shards=0b1),)
        world.index.answer = lambda query: ChainMatch(
            matched_chunks=4, runs=(MatchRun(chunk_count=4, locations=local),)
        )
        assert (await session.match(chain.hashes)).estimated_load_ms > 0
        await session.close()
        engine.close()


async def test_retention_reaches_the_pages() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 1)
        handle = await session.store(engine.span(chain, range(1)), retention=Retention(ttl_ms=9, priority=-2))
        await handle.done(60)
        kept = world.pools[0].asked[0].metadata
        assert (kept.ttl_ms, kept.priority) == (9, -2)
        await session.close()
        engine.close()


async def test_the_status_names_device_pool_and_sessions() -> None:
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        control = AgentControl(agent.tcp_endpoint, CLIENT)
        status = await control.status()
        assert (status.node_id, status.device, status.page_pool) == (NODE_ID, "cpu", "arena")
        assert [(one.engine_name, one.keyspace_name, one.active_requests) for one in status.sessions] == [
            ("engine", "chat", 0)
        ]
        await control.close()
        await session.close()
        engine.close()


async def test_a_cancelled_load_ends_soon_and_says_so() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 2)
        engine.compute(chain, range(2))
        await run_store(session, engine.span(chain, range(2)))
        world.faults.gates["acquire"] = asyncio.Event()
        handle = await session.load(engine.span(chain, range(2)), wait_s=60)
        await eventually(lambda: "acquire" in world.faults.steps)
        held = handle.released
        assert not held
        handle.cancel()
        outcome = await handle.done(60)
        assert (outcome.loaded_chunks, outcome.failed_chunks) == (0, (0, 1))
        assert isinstance(outcome.error, Stopped)
        assert handle.released
        await session.close()
        engine.close()


async def test_a_store_whose_blocks_were_not_kept_leaves_nothing() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 2)
        handle = await session.store(engine.span(chain, range(2)), kept=lambda chunk_count: False)
        outcome = await handle.done(60)
        assert outcome.stored_chunks == 0
        assert isinstance(outcome.failed_chunks[0], Stopped)
        assert not world.cluster.pages
        assert not world.pools[0].slots_out
        await session.close()
        engine.close()


async def test_a_page_of_wrong_bytes_is_not_loaded() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 3)
        engine.compute(chain, range(3))
        await run_store(session, engine.span(chain, range(3)))
        engine.clear()
        key = PageKey(session.keyspace, chain.hashes[1], 0)
        page = bytearray(world.cluster.pages[key])
        page[HEADER_BYTES + 5] ^= 4
        world.cluster.pages[key] = bytes(page)
        outcome = await run_load(session, engine.span(chain, range(3)))
        assert (outcome.loaded_chunks, outcome.failed_chunks) == (1, (1, 2))
        assert engine.holds(chain, [0])
        assert not any(layer[:, engine.blocks[1]].any() for layer in engine.memory())
        assert agent.metric("verification_failures_total") == 1
        await session.close()
        engine.close()


async def test_ranks_of_other_tp_degrees_read_what_one_stored() -> None:
    """By a match of the same session, and by asking the index at the load."""
    world = World()
    world.index.answer = world.pages_here
    async with running_agent(world) as agent:
        whole = EngineProcess(agent.endpoint)
        first = await whole.open()
        chain = prompt(first, 4)
        whole.compute(chain, range(4))
        assert (await run_store(first, whole.span(chain, range(4)))).stored_chunks == 4
        assert {key.shard for key in world.cluster.pages} == {0}
        halves = []
        for head in range(2):
            halves.append(EngineProcess(agent.endpoint, heads=range(head, head + 1)))
            session = await halves[head].open()
            if head:
                assert (await session.match(chain.hashes)).matched_chunks == 4
            assert (await run_load(session, halves[head].span(chain, range(4)))).loaded_chunks == 4
            await session.close()
        for number, layer in enumerate(whole.memory()):
            rows = layer[:, whole.blocks[:4]].reshape(2, 4 * 32, 2, -1)  # [k, v][token][head]
            for head, half in enumerate(halves):
                own = half.memory()[number][:, half.blocks[:4]].reshape(2, 4 * 32, -1)
                assert np.array_equal(own, rows[:, :, head])
        await first.close()
        for engine in (whole, *halves):
            engine.close()
