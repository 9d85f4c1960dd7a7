"""What an agent of a GPU waits for before it serves: arena memory that is mapped and registered."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvpool.core.errors import ServiceUnavailable
from kvpool.testing import eventually
from kvpool_gpuagent import main
from tests.fixtures.patience import PATIENCE_S


class Arena:
    """Prepared when a test says so."""

    mapped_bytes = 3

    def __init__(self) -> None:
        self.prepared, self.error, self.asked = asyncio.Event(), "", 0

    async def prepare(self) -> None:
        self.asked += 1
        await self.prepared.wait()
        if self.error:
            raise ServiceUnavailable(self.error)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, main.__name__)
    return caplog


async def test_an_agent_serves_when_its_memory_is_ready_and_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(main, "_PROGRESS_LOG_S", 0.01)
    arena = Arena()
    waiting = asyncio.ensure_future(main._prepare(arena, PATIENCE_S))  # type: ignore[arg-type]
    await eventually(lambda: "preparing arena memory" in said.text)
    assert not waiting.done() and arena.asked == 1
    arena.prepared.set()
    assert (await waiting).done()
    assert "arena memory is ready" in said.text


async def test_an_agent_serves_meanwhile_once_its_time_is_up(said: pytest.LogCaptureFixture) -> None:
    arena = Arena()
    preparing = await main._prepare(arena, 0.05)  # type: ignore[arg-type]
    assert not preparing.done() and "serving meanwhile" in said.text
    arena.prepared.set()
    await preparing
    assert "arena memory is ready" in said.text


async def test_an_agent_without_a_pagestore_serves(said: pytest.LogCaptureFixture) -> None:
    arena = Arena()
    arena.error = "planted"
    arena.prepared.set()
    assert (await main._prepare(arena, PATIENCE_S)).done()  # type: ignore[arg-type]
    assert "planted" in said.text and "it is mapped when it is used" in said.text
