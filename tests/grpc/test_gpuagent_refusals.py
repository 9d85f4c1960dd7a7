"""What an agent refuses an engine, and how: by name, and without hurting the session."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool.client.engine_items import load_to_proto, store_to_proto
from kvpool.client.hashing import Prompt
from kvpool.core.errors import InvalidRequest, KeyspaceMismatch, NotServed, Overloaded, PartitionRefused
from kvpool.testing import eventually
from kvpool.v1 import gpuagent_pb2
from tests.fixtures.agent import SPEC, EngineProcess, World, prompt, run_load, run_store, running_agent
from tests.fixtures.layout_presets import vllm_nhd_layout
from tests.fixtures.raw_engine import raw_engine


async def test_bad_requests_are_refused_and_the_session_goes_on() -> None:
    world = World()
    async with running_agent(world, max_request_chunks=4) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        assert session.max_request_chunks == 4
        chain = prompt(session, 6)
        span = engine.span(chain, range(3))
        twice = replace(span, block_ids=span.block_ids[[0, 0, 2]])
        outside = replace(span, block_ids=np.where(span.block_ids == span.block_ids[0, 3], 10_000, span.block_ids))
        for bad, named in (
            (twice, "twice"),
            (outside, r"chunks\[0\].block_ids must lie in"),
            (engine.span(chain, range(5)), "1 to 4 chunks, got 5"),
            (replace(span, group_head_hashes=()), "group_head_hashes"),
        ):
            with pytest.raises(InvalidRequest, match=named):
                await run_load(session, bad)
        engine.compute(chain, range(3))
        assert (await run_store(session, span)).stored_chunks == 3
        await session.close()
        engine.close()


def ids(*blocks: int) -> bytes:
    return np.array(blocks, dtype="<i8").tobytes()


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "hashes cut off": ({"chunk_hashes": bytes(31)}, "chunk_hashes must be a multiple of 16 bytes, got 31"),
    "no chunks": ({"chunk_hashes": b""}, "1 to 4 chunks, got 0"),
    "too many chunks": ({"chunk_hashes": bytes(16) * 8}, "1 to 4 chunks, got 8"),
    "more chunks than blocks": ({"chunk_hashes": bytes(48)}, "equally many blocks for each of 3 chunks, got 8"),
    "blocks cut off": ({"block_ids": bytes(63)}, "block_ids must be little-endian int64, got 63 bytes"),
    "no blocks": ({"block_ids": b""}, "4 blocks of 8 tokens for each of 2 chunks, got 0"),
    "too few blocks": ({"block_ids": ids(0, 1, 2, 3, 4, 5)}, "4 blocks of 8 tokens for each of 2 chunks, got 6"),
    "too many blocks": ({"block_ids": bytes(8 * 100_000)}, "for each of 2 chunks, got 100000"),
    "negative": ({"block_ids": ids(0, 1, 2, 3, 4, -1, 6, 7)}, r"chunks\[1\].block_ids must lie in .* got -1 to 7"),
    "huge": ({"block_ids": ids(0, (1 << 63) - 1, 2, 3, 4, 5, 6, 7)}, r"chunks\[0\].block_ids must lie in"),
}
HOSTILE_LOADS: dict[str, tuple[dict[str, Any], str]] = {
    "twice": ({"block_ids": ids(0, 1, 2, 3, 4, 0, 6, 7)}, "block_ids names block 0 twice"),
    "skips the chunk": ({"skip_tokens": SPEC.chunk_tokens}, r"chunks\[0\].skip_tokens must lie in"),
    "skips before it": ({"skip_tokens": -1}, r"chunks\[0\].skip_tokens must lie in"),
    "skips far beyond": ({"skip_tokens": (1 << 63) - 1}, r"chunks\[0\].skip_tokens must lie in"),
}


@pytest.mark.parametrize("case", [*HOSTILE, *HOSTILE_LOADS])
async def test_packed_arrays_that_do_not_fit_are_refused_before_anything_is_touched(case: str) -> None:
    world = World()
    async with running_agent(world, max_request_chunks=4) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            registered = await raw.ready(engine)
            chain = Prompt.of(registered.hash_key, list(range(2 * SPEC.chunk_tokens)), SPEC.chunk_tokens)
            span = engine.span(chain, range(2))
            changes, named = (HOSTILE | HOSTILE_LOADS)[case]
            requests: list[gpuagent_pb2.EngineLoadRequest | gpuagent_pb2.EngineStoreRequest]
            requests = [load_to_proto(span, 1000)]
            if case in HOSTILE:
                requests.append(store_to_proto(span, None))
            for request in requests:
                for field, value in changes.items():
                    setattr(request, field, value)
                await raw.send(2, **{"load" if request is requests[0] else "store": request})
                error = await raw.refusal()
                assert isinstance(error, InvalidRequest)
                assert re.search(named, str(error)), error
        assert not world.pools[0].asked
        engine.close()


async def test_a_load_only_rank_does_not_store() -> None:
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint, load_only=True)
        session = await engine.open()
        with pytest.raises(NotServed, match="load_only"):
            await run_store(session, engine.span(prompt(session, 1), range(1)))
        await session.close()
        engine.close()


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"block_tokens": 7}, InvalidRequest, "block_tokens 7"),
        ({"first_layer": 3}, InvalidRequest, "layers"),
        ({"block_count": 10_000}, InvalidRequest, r"layers\[0\].planes\[0\]"),
    ],
)
async def test_a_layout_that_does_not_fit_is_refused_by_name_before_anything_is_opened(
    changes: dict[str, int], error: type[Exception], named: str
) -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        engine.plan = replace(engine.plan, layout=replace(engine.plan.layout, **changes))  # type: ignore[arg-type]
        with pytest.raises(error, match=named):
            await engine.open()
        assert world.index.opened == []
        assert not agent.engine.sessions
        engine.close()


async def test_a_partition_that_is_no_union_of_shards_is_refused_naming_the_grid() -> None:
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        layout = vllm_nhd_layout(SPEC, range(2), range(2), 8, 4)
        engine.plan = replace(engine.plan, layout=layout, regions=engine.regions[:2])
        engine.plan = replace(
            engine.plan, layout=replace(layout, handle_sizes=tuple(region.size_bytes for region in engine.regions[:2]))
        )
        with pytest.raises(PartitionRefused, match=r"1 layer groups .* 2 KV heads in 1, 2 parts"):
            await engine.open()
        engine.close()


async def test_what_the_index_refuses_the_engine_learns() -> None:
    world = World()

    def refuse(step: str) -> None:
        if step == "open_keyspace":
            raise KeyspaceMismatch("keyspace chat differs in dtype", field="dtype")

    world.faults.before = refuse
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        with pytest.raises(KeyspaceMismatch, match="dtype"):
            await engine.open()
        assert not agent.engine.sessions
        engine.close()


async def test_sessions_are_counted_and_limited() -> None:
    async with running_agent(World(), max_sessions=1) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        other = EngineProcess(agent.endpoint)
        with pytest.raises(Overloaded, match="1 engine sessions"):
            await other.open()
        await session.close()
        await eventually(lambda: not agent.engine.sessions)
        again = await other.open()
        await again.close()
        engine.close()
        other.close()


async def test_one_process_of_this_host_cannot_take_all_sessions() -> None:
    """gRPC does not say which process a unix socket's peer is; the descriptor socket does."""
    async with running_agent(World(), max_sessions=4) as agent:
        engine = EngineProcess(agent.endpoint)
        sessions = [await engine.open() for _ in range(2)]
        with pytest.raises(Overloaded, match=f"of process {os.getpid()}"):
            await engine.open()
        await eventually(lambda: len(agent.engine.sessions) == 2)
        await sessions.pop().close()
        await eventually(lambda: len(agent.engine.sessions) == 1)
        sessions.append(await engine.open())
        for session in sessions:
            assert await session.close()
        engine.close()


async def test_one_address_cannot_take_all_sessions() -> None:
    async with running_agent(World(), max_sessions=4) as agent, AsyncExitStack() as stack:
        engine = EngineProcess(agent.tcp_endpoint)
        peers = [await stack.enter_async_context(raw_engine(agent.tcp_endpoint)) for _ in range(3)]
        for peer in peers[:2]:
            await peer.register(engine)
        await peers[2].send(1, register=peers[2].registration(engine))
        error = await peers[2].end()
        assert isinstance(error, Overloaded) and "half of all engine sessions" in error.message
        engine.close()


async def test_requests_beyond_the_limit_are_refused_while_answers_still_come() -> None:
    """The stream is read on: the running stores wait for `kept`, which comes on it."""
    world = World()
    async with running_agent(world, max_running_requests=1) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 6)
        world.faults.gates["reserve"] = asyncio.Event()
        handles = [await session.store(engine.span(chain, [chunk])) for chunk in range(6)]
        for handle in handles[2:]:
            with pytest.raises(Overloaded):
                await handle.done(60)
        world.faults.gates["reserve"].set()
        assert (await handles[0].done(60)).stored_chunks == 1
        await session.close()
        engine.close()
