"""Stores and loads after an engine's GPU work, over real sockets, on a device whose events the test lets pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvpool.client.engine_items import load_to_proto, store_to_proto
from kvpool.client.gpuagent import EngineSession
from kvpool.client.hashing import Chain
from kvpool.client.pool import KvPool
from kvpool.core.errors import DeadlineExceeded, InvalidRequest
from kvpool.core.ipc import EngineEvent
from kvpool.testing import eventually
from kvpool.v1 import gpuagent_pb2
from tests.fixtures.agent import CLIENT, SPEC, Agent, World, prompt, run_load, run_store, running_agent
from tests.fixtures.gpu_agent import FakeGpu, FakeGpuCache, FakeGpuDevice, GpuEngine
from tests.fixtures.raw_engine import RawEngine, raw_engine

FIRST = gpuagent_pb2.EngineEvent(slot=0, generation=1)


@dataclass(kw_only=True)
class Host:
    """One agent with a fake GPU."""

    world: World
    gpu: FakeGpu
    device: FakeGpuDevice
    agent: Agent

    def engine(self, **changes: Any) -> GpuEngine:
        return GpuEngine(self.gpu, self.agent.endpoint, **changes)

    @property
    def cache(self) -> FakeGpuCache:
        return self.device.caches[-1]

    async def asked(self) -> None:
        """The agent waits for an event."""
        asked = self.cache.asked
        await eventually(lambda: self.cache.asked > asked + 1)


@asynccontextmanager
async def host(**changes: Any) -> AsyncIterator[Host]:
    world, gpu = World(), FakeGpu()
    device = FakeGpuDevice(gpu)
    async with running_agent(world, device=device, **changes) as agent:
        yield Host(world=world, gpu=gpu, device=device, agent=agent)
    assert all(cache.closed for cache in device.caches)
    assert all(pool.closed and not pool.slots_out for pool in world.pools)


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
        assert not one.world.pools[0].wishes  # nothing is reserved behind work that may never end
        assert engine.slots.free_count == 1

        engine.compute(chain, range(3))  # what the engine's kernels write last
        engine.finish(event)
        outcome = await handle.done(10.0)
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
            await engine.slots.take_async(0.02)
        taking = asyncio.ensure_future(engine.slots.take_async(5.0))
        await one.asked()
        assert not taking.done()
        engine.finish(first)
        second = await taking
        assert (second.slot, second.generation) == (0, 2)
        await store.done(10.0)
        handle = await session.store(engine.span(chain, range(1, 2)), after=second)
        assert (await handle.done(10.0)).stored_chunks == 1
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
        assert [(await store.done(10.0)).stored_chunks for store in stores] == [1, 1, 1]
        # It has passed long ago, and is still the engine's to name.
        late = await session.store(engine.span(chain, [3], at=3), after=event)
        assert (await late.done(10.0)).stored_chunks == 1
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
        assert (await handle.done(10.0)).deduplicated_chunks == 2
        assert one.gpu.log == ["passed 0"]
        assert engine.slots.free_count == 1
        assert await session.close()
        engine.close()


@pytest.mark.parametrize("how", ["store", "load"])
async def test_a_cancelled_request_gives_the_slot_of_an_event_back_that_never_fires(how: str) -> None:
    async with host() as one:
        engine = one.engine(event_count=1)
        session = await engine.open()
        span = engine.span(prompt(session, 2), range(2))
        event = engine.record()
        handle: Any = await (
            session.store(span, after=event) if how == "store" else session.load(span, wait_s=30, after=event)
        )
        engine.slots.give_back(event)
        await one.asked()
        handle.cancel()
        outcome = await handle.done(10.0)
        assert set(outcome.failed) == {0, 1}
        assert handle.hold_ended
        await eventually(lambda: engine.slots.free_count == 1)
        assert one.gpu.log == []
        assert await session.close()
        engine.close()


async def test_an_event_that_never_fires_does_not_hold_up_the_close() -> None:
    async with host() as one:
        engine = one.engine()
        session = await engine.open()
        event = engine.record()
        handle = await session.store(engine.span(prompt(session, 1), range(1)), after=event)
        engine.slots.give_back(event)
        await one.asked()
        assert await session.close()
        assert session.released.is_set()
        assert handle.hold_ended
        assert one.cache.closed
        assert engine.slots.free_count == 2
        engine.close()


async def test_a_load_whose_event_does_not_fire_ends_at_its_deadline() -> None:
    async with host() as one:
        engine = one.engine()
        session = await engine.open()
        chain = prompt(session, 1)
        engine.compute(chain, range(1))
        await run_store(session, engine.span(chain, range(1)))
        event = engine.record()
        handle = await session.load(engine.span(chain, range(1), at=5), wait_s=0.05, after=event)
        outcome = await handle.done(10.0)
        assert isinstance(outcome.error, DeadlineExceeded)
        assert "scatter" not in one.gpu.log

        handle = await session.load(engine.span(chain, range(1), at=5), wait_s=30, after=engine.record())
        engine.finish(EngineEvent(slot=1, generation=1))
        assert (await handle.done(10.0)).loaded_chunks == 1
        assert one.gpu.log[-2:] == ["passed 1", "scatter"]
        assert await session.close()
        engine.close()


async def test_an_engine_killed_with_events_pending_leaves_nothing() -> None:
    async with host() as one:
        engine = one.engine()
        hold = engine.plan.new_hold()
        async with raw_engine(one.agent.endpoint) as raw:
            registered = await raw.register(engine)
            await raw.lend_file(registered, 0, hold.lent[0])
            await raw.next("ready")
            event = engine.record()
            span = engine.span(Chain.of(registered.hash_key, range(SPEC.chunk_tokens), SPEC.chunk_tokens), range(1))
            await raw.send(2, event_recorded=FIRST)
            await raw.send(2, store=store_to_proto(span, None, event))
            await raw.send(3, load=load_to_proto(span, 60_000, event))
            await one.asked()
            assert hold.lent[0].is_lent()
        async with asyncio.timeout(10):
            await hold.ended()
        assert one.cache.closed
        await eventually(lambda: not one.agent.engine.sessions)
        assert not one.world.cluster.writing
        hold.close()
        engine.close()


async def test_a_live_agent_that_ends_a_session_lets_go_at_once() -> None:
    async with host() as one:
        engine = one.engine()
        session = await engine.open()
        event = engine.record()
        handle = await session.store(engine.span(prompt(session, 1), range(1)), after=event)
        engine.slots.give_back(event)
        await one.asked()
        started_s = asyncio.get_running_loop().time()
        await one.agent.engine.close()  # as a drain does
        async with asyncio.timeout(10):
            await session.released.wait()
        assert asyncio.get_running_loop().time() - started_s < 0.9  # no grace period: the agent has said so
        assert handle.hold_ended
        assert engine.slots.free_count == 2
        await session.close()
        engine.close()


async def announced(raw: RawEngine, *events: tuple[int, int]) -> None:
    for slot, generation in events:
        await raw.send(7, event_recorded=gpuagent_pb2.EngineEvent(slot=slot, generation=generation))


@pytest.mark.parametrize(
    ("recordings", "named"),
    [
        ([(2, 1)], "event slot 2 does not exist; 2 events were registered"),
        ([(-1, 1)], "event slot -1 does not exist"),
        ([(0, 0)], "generation 0 of event slot 0 does not grow"),
        ([(0, 1), (0, 2)], "recorded again .generation 2. before `event_waited` came for generation 1"),
    ],
)
async def test_recordings_that_are_refused(recordings: list[tuple[int, int]], named: str) -> None:
    async with host() as one:
        engine = one.engine()
        async with raw_engine(one.agent.endpoint) as raw:
            await raw.ready_without_hold(engine)
            await announced(raw, *recordings)
            with pytest.raises(InvalidRequest, match=named):
                raise await raw.refusal()
            await raw.send(8, match=gpuagent_pb2.EngineMatchRequest())
            await raw.next("match")
        engine.close()


async def test_events_that_no_request_may_name() -> None:
    async with host() as one:
        engine = one.engine()
        async with raw_engine(one.agent.endpoint) as raw:
            registered = await raw.ready_without_hold(engine)
            span = engine.span(Chain.of(registered.hash_key, range(SPEC.chunk_tokens), SPEC.chunk_tokens), range(1))

            async def store(slot: int, generation: int, **changes: Any) -> None:
                request = store_to_proto(span, None, EngineEvent(slot=slot, generation=generation))
                for name, value in changes.items():
                    setattr(request, name, value)
                await raw.send(9, store=request)

            await store(0, 1)
            with pytest.raises(InvalidRequest, match="generation 1 of event slot 0 was not announced"):
                raise await raw.refusal()
            await store(5, 1)
            with pytest.raises(InvalidRequest, match="event slot 5 does not exist"):
                raise await raw.refusal()
            # A refused store gives the slot back all the same, and then its event is nobody's.
            await announced(raw, (0, 1))
            await store(0, 1, parent_hash=b"short")
            waited = await raw.next("event_waited")
            assert (waited.slot, waited.generation) == (0, 1)
            await raw.refusal()
            await store(0, 1)
            with pytest.raises(InvalidRequest, match=r"was given back.*record it again"):
                raise await raw.refusal()
            await announced(raw, (0, 1))
            with pytest.raises(InvalidRequest, match="does not grow; the last was 1"):
                raise await raw.refusal()
            await announced(raw, (0, 5))
            await store(0, 5)
            assert (await raw.next("event_waited")).generation == 5
            await raw.next("gathered")
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
        assert (await handle.done(10.0)).stored_chunks == 1
        assert await successor.close()
        engine.close()


async def test_the_pool_gives_events_back_and_its_loads_begin_layer_by_layer() -> None:
    async with host(max_request_chunks=2) as one:
        engine = one.engine(event_count=1)
        pool = await KvPool.open(engine.plan, CLIENT)
        chain = prompt(pool.session, 5)
        engine.compute(chain, range(5))
        event = engine.record()
        table = engine.blocks.reshape(-1)
        ticket = await pool.store(chain, table, first_chunk=0, end_chunk=5, after=event)
        await one.asked()
        engine.finish(event)
        assert (await ticket.report(10.0)).stored_chunks == 5
        assert engine.slots.free_count == 1
        with pytest.raises(InvalidRequest):
            await pool.store(chain, table, first_chunk=0, end_chunk=9, after=engine.record())
        assert engine.slots.free_count == 1

        engine.clear()
        event = engine.record()
        loading = pool.begin_load(chain, table, first_chunk=0, end_chunk=2, after=event)
        await one.asked()
        assert not loading.done
        assert loading.layers_loaded == 0
        engine.finish(event)
        assert await loading.wait_layers(SPEC.group.layers)
        assert engine.holds(chain, range(2))
        report = await loading.report()
        assert (report.loaded_chunks, report.error) == (2, None)
        assert await pool.begin_load(chain, table, first_chunk=0, end_chunk=0).wait_layers(1) is False
        await eventually(lambda: engine.slots.free_count == 1)
        assert await pool.close()
        engine.close()
