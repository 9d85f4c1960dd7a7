"""An engine's process launches kernels for an agent in another one, on a real GPU."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.core.elements import Codec
from kvpool.testing import eventually
from kvpool_gpuagent.core.ways import Way
from tests.fixtures.agent import Agent, World, running_agent

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

REPOSITORY = Path(__file__).resolve().parents[2]
START_S, COMMAND_S = 180.0, 90.0  # the first start compiles kernels
CHUNKS = 8


class Child:
    """An engine's process."""

    def __init__(self, endpoint: str, codec: Codec) -> None:
        command = [sys.executable, "-m", "tests.gpu.launching_child", endpoint, codec.name]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    async def read(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            line = await asyncio.to_thread(self.process.stdout.readline)
        assert line, "the engine's process has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send(self, op: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op} | arguments) + "\n")
        self.process.stdin.flush()

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.send(op, **arguments)
        return await self.read(COMMAND_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def pin(agent: Agent, way: Way) -> Any:
    """Leave the one session's cache this way only."""
    cache: Any = agent.engine.sessions[0]._cache
    for direction in (cache.store, cache.load):
        assert way in direction.chooser.ways
        direction.chooser.pin(way)
    return cache


@asynccontextmanager
async def pair(codec: Codec = Codec.RAW) -> AsyncIterator[tuple[World, Agent, Child]]:
    # Kernels must not be imported where tests are collected: elsewhere the interpreter is chosen before that.
    from kvpool_gpuagent.adapters.cuda_device import CudaDevice

    world = World(window_pages=64)
    async with running_agent(world, device=CudaDevice(scratch_bytes=64 << 20)) as agent:
        child = Child(agent.endpoint, codec)
        try:
            assert await child.read(START_S) == {"ready": True}
            yield world, agent, child
        finally:
            child.kill()


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(("codec", "worst"), [(Codec.RAW, 0.0), (Codec.FP8_E4M3, 0.5)])
async def test_bytes_that_the_engine_gathers_and_scatters_are_those_it_computed(
    codec: Codec, worst: float, busy: bool
) -> None:
    async with pair(codec) as (_, agent, child):
        cache = pin(agent, Way.ENGINE)
        await child.ask("busy", on=busy)
        for seed in range(3):
            stored = await child.ask("store", seed=seed)
            assert stored["stored"] == CHUNKS, stored
        for seed in range(3):
            loaded = await child.ask("load", seed=seed)
            assert (loaded["loaded"], loaded["untouched"]) == (CHUNKS, True), loaded
            assert loaded["worst"] <= worst
        assert loaded["launches"] >= 6
        assert not loaded["failed_launches"]
        assert Way.ENGINE in cache.store.chooser.ways
        assert (await child.ask("close"))["closed"]


async def test_pages_of_one_way_are_those_of_the_others() -> None:
    async with pair() as (_, agent, child):
        trips = [(Way.ENGINE, Way.BURSTS), (Way.BURSTS, Way.ENGINE), (Way.ENGINE, Way.RUNS)]
        for seed, (there, back) in enumerate(trips):
            pin(agent, there)
            assert (await child.ask("store", seed=seed))["stored"] == CHUNKS
            pin(agent, back)
            loaded = await child.ask("load", seed=seed)
            assert (loaded["loaded"], loaded["worst"], loaded["untouched"]) == (CHUNKS, 0.0, True)
        assert (await child.ask("close"))["closed"]


async def test_an_engine_that_is_killed_while_it_launches_leaves_nothing_behind() -> None:
    async with pair() as (world, agent, child):
        pin(agent, Way.ENGINE)
        await child.ask("busy", on=True)
        child.send("store", seed=0)
        await eventually(lambda: any(pool.slots_out for pool in world.pools))
        child.process.kill()
        await eventually(lambda: not agent.engine.sessions)
        assert not world.cluster.writing
        assert all(not pool.slots_out for pool in world.pools)
