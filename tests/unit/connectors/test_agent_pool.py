"""The pool behind an agent, over a scripted one: what is released when, and agents that come late or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from kvpool.client.engine_items import EngineMatchRun, EngineSource, TierTokens
from kvpool.client.hashing import Prompt
from kvpool.client.sync import Handle
from kvpool.connectors.agent_pool import AgentPool
from kvpool.connectors.block_memory import SharedBlockMemory
from kvpool.core.errors import KeyspaceMismatch, ServiceUnavailable, StoreUnavailable
from kvpool.testing import eventually
from kvpool.v1 import common_pb2, gpuagent_pb2, gpuagent_pb2_grpc
from kvpool.wire.convert import item_error_to_proto
from tests.fixtures.layout_presets import contiguous_layout
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.engine_peer import HASH_KEY, Engine, Response, ScriptedAgent, engine
from tests.unit.client.servers import SPEC, Script, serve

ResultT = TypeVar("ResultT")
CHAIN = tuple(bytes([number]) * 16 for number in range(20))
LAYOUT = contiguous_layout(SPEC, range(2), range(2), SPEC.chunk_tokens, 8)


class Memory(SharedBlockMemory):
    """Remembers how it was closed."""

    untouched: bool | None = None

    def close(self, *, untouched: bool) -> None:
        self.untouched = untouched
        super().close(untouched=untouched)


def pool_of(one: Engine, memory: SharedBlockMemory | None = None) -> AgentPool:
    config = replace(one.config, agent_endpoint=one.plan.endpoint)
    memory = memory or SharedBlockMemory(LAYOUT.handle_sizes[0])
    return AgentPool(SPEC, LAYOUT, "tiny", "test", config, memory, offer=one.memory.offer)


@asynccontextmanager
async def opened(**settings: Any) -> AsyncGenerator[tuple[AgentPool, Script, Engine]]:
    async with engine(**settings) as one:
        pool = pool_of(one)
        opening = asyncio.create_task(asyncio.to_thread(pool.open))
        stream, _ = await one.greet()
        await opening
        try:
            yield pool, stream, one
        finally:
            one.memory.let_go()
            stream.end()
            await asyncio.to_thread(pool.close)


def prompt(chunk_count: int) -> Prompt:
    return Prompt(SPEC.chunk_tokens, chunk_count * SPEC.chunk_tokens + 1, b"".join(CHAIN[:chunk_count]))


async def begin(work: Callable[..., Handle[ResultT]], *args: Any, **kwargs: Any) -> Handle[ResultT]:
    return await asyncio.to_thread(work, *args, **kwargs)


async def test_match_gives_runs_and_what_failed() -> None:
    async with opened() as (pool, stream, _):
        assert pool.hash_key() == HASH_KEY
        asked = asyncio.create_task(asyncio.to_thread(pool.match, prompt(4), held_chunks=1))
        request = await stream.next("match")
        assert (request.match.chunk_hashes, request.match.held_chunks) == (b"".join(CHAIN[:4]), 1)
        run = gpuagent_pb2.EngineMatchRun(chunk_count=2, source=gpuagent_pb2.ENGINE_SOURCE_DISK, estimated_load_ms=1.5)
        answer = gpuagent_pb2.EngineMatchResponse(matched_chunks=3, runs=[run])
        stream.send(Response(request_id=request.request_id, match=answer))
        assert (await asked).runs == (EngineMatchRun(2, EngineSource.DISK, 1.5),)
        asked = asyncio.create_task(asyncio.to_thread(pool.match, prompt(4)))
        request = await stream.next("match")
        stream.send(Response(request_id=request.request_id, error=item_error_to_proto(StoreUnavailable("redis"))))
        assert isinstance((await asked).error, StoreUnavailable)


async def test_a_load_names_its_blocks_and_releases_them() -> None:
    async with opened() as (pool, stream, _):
        table = [0] * 16 + [5, 2]
        load = await begin(pool.start_load, prompt(18), table, first_chunk=16, end_chunk=18, timeout_s=PATIENCE_S)
        request = await stream.next("load")
        assert request.load.chunk_hashes == CHAIN[16] + CHAIN[17]
        assert np.frombuffer(request.load.block_ids, "<i8").tolist() == [5, 2]
        assert (request.load.first_chunk_index, request.load.parent_hash) == (16, CHAIN[15])
        assert request.load.group_head_hashes == CHAIN[16]
        assert load.released is False
        done = gpuagent_pb2.EngineLoadDone(loaded_chunks=2, tokens=common_pb2.TierTokens(disk=32))
        stream.send(Response(request_id=request.request_id, load_done=done))
        loaded = await asyncio.to_thread(load.result)
        assert (loaded.loaded_chunks, loaded.tokens, loaded.error) == (2, TierTokens(disk=32), None)
        assert (load.released, load.done) == (True, True)


async def test_blocks_of_a_late_load_are_released_when_the_agent_has_stopped() -> None:
    async with opened(load_grace_s=0.05) as (pool, stream, _):
        load = await begin(pool.start_load, prompt(1), [0], first_chunk=0, end_chunk=1, timeout_s=0.2)
        request = await stream.next("load")
        loaded = await asyncio.to_thread(load.result)
        assert (loaded.loaded_chunks, load.done, load.released) == (0, True, False)
        assert "the agent was not done" in str(loaded.error)
        done = gpuagent_pb2.EngineLoadDone(loaded_chunks=0, failed_chunks=[0])
        stream.send(Response(request_id=request.request_id, load_done=done))
        await asyncio.to_thread(load.wait_released, PATIENCE_S)


async def test_a_store_releases_once_gathered_and_says_what_failed() -> None:
    async with opened() as (pool, stream, _):
        store = await begin(pool.store, prompt(3), [0, 1, 2], first_chunk=1, end_chunk=3)
        request = await stream.next("store")
        assert (request.store.first_chunk_index, request.store.parent_hash) == (1, CHAIN[0])
        assert request.store.chain_head_hash == CHAIN[0]
        assert request.store.keeps_blocks
        gathered = gpuagent_pb2.EngineGathered(chunk_count=2)
        stream.send(Response(request_id=request.request_id, gathered=gathered))
        await asyncio.to_thread(store.wait_released, PATIENCE_S)
        assert not store.done
        done = gpuagent_pb2.EngineStoreDone(
            stored_chunks=1, failed_chunks=[1], errors=[item_error_to_proto(ServiceUnavailable("full"))]
        )
        stream.send(Response(request_id=request.request_id, store_done=done))
        stored = await asyncio.to_thread(store.result)
        assert list(stored.failed_chunks) == [2]
        assert "full" in str(stored.failed_chunks[2])


async def test_after_a_break_blocks_are_held_until_the_agent_has_let_go() -> None:
    async with opened() as (pool, stream, one):
        store = await begin(pool.store, prompt(1), [0], first_chunk=0, end_chunk=1)
        await stream.next("store")
        stream.end(ServiceUnavailable("killed"))
        stored = await asyncio.to_thread(store.result)
        assert (list(stored.failed_chunks), store.released) == ([0], False)
        one.memory.let_go()
        await asyncio.to_thread(store.wait_released, PATIENCE_S)


async def test_an_agent_that_comes_late_is_used_from_then_on() -> None:
    add = gpuagent_pb2_grpc.add_GpuAgentServiceServicer_to_server
    early, late = ScriptedAgent(), ScriptedAgent()  # type: ignore[abstract]
    async with serve(add, early) as (_, endpoint):
        pass  # nothing listens there now
    async with engine() as one:
        one.plan, one.agent = replace(one.plan, endpoint=endpoint), late
        pool = pool_of(one)
        try:
            await asyncio.to_thread(pool.open)
            assert pool.hash_key() is None
            with pytest.raises(ServiceUnavailable):
                pool.store(prompt(1), [0], first_chunk=0, end_chunk=1)
            with pytest.raises(ServiceUnavailable):
                pool.match(prompt(1))
            async with serve(add, late, endpoint):
                stream, request = await one.greet()
                assert request.register.keyspace_name == "tiny"
                await eventually(lambda: pool.hash_key() == HASH_KEY)
                one.memory.let_go()
                stream.end()
        finally:
            await asyncio.to_thread(pool.close)


async def test_a_wrong_configuration_is_raised_at_once() -> None:
    async with engine() as one:
        pool = pool_of(one)
        opening = asyncio.create_task(asyncio.to_thread(pool.open))
        stream = await one.agent.streams.next()
        await stream.next("register")
        stream.end(KeyspaceMismatch("keyspace tiny has another dtype"))
        with pytest.raises(KeyspaceMismatch, match="dtype"):
            await opening
        await asyncio.to_thread(pool.close)


async def test_closing_ends_what_waits_and_may_be_repeated() -> None:
    async with opened() as (pool, stream, one):
        store = await begin(pool.store, prompt(1), [0], first_chunk=0, end_chunk=1)
        await stream.next("store")
        closing = asyncio.create_task(asyncio.to_thread(pool.close))
        await stream.next("close")
        one.memory.let_go()
        stream.end()
        await closing
        await asyncio.to_thread(pool.close)
        assert store.done and store.released


@pytest.mark.parametrize("let_go", [True, False])
async def test_memory_says_whether_the_agent_has_let_go_of_it(let_go: bool) -> None:
    async with engine(call_timeout_s=PATIENCE_S if let_go else 0.1) as one:  # that a close waits for it
        memory = Memory(LAYOUT.handle_sizes[0])
        pool = pool_of(one, memory)
        opening = asyncio.create_task(asyncio.to_thread(pool.open))
        stream, _ = await one.greet()
        await opening
        if let_go:
            one.memory.let_go()
        stream.end(ServiceUnavailable("killed"))
        await asyncio.to_thread(pool.close)
        assert memory.untouched is let_go
        one.memory.let_go()
