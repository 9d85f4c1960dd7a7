"""Kernel streams: one for each burst in flight, and never waited for in vain."""

from __future__ import annotations

import pytest

from kvpool_gpuagent.adapters.gpu.copy_paths import MOST_KERNEL_STREAMS, QueueStreams
from kvpool_gpuagent.adapters.gpu.runtime import Stream
from tests.fixtures.host_gpu import HostRuntime, HostStream


class StreamsRuntime(HostRuntime):
    """Knows where kernels go, and which streams were made."""

    def __init__(self) -> None:
        super().__init__()
        self.current: Stream | None = None
        self.made: list[WatchedStream] = []

    def launch_on(self, stream: Stream) -> None:
        self.current = stream

    def stream(self, *, urgent: bool) -> Stream:
        self.made.append(WatchedStream(self))
        return self.made[-1]


class WatchedStream(HostStream):
    synchronized = False

    def synchronize(self) -> None:
        self.synchronized = True


def test_each_burst_in_flight_launches_on_a_stream_of_its_own() -> None:
    runtime = StreamsRuntime()
    streams = QueueStreams(runtime)
    assert len(runtime.made) == 1  # of copies; kernels may never be needed
    taken = []
    for _ in range(MOST_KERNEL_STREAMS):
        taken.append(streams.take())
        assert runtime.current is taken[-1]
    assert len({*taken, streams.copies}) == MOST_KERNEL_STREAMS + 1


@pytest.mark.timeout(60)
def test_bursts_share_a_stream_rather_than_wait_for_one_that_never_comes_back() -> None:
    """A burst that fails gives nothing back."""
    streams = QueueStreams(StreamsRuntime(), most_streams=1)
    failed, other = streams.take(), streams.take()
    assert failed is other
    streams.give(other)
    assert streams.take() is failed


def test_failed_bursts_do_not_eat_up_the_gpu() -> None:
    streams = QueueStreams(StreamsRuntime(), most_streams=2)
    assert len({streams.take() for _ in range(10)}) == 2


def test_a_stream_that_came_back_is_taken_before_a_new_one_is_made() -> None:
    streams = QueueStreams(StreamsRuntime())
    first, second = streams.take(), streams.take()
    streams.give(first)
    assert streams.take() is first
    assert first is not second


def test_a_queue_waits_for_all_of_its_streams() -> None:
    runtime = StreamsRuntime()
    streams = QueueStreams(runtime)
    streams.give(streams.take())
    streams.take()
    streams.take()
    streams.synchronize()
    assert len(runtime.made) == 3
    assert all(stream.synchronized for stream in runtime.made)
