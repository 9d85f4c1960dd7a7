"""Engines that say nothing for a while: which are gone, and which were only not listened to."""

from __future__ import annotations

from contextlib import suppress
from itertools import count

import grpc.aio

from kvpool.core.errors import DeadlineExceeded, KvPoolError
from kvpool.testing import eventually
from kvpool.v1 import gpuagent_pb2
from tests.fixtures.agent import EngineProcess, World, running_agent
from tests.fixtures.raw_engine import raw_engine
from tests.fixtures.standstill import stood_still
from tests.grpc.test_gpuagent_ends import gone


async def test_a_silent_engine_is_gone() -> None:
    world = World()
    async with running_agent(world, heartbeat_interval_ms=20) as agent:
        engine = EngineProcess(agent.endpoint)
        attempts = count(1)

        async def was_ready() -> bool:
            """Not so if this machine stood still: then an engine is silent while it registers."""
            number, ready = next(attempts), False
            async with raw_engine(agent.endpoint) as raw:
                with suppress(grpc.aio.AioRpcError, KvPoolError):
                    await raw.ready(engine)
                    ready = True
                error = await raw.end()
                assert isinstance(error, DeadlineExceeded) and "silent for 0.08 s" in error.message, error
            await gone(agent, world, engine)
            assert agent.metric("abnormal_session_ends_total") == number
            return ready

        await eventually(was_ready)
        engine.close()


async def test_heartbeats_keep_a_session_also_while_descriptors_are_awaited() -> None:
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            registered = await raw.register(engine)
            for _ in range(3):
                await raw.send(0, heartbeat=gpuagent_pb2.EngineHeartbeat())
                await raw.next("heartbeat")
            await raw.lend(engine, registered)
            await raw.next("ready")
            await raw.send(9, close=gpuagent_pb2.EngineClose())
            await raw.next("closed")
            assert await raw.end() is None
        assert agent.metric("abnormal_session_ends_total") == 0
        engine.close()


async def test_an_agent_that_stood_still_hears_its_engines_before_it_judges_them() -> None:
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            await raw.ready(engine)
            stood_still(3600.0)
            await raw.send(0, heartbeat=gpuagent_pb2.EngineHeartbeat())
            await raw.next("heartbeat")
            await raw.send(9, close=gpuagent_pb2.EngineClose())
            await raw.next("closed")
        assert agent.metric("abnormal_session_ends_total") == 0
        engine.close()
