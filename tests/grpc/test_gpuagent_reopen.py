"""An engine registers again after its session broke: not before the agent has let go of its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvpool.client.gpuagent_control import AgentControl
from kvpool.core.cancel import CancelToken
from kvpool.core.errors import Stopped
from kvpool.core.grid import ShardGrid
from kvpool.core.ipc import IpcEvent
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.testing import eventually
from kvpool_gpuagent.adapters.cpu.device import CpuDevice
from kvpool_gpuagent.core.pages import CopyBatch
from kvpool_gpuagent.ports import EngineCache, MappedHandle
from tests.fixtures.agent import CLIENT, EngineProcess, World, prompt, run_load, run_store, running_agent
from tests.fixtures.raw_engine import raw_engine


class SlowCache:
    """A cache whose scatters wait for the test: what a copy in progress looks like to the rest."""

    def __init__(self, cache: EngineCache, gate: asyncio.Event) -> None:
        self._cache, self._gate = cache, gate
        self.scattering = 0

    async def event_passed(self, slot: int) -> bool:
        return await self._cache.event_passed(slot)

    async def gather(self, batch: CopyBatch, stop: CancelToken) -> bool:
        return await self._cache.gather(batch, stop)

    async def scatter(self, batch: CopyBatch) -> None:
        self.scattering += 1
        await self._gate.wait()
        self.scattering -= 1
        await self._cache.scatter(batch)

    async def close(self) -> None:
        assert not self.scattering
        await self._cache.close()


class SlowDevice(CpuDevice):
    """Makes slow caches."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.caches: list[SlowCache] = []

    async def map_cache(
        self,
        spec: KeyspaceSpec,
        grid: ShardGrid,
        layout: EngineLayout,
        handles: Sequence[MappedHandle],
        events: Sequence[IpcEvent],
    ) -> EngineCache:
        self.caches.append(SlowCache(await super().map_cache(spec, grid, layout, handles, events), self.gate))
        return self.caches[-1]


async def test_registering_again_waits_for_the_copies_of_the_broken_session() -> None:
    world, device = World(), SlowDevice()
    async with running_agent(world, device=device) as agent:
        engine = EngineProcess(agent.endpoint)
        session = await engine.open()
        chain = prompt(session, 2)
        engine.compute(chain, range(2))
        await run_store(session, engine.span(chain, range(2)))
        handle = await session.load(engine.span(chain, range(2)), wait_s=60)
        await eventually(lambda: device.caches[0].scattering > 0)

        opening = asyncio.ensure_future(session.reopen())
        await eventually(lambda: session.broken.is_set() and agent.engine.sessions[0].active_requests == 1)
        control = AgentControl(agent.tcp_endpoint, CLIENT)
        await control.status()  # the agent has had time to answer what it should not yet
        await control.close()
        assert not opening.done()
        held = handle.released
        assert not held
        device.gate.set()
        again = await asyncio.wait_for(opening, 60)
        assert handle.released
        await eventually(lambda: len(agent.engine.sessions) == 1)
        assert world.pools[0].closed

        engine.clear()
        assert (await run_load(again, engine.span(chain, range(2)))).loaded_chunks == 2
        assert engine.holds(chain, range(2))
        assert await again.close()
        engine.close()


async def test_a_session_whose_connection_still_lives_is_superseded() -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as old, raw_engine(agent.endpoint) as new:
            registered = await old.ready(engine)
            await new.ready(engine, previous_session_id=registered.session_id)
            error = await old.end()
            assert isinstance(error, Stopped)
            assert "registered again" in error.message
            await eventually(lambda: len(agent.engine.sessions) == 1)
        await eventually(lambda: not agent.engine.sessions)
        engine.close()


async def test_an_unknown_session_is_long_gone() -> None:
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as first, raw_engine(agent.endpoint) as second:
            await first.ready(engine)
            await second.ready(engine, previous_session_id=b"x" * 16)
            assert len(agent.engine.sessions) == 2
        engine.close()
