"""Stores and loads after an engine's GPU work, over real sockets, on a device whose events the test lets pass."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.client.gpuagent import EngineSession
from kvpool.client.pool import AsyncPool
from kvpool.client.sync import Pool
from kvpool.core.errors import DeadlineExceeded, InvalidRequest
from kvpool.testing import eventually
from kvpool.v1 import gpuagent_pb2
from tests.fixtures.agent import CLIENT, SPEC, prompt, run_load, run_store
from tests.fixtures.gpu_agent import host
from tests.fixtures.raw_engine import raw_engine


async def test_a_session_with_gpu_memory_needs_no_descriptors_of_it() -> None:
    async with host() as one:
        engine = one.engine()
        async with raw_engine(one.agent.endpoint) as raw:
            register = raw.registration(engine)
            register.hold_file = False
            await raw.send(1, register=register)
            await raw.next("registered")
            assert (await raw.next("ready")).device == "cuda"
            await raw.send(2, close=gpuagent_pb2.EngineClose())
            await raw.next("closed")
        engine.close()


async def test_a_store_is_gathered_only_after_the_engines_work() -> None:
    async with host() as one:
        engine = one.engine()
        session = await engine.open()
        chain = prompt(session, 3)
        event = engine.record()
        handle = await session.store(engine.span(chain, range(3)), after=event)
        engine.slots.give_back(event)
        await one.asked()
        assert one.gpu.log == []
        assert not one.world.pools[0].asked  # nothing is reserved behind work that may never end
        assert engine.slots.free_count == 1

        engine.compute(chain, range(3))  # what the engine's kernels write last
        engine.finish(event)
        outcome = await handle.done(60)
        assert outcome.stored_chunks == 3
        assert one.gpu.log[:2] == ["passed 0", "gather"]
        assert one.gpu.log.count("passed 0") == 1
        assert engine.slots.free_count == 2
        loaded = await run_load(session, engine.span(chain, range(3), at=4))
        assert loaded.loaded_chunks == 3
        assert engine.holds(chain, range(3), at=4)
        assert await session.close()
        engine.close()


async def test_a_slot_is_handed_out_again_only_after_its_wait() -> None:
    async with host() as one:
        engine = one.engine(event_count=1)
        session = await engine.open()
        chain = prompt(session, 2)
        first = engine.record()
        store = await session.store(engine.span(chain, range(1)), after=first)
        engine.slots.give_back(first)
        with pytest.raises(DeadlineExceeded, match="none of 1 events"):
            await asyncio.to_thread(engine.slots.take, 0.02)
        taking = asyncio.ensure_future(asyncio.to_thread(engine.slots.take, 60))
        await one.asked()
        assert not taking.done()
        engine.finish(first)
        second = await taking
        assert (second.slot, second.generation) == (0, 2)
        await store.done(60)
        handle = await session.store(engine.span(chain, range(1, 2)), after=second)
        assert (await handle.done(60)).stored_chunks == 1
        engine.slots.give_back(second)
        assert await session.close()
        engine.close()


async def test_requests_share_one_event_and_its_slot_comes_back_once() -> None:
    async with host() as one:
        engine = one.engine(event_count=1)
        session = await engine.open()
        chain = prompt(session, 4)
        engine.compute(chain, range(4))
        event = engine.record()
        spans = [engine.span(chain, [number], at=number) for number in range(3)]
        stores = [await session.store(span, after=event) for span in spans]
        await one.asked()
        engine.finish(event)
        assert [(await store.done(60)).stored_chunks for store in stores] == [1, 1, 1]
        # It has passed long ago, and is still the engine's to name.
        late = await session.store(engine.span(chain, [3], at=3), after=event)
        assert (await late.done(60)).stored_chunks == 1
        assert engine.slots.free_count == 0
        engine.slots.give_back(event)
        assert engine.slots.free_count == 1
        assert await session.close()
        engine.close()


async def test_a_deduplicated_store_gives_its_slot_back() -> None:
    async with host() as one:
        engine = one.engine(event_count=1)
        session = await engine.open()
        chain = prompt(session, 2)
        engine.compute(chain, range(2))
        await run_store(session, engine.span(chain, range(2)))
        one.gpu.log.clear()
        event = engine.record()
        engine.finish(event)
        handle = await session.store(engine.span(chain, range(2)), after=event)
        engine.slots.give_back(event)
        assert (await handle.done(60)).deduplicated_chunks == 2
        assert one.gpu.log == ["passed 0"]
        assert engine.slots.free_count == 1
        assert await session.close()
        engine.close()


async def test_an_event_that_was_given_back_is_refused_before_it_is_sent() -> None:
    async with host() as one:
        engine = one.engine()
        session = await engine.open()
        event = engine.record()
        engine.slots.give_back(event)
        with pytest.raises(InvalidRequest, match="is not taken"):
            await session.store(engine.span(prompt(session, 1), range(1)), after=event)
        assert await session.close()
        engine.close()


async def test_a_successor_of_a_broken_session_takes_over_its_events() -> None:
    async with host() as one:
        engine = one.engine(event_count=1)
        session: EngineSession = await engine.open()
        chain = prompt(session, 1)
        engine.compute(chain, range(1))
        event = engine.record()
        await session.store(engine.span(chain, range(1)), after=event)
        engine.slots.give_back(event)
        await one.asked()
        successor = await session.reopen()
        assert one.device.caches[0].closed
        assert engine.slots.free_count == 1
        again = engine.record()
        assert again.generation == 2
        handle = await successor.store(engine.span(chain, range(1)), after=again)
        engine.slots.give_back(again)
        engine.finish(again)
        assert (await handle.done(60)).stored_chunks == 1
        assert await successor.close()
        engine.close()


async def test_the_pool_gives_events_back_and_its_loads_begin_layer_by_layer() -> None:
    async with host(max_request_chunks=2) as one:
        engine = one.engine(event_count=1)
        pool = await AsyncPool.open(engine.plan, CLIENT)
        chain = prompt(pool.session, 5)
        engine.compute(chain, range(5))
        event = engine.record()
        table = engine.blocks.reshape(-1)
        ticket = await pool.store(chain, table, first_chunk=0, end_chunk=5, wait_event=event)
        await one.asked()
        engine.finish(event)
        assert (await ticket.result(60)).stored_chunks == 5
        assert engine.slots.free_count == 1
        with pytest.raises(InvalidRequest):
            await pool.store(chain, table, first_chunk=0, end_chunk=9, wait_event=engine.record())
        assert engine.slots.free_count == 1

        engine.clear()
        event = engine.record()
        loading = await pool.start_load(chain, table, first_chunk=0, end_chunk=2, wait_event=event)
        await one.asked()
        assert not loading.done
        assert loading.layers_loaded == 0
        engine.finish(event)
        assert await loading.wait_layers(SPEC.group.layers)
        assert engine.holds(chain, range(2))
        report = await loading.result()
        assert (report.loaded_chunks, report.error) == (2, None)
        nothing = await pool.start_load(chain, table, first_chunk=0, end_chunk=0)
        assert await nothing.wait_layers(1) is False
        await eventually(lambda: engine.slots.free_count == 1)
        assert await pool.close()
        engine.close()


async def test_an_engine_without_an_event_loop_waits_layer_by_layer() -> None:
    async with host() as one:
        engine = one.engine()

        def use_pool() -> int:
            with Pool(engine.plan, CLIENT) as pool:
                chain = prompt(pool.pool.session, 3)
                table = engine.blocks.reshape(-1)
                event = engine.record()
                storing = pool.store(chain, table, first_chunk=0, end_chunk=3, wait_event=event)
                engine.compute(chain, range(3))
                engine.finish(event)
                assert storing.result(60).stored_chunks == 3
                engine.clear()
                event = engine.record()
                loading = pool.start_load(chain, table, first_chunk=0, end_chunk=3, wait_event=event)
                with pytest.raises(DeadlineExceeded):
                    loading.wait_layers(1, 0.02)
                assert loading.layers_loaded == 0
                engine.finish(event)
                assert loading.wait_layers(SPEC.group.layers, 60)
                assert loading.wait_layers(1)
                assert engine.holds(chain, range(3))
                assert loading.failed_chunks == ()
                return loading.result(60).loaded_chunks

        assert await asyncio.to_thread(use_pool) == 3
        assert engine.slots.free_count == 2
        engine.close()
