"""However a session ends, nothing of it is left: no mapping, no slot, no descriptor, no task."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.engine_items import load_to_proto, store_to_proto
from kvpool.client.hashing import Prompt
from kvpool.core.chunks import ChunkRange
from kvpool.core.errors import Draining, InvalidRequest, KvPoolError, Stopped
from kvpool.testing import eventually
from kvpool.v1 import gpuagent_pb2
from kvpool_gpuagent import stream
from kvpool_server import session_stream
from tests.fixtures.agent import SPEC, Agent, EngineProcess, World, prompt, run_store, running_agent
from tests.fixtures.raw_engine import RawEngine, raw_engine


def lent(engine: EngineProcess) -> bool:
    """Whether the agent still has descriptors or mappings of the engine's memory."""
    return any(region.is_lent() for region in engine.regions)


def open_descriptors() -> int:
    """Of this process that are an engine's memory."""
    paths = (path.resolve() for path in Path("/proc/self/fd").iterdir())
    return sum("memfd:kvpool-engine" in str(path) for path in paths)


async def gone(agent: Agent, world: World, engine: EngineProcess) -> None:
    """All traces of a session have gone."""
    await eventually(lambda: not agent.engine.sessions and not lent(engine))
    assert all(pool.closed and not pool.slots_out for pool in world.pools)


def chain_of(registered: Any, chunk_count: int) -> Prompt:
    tokens = list(range(chunk_count * SPEC.chunk_tokens))
    return Prompt.of(registered.hash_key, tokens, SPEC.chunk_tokens)


def load(span: ChunkRange) -> gpuagent_pb2.EngineLoadRequest:
    return load_to_proto(span, 60_000)


async def stored(world: World, agent: Agent, engine: EngineProcess) -> Prompt:
    """Two chunks of a prompt, stored by an engine that has left."""
    session = await engine.open()
    chain = prompt(session, 2)
    engine.compute(chain, range(2))
    await run_store(session, engine.span(chain, range(2)))
    assert await session.close()
    await gone(agent, world, engine)
    return chain


@pytest.mark.parametrize("waits_at", ["acquire", "page", "scatter"])
async def test_an_engine_that_is_killed_in_a_load_leaves_nothing(waits_at: str) -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        chain = await stored(world, agent, engine)
        step = f"page {chain.hashes[1][0]} 0" if waits_at == "page" else waits_at
        if waits_at != "scatter":
            world.faults.gates[step] = asyncio.Event()
        async with raw_engine(agent.endpoint) as raw:
            await raw.ready(engine)
            await raw.send(2, load=load(engine.span(chain, range(2))))
            if waits_at == "scatter":
                await raw.next("load_progress")
            else:
                await eventually(lambda: step in world.faults.steps)
            assert lent(engine)
        await gone(agent, world, engine)
        assert agent.metric("abnormal_session_ends_total") == 1
        engine.close()


async def test_an_engine_that_is_killed_between_gathered_and_kept_leaves_nothing_visible() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            registered = await raw.ready(engine)
            span = engine.span(chain_of(registered, 2), range(2))
            await raw.send(2, store=store_to_proto(span, None))
            assert (await raw.next("gathered")).chunk_count == 2
            assert world.pools[0].slots_out == 2
        await gone(agent, world, engine)
        assert not world.cluster.pages
        assert not world.cluster.writing
        engine.close()


async def test_kept_that_never_comes_counts_as_not_kept() -> None:
    world = World()
    async with running_agent(world, kept_timeout_ms=20) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            registered = await raw.ready(engine)
            span = engine.span(chain_of(registered, 1), range(1))
            await raw.send(2, store=store_to_proto(span, None))
            await raw.next("gathered")
            await raw.send(2, kept=gpuagent_pb2.EngineKept(kept=True, chunk_count=7))  # of no window
            done = await raw.next("store_done")
            assert (done.stored_chunks, list(done.failed_chunks)) == (0, [0])
            assert not world.cluster.pages
        await gone(agent, world, engine)
        engine.close()


async def test_a_cancel_does_not_wait_for_kept() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            registered = await raw.ready(engine)
            span = engine.span(chain_of(registered, 1), range(1))
            await raw.send(2, store=store_to_proto(span, None))
            await raw.next("gathered")
            await raw.send(2, cancel=gpuagent_pb2.EngineCancel(target_request_id=2))
            assert (await raw.next("store_done")).failed_chunks == [0]
        await gone(agent, world, engine)
        engine.close()


@pytest.mark.parametrize("lent_handles", [0, 2])
async def test_an_engine_that_leaves_while_it_registers_leaves_no_descriptor(lent_handles: int) -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        before = open_descriptors()
        async with raw_engine(agent.endpoint) as raw:
            registered = await raw.register(engine)
            await raw.lend(engine, registered, range(lent_handles))
            assert lent(engine) == bool(lent_handles)
        await gone(agent, world, engine)
        assert open_descriptors() == before
        engine.close()


async def test_descriptors_that_do_not_come_end_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "OFFER_TIMEOUT_S", 0.2)
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)

        async def one_was_offered() -> bool:
            """Before the time for it was over, which this machine may have stood still for."""
            async with raw_engine(agent.endpoint) as raw:
                registered = await raw.register(engine)
                with suppress(KvPoolError):
                    await raw.lend(engine, registered, range(1))
                error = await raw.end()
            assert isinstance(error, InvalidRequest) and "were not offered" in error.message, error
            await gone(agent, world, engine)
            return "handles [1, 2, 3] were not offered" in error.message

        await eventually(one_was_offered)
        engine.close()


async def test_an_engine_that_reads_nothing_is_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_stream, "OUTBOX_MAX", 50)
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            await raw.ready(engine)
            flooding = asyncio.ensure_future(_flood(raw))
            await gone(agent, world, engine)
            assert await raw.end() is not None  # who is writing gets an error of its own library's making
            await asyncio.gather(flooding, return_exceptions=True)
        assert "does not read its answers" in caplog.text
        engine.close()


async def _flood(raw: RawEngine) -> None:
    """Ask what is refused, again and again, and read none of it."""
    for request_id in count(2):
        await raw.send(request_id)


async def test_only_an_explicit_close_is_a_normal_end() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            await raw.ready(engine)
            await raw.call.done_writing()
            assert isinstance(await raw.end(), Stopped)
        await gone(agent, world, engine)
        assert agent.metric("abnormal_session_ends_total") == 1
        engine.close()


async def test_the_first_message_must_be_register_and_only_the_first() -> None:
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            await raw.send(1, match=gpuagent_pb2.EngineMatchRequest())
            error = await raw.end()
            assert isinstance(error, InvalidRequest)
            assert "must be `register`" in error.message
        async with raw_engine(agent.endpoint) as raw:
            await raw.ready(engine)
            await raw.send(7, register=gpuagent_pb2.EngineRegister())
            assert "not expected" in (await raw.next("error")).message
            await raw.send(8)
            assert "without a known kind" in (await raw.next("error")).message
        engine.close()


async def test_nothing_is_served_before_ready() -> None:
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            registered = await raw.register(engine)
            span = engine.span(chain_of(registered, 1), range(1))
            await raw.send(2, load=load(span))
            assert "wait for `ready`" in (await raw.next("error")).message
        engine.close()


async def test_request_ids_are_positive_and_unique() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            registered = await raw.ready(engine)
            span = engine.span(chain_of(registered, 1), range(1))
            for request_id in (0, -4):
                await raw.send(request_id, load=load(span))
                assert "must be > 0" in (await raw.next("error")).message
            await raw.send(5, store=store_to_proto(span, None))
            await raw.next("gathered")
            await raw.send(5, load=load(span))
            assert "unique" in (await raw.next("error")).message
        await gone(agent, world, engine)
        engine.close()


async def test_a_draining_agent_ends_its_sessions_and_takes_no_more() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            registered = await raw.ready(engine)
            await raw.send(2, store=store_to_proto(engine.span(chain_of(registered, 1), range(1)), None))
            await raw.next("gathered")
            await agent.engine.close()
            assert not lent(engine)
            assert not world.cluster.pages
            assert isinstance(await raw.end(), Draining)
        with pytest.raises(Draining):
            await engine.open()
        engine.close()
