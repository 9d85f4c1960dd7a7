"""Loads that a forward pass waits for layer by layer."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.client.engine_items import LoadResult
from kvpool.connectors.vllm.layerwise_loads import LayerwiseLoads
from kvpool.core.errors import KvPoolError, ServiceUnavailable
from tests.unit.connectors.vllm_fakes import FakeConnection
from tests.unit.connectors.vllm_jobs import a_load

JOB = a_load("r", (1, 2), end_chunk=1)


class Ticket:
    """A load whose layers come when they are waited for."""

    def __init__(self, error: KvPoolError | None = None) -> None:
        self.layers_loaded, self.done, self.waited_for = 0, False, list[int]()
        self._error = error

    async def wait_layers(self, layers: int) -> bool:
        self.waited_for.append(layers)
        if self._error is not None:
            self.done = True
            return False
        self.layers_loaded = layers
        return True

    async def result(self) -> LoadResult:
        if self._error is not None:
            raise self._error
        return LoadResult(0, 1)

    async def wait_released(self) -> None:
        """Nothing writes."""


def loads(ticket: Ticket) -> tuple[LayerwiseLoads, list[Any]]:
    """One load, and what was said at its end."""
    ended: list[Any] = []
    running = LayerwiseLoads(FakeConnection(None), lambda *end: ended.append(end))  # type: ignore[arg-type]

    async def begin() -> Any:
        return ticket

    running.begin(JOB, begin)
    return running, ended


def test_each_layer_is_waited_for_once() -> None:
    ticket = Ticket()
    running, ended = loads(ticket)
    for layer in (1, 2, 2, 3):
        running.wait_layers(layer)
    assert ticket.waited_for == [1, 2, 3]
    assert ended == []
    running.finish()
    ((job, duration_s, result),) = ended
    assert (job, result.loaded_chunks, result.error) == (JOB, 1, None)
    assert duration_s >= 0


def test_a_load_that_fails_is_waited_for_no_more_and_said_at_the_end() -> None:
    ticket = Ticket(ServiceUnavailable("gone"))
    running, ended = loads(ticket)
    for layer in (1, 2, 3):
        running.wait_layers(layer)
    assert ticket.waited_for == [1]
    running.finish()
    assert [job for job, _, _ in ended] == [JOB]
    assert "gone" in str(ended[0][2])


def test_a_step_is_over_with_its_end() -> None:
    running, ended = loads(Ticket())
    running.finish()
    running.finish()
    running.wait_layers(1)
    assert len(ended) == 1


def test_an_agent_that_cannot_be_asked_is_the_callers_to_know() -> None:
    class Closed(FakeConnection):
        def start(self, work: Any, trace: Any = None) -> Any:
            raise ServiceUnavailable("closed")

    running = LayerwiseLoads(Closed(None), lambda *end: None)  # type: ignore[arg-type]
    with pytest.raises(ServiceUnavailable):
        running.begin(JOB, Ticket)  # type: ignore[arg-type]
