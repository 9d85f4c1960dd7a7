"""Where a lane's work goes: one order for its copies, and a kernel stream for each burst in flight.

Kernels of one stream follow each other, and beside a busy engine each waits for its turn. Bursts on streams of their
own wait for the same turn.
"""

from __future__ import annotations

import threading

from kvpool_gpuagent.adapters.gpu_runtime import GpuRuntime, Stream

MOST_KERNEL_STREAMS = 4  # as many as bursts are in flight


class LaneStreams:
    """Of one lane. Kernel streams are made when first needed."""

    def __init__(self, runtime: GpuRuntime, most_streams: int = MOST_KERNEL_STREAMS) -> None:
        """most_streams: bursts beyond them share one."""
        self.copies = runtime.stream(urgent=True)
        self._runtime, self._most_streams = runtime, most_streams
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._bursts: list[int] = []  # of each stream, in flight; one that failed counts for good: see `take`

    def take(self) -> Stream:
        """A stream for one burst; kernels launched in this thread go to it.

        One that no burst in flight uses, if there may be one. Else the burst follows others on theirs: slower, and
        right, because the lane's one issuing thread launches all kernels of a burst before those of the next. So no one
        waits here for what a burst that failed never gives back.
        """
        with self._lock:
            if not self._bursts or (min(self._bursts) and len(self._streams) < self._most_streams):
                self._streams.append(self._runtime.stream(urgent=True))
                self._bursts.append(0)
            number = self._bursts.index(min(self._bursts))
            self._bursts[number] += 1
            stream = self._streams[number]
        self._runtime.launch_on(stream)
        return stream

    def give(self, stream: Stream) -> None:
        """Its burst is over."""
        with self._lock:
            self._bursts[self._streams.index(stream)] -= 1

    def synchronize(self) -> None:
        """Block until all work of the lane has ended. Raises what the GPU reports."""
        with self._lock:
            streams = [self.copies, *self._streams]
        for stream in streams:
            stream.synchronize()
