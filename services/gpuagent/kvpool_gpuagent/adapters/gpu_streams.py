"""Where a lane's work goes: one order for its copies, and a kernel stream for each burst in flight.

Kernels of one stream follow each other, and beside a busy engine each waits for its turn. Bursts on streams of their
own wait for the same turn.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool_gpuagent.adapters.gpu_runtime import GpuRuntime, OutOfDeviceMemory, Stream

if TYPE_CHECKING:
    from kvpool.kernels.cache_kernels import KernelSpace

MOST_LINES = 4  # as many as bursts are in flight


@dataclass(frozen=True, slots=True, eq=False)
class KernelLine:
    """A kernel stream and the device memory that its kernels share."""

    stream: Stream
    space: KernelSpace


class LaneStreams:
    """Of one lane. Lines are made when first needed: an idle agent keeps little of the GPU's memory."""

    def __init__(self, runtime: GpuRuntime, most_lines: int = MOST_LINES) -> None:
        """most_lines: bursts beyond them share a line."""
        self.copies = runtime.stream(urgent=True)
        self._runtime, self._most_lines = runtime, most_lines
        self._lock = threading.Lock()
        self._lines: list[KernelLine] = []
        self._bursts: list[int] = []  # of each line, in flight; one that failed counts for ever: see `take`

    def ensure(self) -> KernelLine:
        """Have a line, for good: all bursts may share it. Raises OutOfDeviceMemory."""
        with self._lock:
            if not self._lines:
                self._make()
            return self._lines[0]

    def take(self) -> KernelLine:
        """A line for one burst; kernels launched in this thread go to it. Raises OutOfDeviceMemory if there is none.

        One that no burst in flight uses, if the GPU has room for it. Else the burst follows others on theirs: slower,
        and right, because the lane's one issuing thread launches all kernels of a burst before those of the next. So
        nobody waits here for what a burst that failed never gives back.
        """
        with self._lock:
            if not self._bursts or (min(self._bursts) and len(self._lines) < self._most_lines):
                try:
                    self._make()
                except OutOfDeviceMemory:
                    if not self._lines:
                        raise
                    self._most_lines = len(self._lines)
            number = self._bursts.index(min(self._bursts))
            self._bursts[number] += 1
            line = self._lines[number]
        self._runtime.launch_on(line.stream)
        return line

    def give(self, line: KernelLine) -> None:
        """Its burst is over, or whatever it enqueued may go before the next one."""
        with self._lock:
            self._bursts[self._lines.index(line)] -= 1

    def _make(self) -> None:
        stream = self._runtime.stream(urgent=True)
        # The space is filled by a kernel, too. On another line's stream it would wait for that one's bursts, and spoil
        # sums that are being made by then.
        self._runtime.launch_on(stream)
        self._lines.append(KernelLine(stream, self._runtime.kernel_space()))
        self._bursts.append(0)

    def synchronize(self) -> None:
        """Block until all work of the lane has ended. Raises what the GPU reports."""
        with self._lock:
            streams = [self.copies, *(line.stream for line in self._lines)]
        for stream in streams:
            stream.synchronize()
