"""An agent on a real pagestore: stores and loads through the arena, and what breaks between the two."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvpool.client.pagestore import SessionPlan
from kvpool.client.segments import MapHook
from kvpool.core.errors import KvPoolError, LeaseLost, ServiceUnavailable
from kvpool.core.keyspace import KeyspaceSpec, encode_keyspace, keyspace_id
from kvpool.core.page import HEADER_BYTES
from kvpool.core.spans import PageSpan
from kvpool.testing import eventually
from kvpool_gpuagent.adapters.arena_pool import ArenaLink, ArenaPool
from kvpool_gpuagent.ports import OpenedKeyspace, PagePool
from tests.fixtures.agent import Agent, EngineProcess, World, prompt, run_load, run_store, running_agent
from tests.fixtures.agent_fakes import MemoryIndex
from tests.fixtures.pagestore import PAYLOAD_BYTES, SPEC, TENANT, chunk_hash, new_world
from tests.fixtures.pagestore import World as StoreWorld
from tests.fixtures.pagestore_server import CLIENT, served
from tests.fixtures.patience import PATIENCE_S

KEYSPACE = keyspace_id(encode_keyspace(TENANT, SPEC))
HEAD = bytes(16)


class OneKeyspace(MemoryIndex):
    """Opens the keyspace that the pagestore derives too."""

    async def open_keyspace(self, name: str, spec: KeyspaceSpec) -> OpenedKeyspace:
        return OpenedKeyspace(keyspace=KEYSPACE, hash_key=b"h" * 32)


class ArenaWorld(World):
    """Its pools lead to the pagestore that listens where `world` is."""

    def __init__(self, world: StoreWorld) -> None:
        super().__init__()
        self.index = OneKeyspace()
        self.link = link_to(world)

    def make_pool(self, keyspace: bytes, spec: KeyspaceSpec) -> PagePool:
        return ArenaPool(self.link, keyspace, spec)


def link_to(world: StoreWorld, on_map: MapHook | None = None) -> ArenaLink:
    plan = SessionPlan(endpoint=f"unix:{world.directory / 'pagestore.sock'}", peer_name="agent")
    return ArenaLink(plan, CLIENT, on_map=on_map)


@asynccontextmanager
async def agent_on(world: StoreWorld) -> AsyncIterator[tuple[Agent, ArenaWorld]]:
    arena_world = ArenaWorld(world)
    async with running_agent(arena_world) as agent:
        yield agent, arena_world
    await arena_world.link.close()


async def test_what_one_engine_stores_another_loads_through_the_arena() -> None:
    with new_world() as world:
        async with served(world) as store:
            async with agent_on(world) as (agent, _):
                writer, reader = EngineProcess(agent.endpoint), EngineProcess(agent.endpoint)
                first, second = await writer.open(), await reader.open()
                chain = prompt(first, 6)
                writer.compute(chain, range(6))
                assert (await run_store(first, writer.span(chain, range(6)))).stored_chunks == 6
                assert (await run_load(second, reader.span(chain, range(6), at=5))).loaded_chunks == 6
                assert reader.holds(chain, range(6), at=5)
                await eventually(lambda: store.running.engine.gauges().leases == 0)
                assert store.running.engine.gauges().sessions == 1  # the agent's, for both engines
                await first.close()
                await second.close()
                writer.close()
                reader.close()
            assert store.running.engine.gauges().sessions == 0
            assert store.running.engine.gauges().arena_quarantined_bytes == 0


async def test_the_next_engine_finds_the_arena_mapped() -> None:
    with new_world() as world:
        mapped: list[int] = []

        def on_map(segment: memoryview) -> Callable[[], None]:
            mapped.append(len(segment))
            return lambda: None

        link = link_to(world, on_map)
        async with served(world):
            for number in range(2):
                pool = ArenaPool(link, KEYSPACE, SPEC)
                answer = await pool.reserve(span(number), HEAD)
                assert list(await pool.commit(span(number), answer.slots)) == []
                await pool.close()
            assert len(mapped) == 1
            with pytest.raises(ServiceUnavailable, match="engine session is closing"):
                await pool.reserve(span(2), HEAD)
            await link.close()
            with pytest.raises(ServiceUnavailable, match="agent is closing"):
                await ArenaPool(link, KEYSPACE, SPEC).reserve(span(2), HEAD)


async def test_engines_of_several_keyspaces_share_one_session_also_after_it_broke() -> None:
    other = replace(SPEC, model_id="other")
    other_keyspace = keyspace_id(encode_keyspace(TENANT, other))
    with new_world() as world:
        link = link_to(world)
        pools = [ArenaPool(link, KEYSPACE, SPEC), ArenaPool(link, other_keyspace, other)]
        spans = [span(1), replace(span(1), keyspace=other_keyspace)]
        for _ in range(2):
            async with served(world) as store:
                for pool, pages in zip(pools, spans, strict=True):
                    await eventually(partial(refused, pool, pages, ""))
                assert store.running.engine.gauges().sessions == 1
        assert link.slots_out == 0
        await link.close()


async def test_a_pagestore_that_goes_away_costs_chunks_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    with new_world() as world:
        async with agent_on(world) as (agent, arena_world):
            engine = EngineProcess(agent.endpoint)
            async with served(world) as store:
                session = await engine.open()
                chain = prompt(session, 2)
                engine.compute(chain, range(2))
                await run_store(session, engine.span(chain, range(2)))
                await store.running.engine.flush(TENANT, b"")
            outcome = await run_load(session, engine.span(chain, range(2)), wait_s=60)
            assert (outcome.loaded_chunks, outcome.failed_chunks) == (0, (0, 1))
            assert isinstance(outcome.error, ServiceUnavailable)
            stored = await run_store(session, engine.span(chain, range(1)))
            assert set(stored.failed_chunks) == {0}
            assert arena_world.link.slots_out == 0
            assert len([text for text in caplog.messages if "the local pagestore is out of reach" in text]) == 1

            async with served(world):
                engine.clear()

                async def loads_again() -> bool:
                    loaded: Any = await run_load(session, engine.span(chain, range(2)), wait_s=60)
                    return bool(loaded.loaded_chunks == 2)

                await eventually(loads_again)
                assert engine.holds(chain, range(2))
                assert "the local pagestore is back" in caplog.messages
                await session.close()
            engine.close()


async def test_a_full_arena_fails_chunks_and_the_rest_is_stored() -> None:
    with new_world(disk=False) as world:
        async with served(world) as store, agent_on(world) as (agent, _):
            engine = EngineProcess(agent.endpoint, chunk_count=80)
            session = await engine.open()
            chain = prompt(session, 80)
            stored = await run_store(session, engine.span(chain, range(80)))
            assert stored.failed_chunks
            assert stored.stored_chunks + len(stored.failed_chunks) == 80
            assert {error.reason for error in stored.failed_chunks.values()} == {"ARENA_FULL"}
            await eventually(lambda: store.running.engine.gauges().leases == 0)
            await session.close()
            engine.close()


async def test_a_load_that_is_cancelled_while_pages_come_from_disk_gives_its_window_back() -> None:
    with new_world() as world:
        async with served(world, max_leases=4) as store, agent_on(world) as (agent, arena_world):
            engine = EngineProcess(agent.endpoint)
            session = await engine.open()
            chain = prompt(session, 4)
            engine.compute(chain, range(4))
            await run_store(session, engine.span(chain, range(4)))
            handles = [await session.load(engine.span(chain, [chunk], at=chunk), wait_s=60) for chunk in range(4)]
            for handle in handles:
                handle.cancel()
            outcomes = await asyncio.gather(*(handle.done(60) for handle in handles))
            assert all(outcome.error is None or isinstance(outcome.error, KvPoolError) for outcome in outcomes)
            await eventually(lambda: arena_world.link.slots_out == 0)
            assert (await run_load(session, engine.span(chain, range(4)))).loaded_chunks == 4
            await eventually(lambda: store.running.engine.gauges().leases == 0)
            await session.close()
            engine.close()


async def test_a_new_session_waits_until_the_last_slot_of_the_broken_one_is_back() -> None:
    """Only then is `drained` true: until then a copy may still read the old arena."""
    with new_world() as world:
        link = link_to(world)
        pool = ArenaPool(link, KEYSPACE, SPEC)
        async with served(world):
            written = (await pool.reserve(span(1), HEAD)).slots
            ctypes.memset(int(written.addresses[0]) + HEADER_BYTES, 7, PAYLOAD_BYTES)
            assert list(await pool.commit(span(1), written)) == []
            async with aclosing(pool.acquire(span(1), PATIENCE_S)) as answers:
                slots = (await anext(answers)).slots
            (lost,) = [(await pool.reserve(span(3), HEAD)).slots]
        assert slots.count == lost.count == 1
        async with served(world) as store:
            await eventually(lambda: refused(pool, span(2), "its last copies still run"))
            payload = ctypes.string_at(int(slots.addresses[0]) + HEADER_BYTES, PAYLOAD_BYTES)
            assert payload == bytes([7]) * PAYLOAD_BYTES  # the mapping outlives the session
            assert store.running.engine.gauges().arena_quarantined_bytes > 0
            await pool.release(slots)
            ((index, error),) = await pool.commit(span(3), lost)
            assert index == 0
            assert isinstance(error, LeaseLost)
            await eventually(lambda: refused(pool, span(2), ""))
            await eventually(lambda: store.running.engine.gauges().arena_quarantined_bytes == 0)
            assert link.slots_out == 0
            await link.close()


async def test_an_idle_link_lets_go_of_the_arena_of_a_pagestore_that_crashed() -> None:
    """Else the whole budget could stay taken until an engine asks for something."""
    with new_world() as world:
        unmapped: list[int] = []

        def on_map(segment: memoryview) -> Callable[[], None]:
            return partial(unmapped.append, len(segment))

        link = link_to(world, on_map)
        async with served(world):
            pool = ArenaPool(link, KEYSPACE, SPEC)
            await pool.abort((await pool.reserve(span(1), HEAD)).slots)
        await eventually(lambda: unmapped)
        async with served(world) as store:
            await eventually(lambda: store.running.engine.gauges().sessions == 1)
            await eventually(lambda: store.running.engine.gauges().arena_quarantined_bytes == 0)
            await link.close()


def span(number: int) -> PageSpan:
    """One page."""
    return PageSpan(
        keyspace=KEYSPACE,
        chunk_hashes=chunk_hash(number),
        first_chunk_index=number,
        parent_hash=chunk_hash(number - 1) if number else bytes(16),
        group_heads=chunk_hash(number - number % 16),
        positions=np.zeros(1, dtype=np.int32),
        shards=np.zeros(1, dtype=np.uint8),
    )


async def refused(pool: ArenaPool, pages: PageSpan, why: str) -> bool:
    """Whether a reserve is refused for this reason ("": whether it is granted)."""
    try:
        answer = await pool.reserve(pages, HEAD)
    except ServiceUnavailable as error:
        return bool(why) and why in error.message
    await pool.abort(answer.slots)
    return not why
