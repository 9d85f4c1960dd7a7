"""Where a lane's work goes: one order for its copies, and a kernel stream for each burst in flight.

Kernels of one stream follow each other, and beside a busy engine each waits for its turn. Bursts on streams of their
own wait for the same turn.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool_gpuagent.adapters.gpu_runtime import GpuRuntime, Stream

if TYPE_CHECKING:
    from kvpool.kernels.cache_kernels import KernelSpace


@dataclass(frozen=True, slots=True, eq=False)
class KernelLine:
    """A kernel stream and the device memory that its kernels share."""

    stream: Stream
    space: KernelSpace


class LaneStreams:
    """Of one lane. Lines are made when first needed: an idle agent keeps little of the GPU's memory."""

    def __init__(self, runtime: GpuRuntime) -> None:
        self.copies = runtime.stream(urgent=True)
        self._runtime = runtime
        self._lock = threading.Lock()
        self._lines: list[KernelLine] = []
        self._free: list[KernelLine] = []

    def take(self) -> KernelLine:
        """A line that no burst in flight uses; kernels launched in this thread go to it."""
        with self._lock:
            line = self._free.pop() if self._free else None
        if line is None:
            line = KernelLine(self._runtime.stream(urgent=True), self._runtime.kernel_space())
            with self._lock:
                self._lines.append(line)
        self._runtime.launch_on(line.stream)
        return line

    def give(self, line: KernelLine) -> None:
        """Its burst is over, or whatever it enqueued may go before the next one."""
        with self._lock:
            self._free.append(line)

    def synchronize(self) -> None:
        """Block until all work of the lane has ended. Raises what the GPU reports."""
        with self._lock:
            streams = [self.copies, *(line.stream for line in self._lines)]
        for stream in streams:
            stream.synchronize()
