"""An engine that reuses its blocks while its agent's GPU work on them is late, never allowed, or still running."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.client.engine_items import load_to_proto, store_to_proto
from kvpool.client.hashing import Prompt
from kvpool.testing import eventually
from kvpool.v1 import gpuagent_pb2
from tests.fixtures.agent import World, prompt, run_load, run_store
from tests.fixtures.host_agent import SPEC, HostAgent, host_agent
from tests.fixtures.host_gpu import Path
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.raw_engine import raw_engine
from tests.fixtures.standstill import stood_still

PATHS = pytest.mark.parametrize("path", Path)
CHUNKS = 3


async def loads_right(one: HostAgent, chunk_count: int = CHUNKS) -> None:
    """What is in the pool of a prompt is what `compute` makes of it."""
    engine = one.engine()
    session = await engine.open()
    chain = prompt(session, chunk_count)
    assert (await run_load(session, engine.span(chain, range(chunk_count)))).loaded_chunks == chunk_count
    assert engine.holds(chain, range(chunk_count))
    assert await session.close()


@PATHS
async def test_a_store_takes_what_the_engine_wrote_last_before_its_event(path: Path) -> None:
    async with host_agent(path=path) as one:
        engine = one.engine()
        session = await engine.open()
        chain = prompt(session, CHUNKS)
        event = engine.record()
        handle = await session.store(engine.span(chain, range(CHUNKS)), after=event)
        await session.match(chain.hashes, held_chunks=CHUNKS)
        assert not one.moved_runs
        engine.compute(chain, range(CHUNKS))
        engine.finish(event)
        assert (await handle.done(PATIENCE_S)).stored_chunks == CHUNKS
        assert await session.close()
        await loads_right(one)


@PATHS
async def test_a_load_writes_nothing_before_the_engine_has_read_what_was_there(path: Path) -> None:
    async with host_agent(path=path) as one:
        engine = one.engine()
        session = await engine.open()
        chain, old = prompt(session, CHUNKS), prompt(session, CHUNKS, seed=2)
        engine.compute(chain, range(CHUNKS))
        await run_store(session, engine.span(chain, range(CHUNKS)))
        engine.compute(old, range(CHUNKS))
        event, moved = engine.record(), one.moved_runs
        handle = await session.load(engine.span(chain, range(CHUNKS)), wait_s=PATIENCE_S, after=event)
        await session.match(chain.hashes, held_chunks=CHUNKS)
        assert one.moved_runs == moved
        assert engine.holds(old, range(CHUNKS))  # its kernels read on
        engine.finish(event)
        assert (await handle.done(PATIENCE_S)).loaded_chunks == CHUNKS
        assert engine.holds(chain, range(CHUNKS))
        assert await session.close()


@PATHS
async def test_blocks_may_be_reused_the_moment_they_are_gathered_window_by_window(path: Path) -> None:
    async with host_agent(path=path, world=World(window_pages=4)) as one:
        engine = one.engine()
        session = await engine.open()
        chain, next_prompt = prompt(session, CHUNKS), prompt(session, CHUNKS, seed=2)
        engine.compute(chain, range(CHUNKS))
        reused: list[int] = []

        def reuse(chunk_count: int) -> bool:
            for chunk in range(len(reused), chunk_count):
                reused.append(chunk)
                engine.compute(next_prompt, [chunk], at=chunk)
            return True

        handle = await session.store(engine.span(chain, range(CHUNKS)), kept=reuse)
        assert (await handle.done(PATIENCE_S)).stored_chunks == CHUNKS
        assert engine.holds(next_prompt, range(CHUNKS))
        assert await session.close()
        await loads_right(one)


@PATHS
async def test_nothing_is_gathered_as_long_as_copies_run(path: Path) -> None:
    async with host_agent(path=path) as one:
        engine = one.engine()
        session = await engine.open()
        chain = prompt(session, 1)
        one.hold_copies()
        handle = await session.store(engine.span(chain, range(1)))
        await one.copying()
        await session.match(chain.hashes, held_chunks=1)
        assert not handle.released
        one.runtime.gate.clear()  # enqueued, and the GPU has not come to it
        one.release_copies()
        await eventually(lambda: bool(one.moved_runs))
        await session.match(chain.hashes, held_chunks=1)
        assert not handle.released
        one.runtime.gate.set()
        assert (await handle.done(PATIENCE_S)).stored_chunks == 1
        assert await session.close()


async def test_blocks_rewritten_before_they_were_gathered_are_never_visible() -> None:
    """The engine had to take them (it says so), and the copy engine may have read half of each."""
    async with host_agent(path=Path.RUNS) as one:
        engine = one.engine()
        session = await engine.open()
        chain = prompt(session, CHUNKS)
        engine.compute(chain, range(CHUNKS))
        one.hold_copies()
        span = engine.span(chain, range(CHUNKS))
        handle = await session.store(span, kept=lambda chunk_count: False)
        await one.copying()
        engine.clear()
        one.release_copies()
        outcome = await handle.done(PATIENCE_S)
        assert set(outcome.failed_chunks) == set(range(CHUNKS))
        assert not one.world.cluster.pages
        one.nothing_is_out()
        engine.compute(chain, range(CHUNKS))
        assert (await run_store(session, span)).stored_chunks == CHUNKS
        assert await session.close()
        await loads_right(one)


async def test_a_kept_that_comes_late_commits_nothing_then_or_later() -> None:
    async with host_agent(path=Path.RUNS, kept_timeout_ms=int(1000 * PATIENCE_S)) as one:
        engine = one.engine()
        async with raw_engine(one.agent.endpoint) as raw:
            registered = await raw.ready_without_hold(engine)
            chain = Prompt.of(registered.hash_key, range(SPEC.chunk_tokens), SPEC.chunk_tokens)
            span = engine.span(chain, range(1))
            kept = gpuagent_pb2.EngineKept(kept=True, chunk_count=1)
            await raw.send(2, store=store_to_proto(span, None))
            await raw.next("gathered")
            stood_still(2 * PATIENCE_S)
            assert list((await raw.next("store_done")).failed_chunks) == [0]
            await raw.send(2, kept=kept)
            engine.compute(chain, [0])
            await raw.send(3, store=store_to_proto(span, None))
            await raw.next("gathered")
            await raw.send(2, kept=kept)  # of the earlier one: it says nothing of this
            await raw.send(0, heartbeat=gpuagent_pb2.EngineHeartbeat())
            await raw.next("heartbeat")
            stood_still(2 * PATIENCE_S)
            assert list((await raw.next("store_done")).failed_chunks) == [0]
            assert not one.world.cluster.pages
            await raw.send(4, store=store_to_proto(span, None))
            await raw.next("gathered")
            await raw.send(4, kept=kept)
            assert (await raw.next("store_done")).stored_chunks == 1


@pytest.mark.parametrize("operation", ["store", "load"])
async def test_memory_of_an_engine_that_died_stays_mapped_until_its_copies_have_ended(operation: str) -> None:
    async with host_agent(path=Path.RUNS) as one:
        engine = one.engine()
        hold = engine.plan.new_hold()
        async with raw_engine(one.agent.endpoint) as raw:
            registered = await raw.register(engine)
            await raw.lend_file(registered, 0, hold.lent[0])
            await raw.next("ready")
            chain = Prompt.of(registered.hash_key, range(SPEC.chunk_tokens), SPEC.chunk_tokens)
            span = engine.span(chain, range(1))
            if operation == "load":
                await raw.send(2, store=store_to_proto(span, None))
                await raw.next("gathered")
                await raw.send(2, kept=gpuagent_pb2.EngineKept(kept=True, chunk_count=1))
                await raw.next("store_done")
            one.hold_copies()
            await raw.send(
                3,
                **(
                    {"load": load_to_proto(span, 60_000)}
                    if operation == "load"
                    else {"store": store_to_proto(span, None)}
                ),
            )
            await one.copying()
        await eventually(lambda: one.agent.metric("abnormal_session_ends_total") == 1)
        assert one.device.mapped == 1
        assert hold.lent[0].is_lent()
        assert one.world.pools[0].slots_out
        one.release_copies()
        async with asyncio.timeout(PATIENCE_S):
            await hold.ended()
        await eventually(lambda: not one.agent.engine.sessions)
        assert not one.device.mapped
        one.nothing_is_out()
        hold.close()


async def test_a_successor_is_served_only_when_the_copies_of_its_predecessor_have_ended() -> None:
    async with host_agent(path=Path.RUNS) as one:
        engine = one.engine()
        session = await engine.open()
        chain = prompt(session, CHUNKS)
        engine.compute(chain, range(CHUNKS))
        one.hold_copies()
        handle = await session.store(engine.span(chain, range(CHUNKS)))
        await one.copying()
        reopening = asyncio.ensure_future(session.reopen())
        await eventually(lambda: one.agent.metric("abnormal_session_ends_total") == 1)
        assert not reopening.done()
        held_on = not handle.released
        assert held_on
        assert one.device.mapped == 1
        one.release_copies()
        successor = await reopening
        assert handle.released
        assert not one.world.cluster.pages
        assert (await run_store(successor, engine.span(chain, range(CHUNKS)))).stored_chunks == CHUNKS
        assert await successor.close()


@pytest.mark.parametrize("who", ["engine", "agent"])
async def test_a_close_comes_after_the_copies(who: str) -> None:
    async with host_agent(path=Path.RUNS) as one:
        engine = one.engine()
        session = await engine.open()
        chain = prompt(session, CHUNKS)
        engine.compute(chain, range(CHUNKS))
        await run_store(session, engine.span(chain, range(CHUNKS)))
        engine.clear()
        one.hold_copies()
        await session.load(engine.span(chain, range(CHUNKS)), wait_s=PATIENCE_S)
        await one.copying()
        closing = asyncio.ensure_future(session.close() if who == "engine" else one.agent.engine.close())
        running = one.agent.engine.sessions[0]
        await eventually(lambda: not running.is_open)
        assert one.device.mapped == 1
        assert not session.released.is_set()
        one.release_copies()
        await closing
        async with asyncio.timeout(PATIENCE_S):
            await session.released.wait()
        assert not one.device.mapped
        await session.close()
