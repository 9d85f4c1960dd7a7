"""What an engine does about its blocks' memory when events run out, or when an agent may still touch it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvpool.connectors import block_memory as subject
from kvpool.connectors.block_memory import GpuBlockMemory, SharedBlockMemory, block_memory
from kvpool.core.errors import DeadlineExceeded
from kvpool.core.ipc import EngineEvent

CPU = torch.device("cpu")


class Events:
    """GpuEvents that hands out one event and no more."""

    made: list[Events]

    def __init__(self, ordinal: int) -> None:
        self.made.append(self)
        self.slots = object()
        self.left = [EngineEvent(slot=0, generation=1)]
        self.closed = False

    def record(self, *, timeout_s: float) -> EngineEvent:
        if not self.left:
            raise DeadlineExceeded("none became free")
        return self.left.pop()

    def close(self) -> None:
        self.closed = True


class Stream:
    """Counts how often it is waited for."""

    def __init__(self) -> None:
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Stands in for the GPU; tensors are on the CPU."""
    stream = Stream()

    def export(tensors: list[torch.Tensor]) -> Any:
        return SimpleNamespace(regions=tuple(f"region of {tensor.numel()}" for tensor in tensors))

    monkeypatch.setattr(Events, "made", [], raising=False)
    monkeypatch.setattr("kvpool.client.gpu.GpuEvents", Events)
    monkeypatch.setattr("kvpool.client.gpu.export_tensors", export)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: stream)
    monkeypatch.setattr(subject, "_abandoned", [])
    return stream


def test_without_a_free_event_the_stream_is_waited_for(stream: Stream) -> None:
    memory = GpuBlockMemory(64, CPU)
    assert list(map(str, memory.regions)) == ["region of 64"]
    assert memory.record_event() == EngineEvent(slot=0, generation=1)
    assert stream.synchronized == 0
    assert memory.record_event() is None
    assert stream.synchronized == 1


def test_memory_that_an_agent_may_touch_is_not_reused(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    memory = GpuBlockMemory(64, CPU)
    address = memory.bytes_of().data_ptr()
    with caplog.at_level(logging.WARNING):
        memory.close(untouched=False)
        memory.close(untouched=True)
    kept, events = cast(tuple[torch.Tensor, Events], subject._abandoned[0])
    assert (kept.data_ptr(), events.closed) == (address, False)
    assert "64 bytes of GPU memory are not reused" in caplog.text


def test_memory_that_is_not_used_is_freed(stream: Stream) -> None:
    memory = GpuBlockMemory(64, CPU)
    memory.close(untouched=True)
    (events,) = Events.made
    assert events.closed
    assert not subject._abandoned


def test_the_cpu_has_shared_memory_and_nothing_to_come_after() -> None:
    memory = block_memory(4096, CPU)
    assert isinstance(memory, SharedBlockMemory)
    memory.bytes_of()[:2] = b"ab"
    assert (memory.record_event(), memory.events, memory.regions[0].size_bytes) == (None, None, 4096)  # type: ignore[func-returns-value]
    memory.close(untouched=True)
