"""Memory that an agent cannot unmap: it does not say that it has."""

from __future__ import annotations

import asyncio

import pytest

import kvpool.client.gpuagent
import kvpool_gpuagent.stream
from kvpool.client.engine_hold import GpuMemoryHold
from kvpool_gpuagent.engine.descriptors import HoldFile
from tests.fixtures.agent import prompt
from tests.fixtures.channels import opened_channels
from tests.fixtures.gpu_agent import FakeGpuCache, host


async def test_an_agent_that_cannot_unmap_never_says_that_it_has_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a GPU has failed, for one: what still runs there only the end of the process can tell."""
    close = FakeGpuCache.close

    async def failing(cache: FakeGpuCache) -> None:
        await close(cache)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(FakeGpuCache, "close", failing)
    hold, hold_files = GpuMemoryHold(), list[HoldFile]()
    channels = opened_channels(monkeypatch, kvpool.client.gpuagent)

    def hold_file(descriptor: int) -> HoldFile:
        hold_files.append(HoldFile(descriptor))
        return hold_files[-1]

    monkeypatch.setattr(kvpool_gpuagent.stream, "HoldFile", hold_file)
    async with host() as one:
        engine = one.engine(event_count=1)
        monkeypatch.setattr(type(engine.plan), "new_hold", lambda plan: hold)
        session = await engine.open()
        chain = prompt(session, 1)
        engine.compute(chain, range(1))
        event = engine.record()
        handle = await session.store(engine.span(chain, range(1)), after=event)
        engine.slots.give_back(event)
        await one.asked()
        (served,) = one.agent.engine.sessions
        await channels[0].close()  # the connection breaks
        await asyncio.wait_for(served.close(), 60)
        assert served.unmapped.is_set()
        assert hold.lent[0].is_lent()
        assert not handle.released
        await hold_files[0].release()
        await session.close()
        assert session.released.is_set()
        engine.close()
    assert "stay held until this process ends" in caplog.text
