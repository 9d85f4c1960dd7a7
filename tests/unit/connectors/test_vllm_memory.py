"""The events of a GPU engine of vLLM, when its agent gives none back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool.client import gpu
from kvpool.client.engine_events import EventSlots
from kvpool.connectors.vllm.cache_memory import _Events
from kvpool.core.errors import DeadlineExceeded
from kvpool.core.ipc import EngineEvent


class Recorded:
    """GpuEvents of an agent that gives none back until it is told to."""

    def __init__(self, ordinal: int) -> None:
        self.slots, self.waited, self.there = EventSlots(()), list[float](), False

    def record(self, *, timeout_s: float) -> EngineEvent:
        self.waited.append(timeout_s)
        if not self.there:
            raise DeadlineExceeded("none is free")
        return EngineEvent(slot=0, generation=1)


def test_an_agent_that_keeps_all_events_delays_the_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GpuEvents", Recorded)
    synchronized: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: synchronized.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    events = _Events(torch.device("cuda", 0))
    recorded: Any = events._events
    assert [events.record() for _ in range(4)] == [None] * 4
    assert recorded.waited == [0.05, 0.0, 0.0, 0.0]
    assert len(synchronized) == 4
    recorded.there = True
    assert events.record() is not None
    events.record()
    assert recorded.waited[-2:] == [0.0, 0.05]
