"""Kernel streams and the memory that goes with them: filled before it is used, and never waited for in vain."""

from __future__ import annotations

import pytest

from kvpool.kernels.cache_kernels import KernelSpace
from kvpool_gpuagent.adapters.gpu_runtime import OutOfDeviceMemory, Stream
from kvpool_gpuagent.adapters.gpu_streams import LaneStreams
from tests.fixtures.host_gpu import HostRuntime


class LineRuntime(HostRuntime):
    """Knows on which stream each space was filled, and has room for so many."""

    def __init__(self, room_for: int = 100) -> None:
        super().__init__()
        self.current: Stream | None = None
        self.filled_on: dict[int, Stream | None] = {}
        self.room_for = room_for

    def launch_on(self, stream: Stream) -> None:
        self.current = stream

    def kernel_space(self) -> KernelSpace:
        if len(self.filled_on) == self.room_for:
            raise OutOfDeviceMemory("no room")
        space = super().kernel_space()
        self.filled_on[space.faults_address] = self.current
        return space


def test_a_lines_memory_is_filled_on_its_own_stream() -> None:
    """On another stream the fill could come while sums are made there: pages would be called good unlooked at."""
    runtime = LineRuntime()
    streams = LaneStreams(runtime)
    lines = [streams.ensure(), *(streams.take() for _ in range(3))]
    assert len({line.stream for line in lines}) == 3
    for line in lines:
        assert runtime.filled_on[line.space.faults_address] is line.stream
    assert runtime.current is lines[-1].stream


@pytest.mark.timeout(60)
def test_bursts_share_a_line_rather_than_wait_for_one_that_never_comes_back() -> None:
    """A burst that fails gives nothing back."""
    runtime = LineRuntime(room_for=1)
    streams = LaneStreams(runtime)
    failed, other = streams.take(), streams.take()
    assert failed is other
    streams.give(other)
    assert streams.take() is failed


def test_failed_bursts_do_not_eat_up_the_gpu() -> None:
    runtime = LineRuntime()
    streams = LaneStreams(runtime, most_lines=2)
    assert len({streams.take() for _ in range(10)}) == 2
    assert len(runtime.filled_on) == 2


def test_a_line_that_came_back_is_taken_before_a_new_one_is_made() -> None:
    runtime = LineRuntime()
    streams = LaneStreams(runtime)
    first, second = streams.take(), streams.take()
    streams.give(first)
    assert streams.take() is first
    assert first is not second


def test_without_any_room_the_caller_is_told_each_time() -> None:
    runtime = LineRuntime(room_for=0)
    streams = LaneStreams(runtime)
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemory):
            streams.take()
    runtime.room_for = 1
    assert streams.take() is streams.ensure()
