"""Memory that an agent cannot unmap: it does not say that it has."""

from __future__ import annotations

import asyncio

import pytest

from tests.fixtures.agent import prompt
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
    async with host() as one:
        engine = one.engine(event_count=1)
        session = await engine.open()
        chain = prompt(session, 1)
        engine.compute(chain, range(1))
        event = engine.record()
        handle = await session.store(engine.span(chain, range(1)), after=event)
        engine.slots.give_back(event)
        await one.asked()
        (served,) = one.agent.engine.sessions
        await session._stream.abort("the connection breaks")
        await asyncio.wait_for(served.close(), 60)
        assert served.unmapped.is_set()
        assert session._hold.lent[0].is_lent()
        assert not handle.released
        await session._stop_watching()
        assert served._hold_file is not None
        await served._hold_file.release()
        engine.close()
    assert "stay held until this process ends" in caplog.text
