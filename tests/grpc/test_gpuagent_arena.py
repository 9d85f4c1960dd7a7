"""An agent on a real pagestore: stores and loads through the arena, and what breaks between the two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from kvpool.client.page_items import AcquireItem
from kvpool.client.pagestore import SessionPlan
from kvpool.core.errors import KvPoolError, ServiceUnavailable
from kvpool.core.keyspace import KeyspaceSpec, encode_keyspace, keyspace_id
from kvpool.core.page import PageKey, verify
from kvpool.testing import eventually
from kvpool_gpuagent.adapters.arena_pool import ArenaPool
from kvpool_gpuagent.ports import OpenedKeyspace, PagePool, PageWish, ReadSlot, WriteSlot
from tests.fixtures.agent import Agent, EngineProcess, World, prompt, run_load, run_store, running_agent
from tests.fixtures.agent_fakes import MemoryIndex
from tests.fixtures.pagestore import PAGE_BYTES, SPEC, TENANT, fill_page, metadata, new_world, page_key
from tests.fixtures.pagestore import World as StoreWorld
from tests.fixtures.pagestore_server import CLIENT, served
from tests.fixtures.patience import PATIENCE_S

KEYSPACE = keyspace_id(encode_keyspace(TENANT, SPEC))


class OneKeyspace(MemoryIndex):
    """Opens the keyspace that the pagestore derives too."""

    async def open_keyspace(self, name: str, spec: KeyspaceSpec) -> OpenedKeyspace:
        return OpenedKeyspace(keyspace=KEYSPACE, hash_key=b"h" * 32)


class ArenaWorld(World):
    """Its pools lead to the pagestore that listens where `world` is."""

    def __init__(self, world: StoreWorld) -> None:
        super().__init__()
        self.index = OneKeyspace()
        self._world = world
        self.arena_pools: list[ArenaPool] = []

    def make_pool(self, keyspace: bytes, spec: KeyspaceSpec, peer_name: str) -> PagePool:
        socket = self._world.directory / "pagestore.sock"
        plan = SessionPlan(endpoint=f"unix:{socket}", peer_name=peer_name, keyspaces=((keyspace, spec),))
        self.arena_pools.append(ArenaPool(plan, CLIENT))
        return self.arena_pools[-1]


@asynccontextmanager
async def agent_on(world: StoreWorld) -> AsyncIterator[tuple[Agent, ArenaWorld]]:
    arena_world = ArenaWorld(world)
    async with running_agent(arena_world) as agent:
        yield agent, arena_world


async def test_what_one_engine_stores_another_loads_through_the_arena() -> None:
    with new_world() as world:
        async with served(world) as store, agent_on(world) as (agent, _):
            writer, reader = EngineProcess(agent.endpoint), EngineProcess(agent.endpoint)
            first, second = await writer.open(), await reader.open()
            chain = prompt(first, 6)
            writer.compute(chain, range(6))
            assert (await run_store(first, writer.span(chain, range(6)))).stored_chunks == 6
            assert (await run_load(second, reader.span(chain, range(6), at=5))).loaded_chunks == 6
            assert reader.holds(chain, range(6), at=5)
            await eventually(lambda: store.running.engine.gauges().leases == 0)
            await first.close()
            await second.close()
            assert store.running.engine.gauges().sessions == 0
            assert store.running.engine.gauges().arena_quarantined_bytes == 0
            writer.close()
            reader.close()


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
            assert (outcome.loaded_chunks, outcome.failed) == (0, (0, 1))
            assert isinstance(outcome.error, ServiceUnavailable)
            stored = await run_store(session, engine.span(chain, range(1)))
            assert set(stored.failed) == {0}
            assert arena_world.arena_pools[0].slots_out == 0
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
            engine = EngineProcess(agent.endpoint, chunk_count=60)
            session = await engine.open()
            chain = prompt(session, 60)
            stored = await run_store(session, engine.span(chain, range(60)))
            assert stored.failed
            assert stored.stored_chunks + len(stored.failed) == 60
            assert {error.reason for error in stored.failed.values()} == {"ARENA_FULL"}
            await eventually(lambda: store.running.engine.gauges().leases == 0)
            await session.close()
            engine.close()


async def test_a_page_that_was_damaged_in_the_arena_is_a_miss_and_is_dropped() -> None:
    with new_world(disk=False) as world:
        async with served(world) as store, agent_on(world) as (agent, arena_world):
            engine = EngineProcess(agent.endpoint)
            session = await engine.open()
            chain = prompt(session, 2)
            engine.compute(chain, range(2))
            await run_store(session, engine.span(chain, range(2)))
            peer = await store.open(keyspaces=((KEYSPACE, SPEC),))
            await damage(peer, PageKey(KEYSPACE, chain.hashes[1], 0))
            outcome = await run_load(session, engine.span(chain, range(2)))
            assert (outcome.loaded_chunks, outcome.failed) == (1, (1,))
            assert outcome.error is not None
            assert outcome.error.reason == "PAGE_CORRUPT"
            again = await run_load(session, engine.span(chain, range(2)))
            assert again.error is not None
            assert again.error.reason == "PAGE_MISSING"
            assert arena_world.arena_pools[0].slots_out == 0
            await peer.close()
            await session.close()
            engine.close()


async def damage(peer: Any, key: PageKey) -> None:
    """Flip a bit of a page in staging, as a stray write of some process would."""
    async with peer.acquire([AcquireItem(key)], wait_s=60) as answers:
        async for answer in answers:
            with peer.slot_view(*answer.slot.place) as view:
                view[200] ^= 1
            await peer.release([answer.slot.lease_id])


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
            await eventually(lambda: arena_world.arena_pools[0].slots_out == 0)
            assert (await run_load(session, engine.span(chain, range(4)))).loaded_chunks == 4
            await eventually(lambda: store.running.engine.gauges().leases == 0)
            await session.close()
            engine.close()


async def test_a_new_session_waits_until_the_last_slot_of_the_broken_one_is_back() -> None:
    """Only then is `drained` true: until then a copy may still read the old arena."""
    with new_world() as world:
        plan = SessionPlan(
            endpoint=f"unix:{world.directory / 'pagestore.sock'}", peer_name="agent", keyspaces=((KEYSPACE, SPEC),)
        )
        pool = ArenaPool(plan, CLIENT)
        async with served(world):
            (written,) = await pool.reserve([wish(1)], [PAGE_BYTES])
            assert isinstance(written, WriteSlot)
            fill_page(written.page, written.key)
            assert await pool.commit([written]) == [None]
            async with aclosing(pool.acquire([wish(1)], PATIENCE_S)) as answers:
                slot = (await anext(answers))[1]
        assert isinstance(slot, ReadSlot)
        async with served(world) as store:
            await eventually(lambda: refused(pool, "its last copies still run"))
            assert verify(slot.page, slot.key, SPEC.codec) is None  # the mapping outlives the session
            assert store.running.engine.gauges().arena_quarantined_bytes > 0
            await pool.release([slot])
            await eventually(lambda: refused(pool, ""))
            await eventually(lambda: store.running.engine.gauges().arena_quarantined_bytes == 0)
            await pool.close()


def wish(number: int) -> PageWish:
    return PageWish(key=page_key(number), metadata=metadata(number), chain_head_hash=page_key(0).chunk_hash)


async def refused(pool: ArenaPool, why: str) -> bool:
    """Whether a reserve is refused for this reason ("": whether it is granted)."""
    try:
        slots = await pool.reserve([wish(2)], [PAGE_BYTES])
    except ServiceUnavailable as error:
        return bool(why) and why in error.message
    await pool.abort([slot for slot in slots if isinstance(slot, WriteSlot)])
    return not why
