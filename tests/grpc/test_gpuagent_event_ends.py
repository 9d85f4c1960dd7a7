"""Events that never fire, engines and agents that leave while one is waited for, recordings that are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpool.client.engine_hold import GpuMemoryHold
from kvpool.client.engine_items import load_to_proto, store_to_proto
from kvpool.client.hashing import Prompt
from kvpool.core.errors import DeadlineExceeded, InvalidRequest
from kvpool.core.ipc import EngineEvent
from kvpool.testing import eventually
from kvpool.v1 import gpuagent_pb2
from tests.fixtures.agent import SPEC, prompt, run_store
from tests.fixtures.gpu_agent import host
from tests.fixtures.raw_engine import RawEngine, raw_engine

FIRST = gpuagent_pb2.EngineEvent(slot=0, generation=1)


@pytest.mark.parametrize("how", ["store", "load"])
async def test_a_cancelled_request_gives_the_slot_of_an_event_back_that_never_fires(how: str) -> None:
    async with host() as one:
        engine = one.engine(event_count=1)
        session = await engine.open()
        span = engine.span(prompt(session, 2), range(2))
        event = engine.record()
        handle: Any = await (
            session.store(span, after=event) if how == "store" else session.load(span, wait_s=60, after=event)
        )
        engine.slots.give_back(event)
        await one.asked()
        handle.cancel()
        outcome = await handle.done(60)
        assert set(outcome.failed_chunks) == {0, 1}
        assert handle.released
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
        assert handle.released
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
        outcome = await handle.done(60)
        assert isinstance(outcome.error, DeadlineExceeded)
        assert "scatter" not in one.gpu.log

        handle = await session.load(engine.span(chain, range(1), at=5), wait_s=60, after=engine.record())
        engine.finish(EngineEvent(slot=1, generation=1))
        assert (await handle.done(60)).loaded_chunks == 1
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
            span = engine.span(Prompt.of(registered.hash_key, range(SPEC.chunk_tokens), SPEC.chunk_tokens), range(1))
            await raw.send(2, event_recorded=FIRST)
            await raw.send(2, store=store_to_proto(span, None, event))
            await raw.send(3, load=load_to_proto(span, 60_000, event))
            await one.asked()
            assert hold.lent[0].is_lent()
        async with asyncio.timeout(60):
            await hold.ended()
        assert one.cache.closed
        await eventually(lambda: not one.agent.engine.sessions)
        assert not one.world.cluster.writing
        hold.close()
        engine.close()


async def test_a_live_agent_that_ends_a_session_lets_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = GpuMemoryHold(driver_grace_s=3600.0)  # the agent says that it has let go, so no one waits for its driver
    async with host() as one:
        engine = one.engine()
        monkeypatch.setattr(type(engine.plan), "new_hold", lambda plan: hold)
        session = await engine.open()
        event = engine.record()
        handle = await session.store(engine.span(prompt(session, 1), range(1)), after=event)
        engine.slots.give_back(event)
        await one.asked()
        await one.agent.engine.close()  # as a drain does
        async with asyncio.timeout(60):
            await session.released.wait()
        assert handle.released
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
            span = engine.span(Prompt.of(registered.hash_key, range(SPEC.chunk_tokens), SPEC.chunk_tokens), range(1))

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
            # A refused store gives the slot back all the same, and then its event has no owner.
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
