"""Loads that are cancelled on request, on a worker's side of the vLLM connector."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.client.engine_items import LoadResult
from kvpool.client.handle import AsyncHandle
from kvpool.connectors.vllm.step_jobs import LoadReport, StepJobs
from kvpool.core.errors import ServiceUnavailable
from tests.unit.connectors.test_vllm_worker import Pool, World, end_of


def test_a_cancelled_load_is_stopped_and_still_ends_for_the_engine() -> None:
    class StoppedPool(Pool):
        async def start_load(self, chain: Any, blocks: Any, **values: Any) -> AsyncHandle[LoadResult]:
            handles.append(await super().start_load(chain, blocks, **values))
            return handles[-1]

    handles: list[AsyncHandle[LoadResult]] = []
    world = World(StoppedPool(loaded=1))
    world.connection.held = True
    world.load()
    world.side.start_loads(StepJobs(step=2, cancel=["r", "unknown"]))
    assert world.side.take_finished_recving() == set()
    world.connection.go()
    assert handles[0].cancelled
    assert world.side.take_finished_recving() == {"r"}
    end = end_of(world)
    assert isinstance(end, LoadReport)
    assert (end.cancelled, end.result.loaded_chunks, end.failed_chunks) == (True, 1, 3)
    world.side.start_loads(StepJobs(step=3, cancel=["r"]))  # it has ended: nothing to stop
    world.connection.go()
    world.connection.held = False
    world.load()
    assert not handles[1].cancelled
    end = end_of(world)
    assert isinstance(end, LoadReport)
    assert not end.cancelled


def test_a_load_cannot_be_cancelled_any_more_when_the_link_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Pool())
    world.connection.held = True
    world.load()

    def closed(*_: Any) -> Any:
        raise ServiceUnavailable("closed")

    monkeypatch.setattr(world.connection, "start", closed)
    world.side.start_loads(StepJobs(step=2, cancel=["r"]))
    world.connection.go()
    assert world.side.take_finished_recving() == {"r"}
