"""Engines that launch late, wrongly or not at all, and sessions that end meanwhile: never wrong, never stuck."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvpool.client.engine_items import load_to_proto
from kvpool.client.gpuagent import EngineSession
from kvpool.client.hashing import Chain
from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.launches import Launch
from kvpool.core.page import HEADER_BYTES
from kvpool.testing import eventually
from kvpool.v1 import gpuagent_pb2
from kvpool_gpuagent.core.ways import Way
from tests.fixtures.agent import prompt, run_load, run_store
from tests.fixtures.gpu_agent import GpuEngine
from tests.fixtures.launching_engine import LaunchingHost, launching_host
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.raw_engine import raw_engine

CHUNKS = 3
ALL = range(CHUNKS)


async def stored(one: LaunchingHost, engine: GpuEngine, session: EngineSession) -> Chain:
    """A prompt that lies in the pool, its blocks cleared."""
    chain = prompt(session, CHUNKS)
    engine.compute(chain, ALL)
    assert (await run_store(session, engine.span(chain, ALL))).stored_chunks == CHUNKS
    engine.clear()
    return chain


def be_impatient(one: LaunchingHost) -> None:
    """The agent waits for the next launch hardly at all: not before, or a slow machine would be late too."""
    launches = one.host.agent.engine.sessions[0].launches
    assert launches is not None
    launches.timeout_s = 0.01


async def loads_right(engine: GpuEngine, session: EngineSession, chain: Chain) -> None:
    engine.clear()
    assert (await run_load(session, engine.span(chain, ALL))).loaded_chunks == CHUNKS
    assert engine.holds(chain, ALL)


@pytest.mark.parametrize("contended", [False, True])
@pytest.mark.parametrize("at", [0, HEADER_BYTES + 5])
async def test_a_bad_page_is_never_scattered_and_what_comes_before_it_is_in(contended: bool, at: int) -> None:
    async with launching_host() as one:
        engine, _, _ = one.engine()
        session = await engine.open()
        chain = await stored(one, engine, session)
        if contended:
            one.contend()
        pages = one.host.world.cluster.pages
        key = next(key for key in pages if key.chunk_hash == chain.hashes[1])
        page = bytearray(pages[key])
        page[at] ^= 1
        pages[key] = bytes(page)
        outcome = await run_load(session, engine.span(chain, ALL))
        assert (outcome.loaded_chunks, outcome.failed) == (1, (1, 2))
        assert engine.holds(chain, [0])
        assert not any(layer[:, engine.blocks[1]].any() for layer in engine.memory())
        assert await session.close()


async def test_an_engine_that_fails_is_asked_no_more_and_its_pages_go_on_another_way() -> None:
    async with launching_host() as one:
        engine, runtime, launcher = one.engine()
        session = await engine.open()
        runtime.failure = RuntimeError("an illegal memory access was encountered")
        chain = await stored(one, engine, session)
        assert one.ways and Way.ENGINE not in one.ways
        asked = len(launcher.asked)
        await loads_right(engine, session, chain)
        assert len(launcher.asked) == asked
        assert await session.close()


async def test_a_scatter_that_failed_is_done_again_by_the_agent() -> None:
    async with launching_host() as one:
        engine, runtime, launcher = one.engine()
        session = await engine.open()
        chain = await stored(one, engine, session)
        runtime.failure = RuntimeError("an illegal memory access was encountered")
        await loads_right(engine, session, chain)
        assert launcher.ended[-1].error is not None
        assert await session.close()


async def test_a_gather_that_is_not_answered_in_time_harms_nobody_when_it_comes() -> None:
    async with launching_host() as one:
        engine, runtime, launcher = one.engine()
        session = await engine.open()
        be_impatient(one)
        runtime.gate.clear()
        chain = await stored(one, engine, session)
        assert launcher.asked and not launcher.ended
        engine.compute(prompt(session, CHUNKS, seed=2), ALL)  # its blocks are its own again
        runtime.gate.set()
        await eventually(lambda: len(launcher.ended) == len(launcher.asked))
        await loads_right(engine, session, chain)
        assert Way.ENGINE not in one.ways
        assert await session.close()


async def test_a_scatter_that_is_not_answered_in_time_holds_the_blocks_until_it_is() -> None:
    async with launching_host() as one:
        engine, runtime, launcher = one.engine()
        session = await engine.open()
        chain = await stored(one, engine, session)
        runtime.gate.clear()
        be_impatient(one)
        moved = one.host.moved_runs
        handle = await session.load(engine.span(chain, ALL), wait_s=PATIENCE_S)
        await eventually(lambda: Way.ENGINE not in one.ways)
        handle.cancel()
        await session.match(chain.hashes, held_chunks=CHUNKS)
        assert not handle.hold_ended
        assert not launcher.ended[1:]
        runtime.gate.set()
        await handle.wait_hold()
        assert len(launcher.ended) == len(launcher.asked)
        assert one.host.moved_runs == moved + CHUNKS  # nobody moved them another way meanwhile
        await loads_right(engine, session, chain)
        assert await session.close()


async def test_a_store_that_is_cancelled_ends_with_its_launch() -> None:
    async with launching_host() as one:
        engine, runtime, launcher = one.engine()
        session = await engine.open()
        chain = prompt(session, CHUNKS)
        runtime.gate.clear()
        handle = await session.store(engine.span(chain, ALL))
        await eventually(lambda: bool(launcher.asked))
        handle.cancel()
        runtime.gate.set()
        assert (await handle.done(PATIENCE_S)).stored_chunks < CHUNKS
        one.host.nothing_is_out()
        await stored(one, engine, session)
        assert await session.close()


async def test_a_session_closes_after_what_it_launched_and_begins_nothing_more() -> None:
    async with launching_host() as one:
        engine, runtime, launcher = one.engine()
        session = await engine.open()
        chain = await stored(one, engine, session)
        runtime.gate.clear()
        handle = await session.load(engine.span(chain, ALL), wait_s=PATIENCE_S)
        await eventually(lambda: len(launcher.asked) > 1)
        asked = len(launcher.asked)
        closing = asyncio.ensure_future(session.close())
        await asyncio.sleep(0)
        assert not closing.done()
        assert not handle.hold_ended
        runtime.gate.set()
        assert await closing
        await handle.wait_hold()
        assert session.released.is_set()
        assert len(launcher.asked) == asked == len(launcher.ended)


async def test_when_the_stream_breaks_the_agent_lets_go_at_once_and_the_engine_after_its_kernels() -> None:
    async with launching_host() as one:
        engine, runtime, launcher = one.engine()
        session = await engine.open()
        chain = await stored(one, engine, session)
        runtime.gate.clear()
        handle = await session.load(engine.span(chain, ALL), wait_s=PATIENCE_S)
        await eventually(lambda: len(launcher.asked) > 1)
        await session._stream.abort("the test broke it")
        await eventually(lambda: not one.host.agent.engine.sessions)
        one.host.nothing_is_out()
        with pytest.raises(KvPoolError):
            await handle.done(PATIENCE_S)
        assert not handle.hold_ended
        runtime.gate.set()
        await handle.wait_hold()
        successor = await session.reopen()
        await loads_right(engine, successor, chain)
        assert await successor.close()


async def test_a_session_is_not_registered_again_while_old_kernels_write_its_scratch() -> None:
    async with launching_host() as one:
        engine, runtime, launcher = one.engine()
        session = await engine.open()
        chain = prompt(session, CHUNKS)
        runtime.gate.clear()
        await session.store(engine.span(chain, ALL))
        await eventually(lambda: bool(launcher.asked))
        reopening = asyncio.ensure_future(session.reopen())
        await eventually(lambda: not one.host.agent.engine.sessions)
        assert not reopening.done()
        runtime.gate.set()
        successor = await reopening
        await stored(one, engine, successor)
        assert await successor.close()


async def test_a_launch_that_does_not_fit_is_refused_by_the_engine_and_the_agent_goes_on() -> None:
    async with launching_host() as one:
        engine, _, launcher = one.engine()
        session = await engine.open()

        def beyond(launch: Launch) -> Launch:
            pages = tuple(replace(page, scratch_offset=1 << 40) for page in launch.pages)
            return replace(launch, pages=pages)

        launcher.change = beyond
        chain = await stored(one, engine, session)
        error = launcher.ended[0].error
        assert isinstance(error, InvalidRequest)
        assert "the scratch has" in error.message
        await loads_right(engine, session, chain)
        assert await session.close()


async def test_more_than_the_scratch_holds_goes_through_it_piece_by_piece() -> None:
    async with launching_host() as one:
        engine, _, launcher = one.engine(scratch_bytes=32 << 10)
        session = await engine.open()
        chain = await stored(one, engine, session)
        await loads_right(engine, session, chain)
        assert len(launcher.asked) == 2 * CHUNKS
        assert not any(launched.error for launched in launcher.ended)
        assert await session.close()


async def test_scratch_that_is_too_small_for_a_page_is_left_alone() -> None:
    async with launching_host(way=None) as one:
        engine, _, launcher = one.engine(scratch_bytes=4096)
        session = await engine.open()
        await loads_right(engine, session, await stored(one, engine, session))
        assert not launcher.asked
        assert await session.close()


async def test_close_answers_what_the_engine_never_began() -> None:
    """As the protocol has it: an engine that says `close` begins nothing any more."""
    async with launching_host() as one:
        engine, _, _ = one.engine()
        session = await engine.open()
        chain = await stored(one, engine, session)
        assert await session.close()
        async with raw_engine(one.host.agent.endpoint) as raw:
            registered = await raw.register(engine, hold_file=False)
            assert registered.session_id
            await raw.next("ready")
            await raw.send(2, load=load_to_proto(engine.span(chain, ALL), 60_000))
            await raw.next("launch")
            await raw.send(0, launched=gpuagent_pb2.EngineLaunched(ticket=99))
            refused = await raw.refusal()
            assert "launch 99 is not out" in refused.message
            await raw.send(3, close=gpuagent_pb2.EngineClose())
            assert await raw.end() is None
        one.host.nothing_is_out()
