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
        self._changed = threading.Condition()
        self._lines: list[KernelLine] = []
        self._free: list[KernelLine] = []
        self._has_room = True

    def ensure(self) -> KernelLine:
        """Have a line, for good: all bursts may share it. Raises OutOfDeviceMemory."""
        with self._changed:
            if not self._lines:
                self._free.append(self._made())
            return self._lines[0]

    def take(self) -> KernelLine:
        """A line that no burst in flight uses; kernels launched in this thread go to it.

        On a GPU without room for one more, waits until an earlier burst is over. Raises OutOfDeviceMemory if there is
        none at all.
        """
        with self._changed:
            while not self._free:
                if self._has_room or not self._lines:
                    try:
                        self._free.append(self._made())
                        break
                    except OutOfDeviceMemory:
                        self._has_room = False
                        if not self._lines:
                            raise
                self._changed.wait()
            line = self._free.pop()
        self._runtime.launch_on(line.stream)
        return line

    def give(self, line: KernelLine) -> None:
        """Its burst is over, or whatever it enqueued may go before the next one."""
        with self._changed:
            self._free.append(line)
            self._changed.notify_all()

    def _made(self) -> KernelLine:
        line = KernelLine(self._runtime.stream(urgent=True), self._runtime.kernel_space())
        self._lines.append(line)
        return line

    def synchronize(self) -> None:
        """Block until all work of the lane has ended. Raises what the GPU reports."""
        with self._changed:
            streams = [self.copies, *(line.stream for line in self._lines)]
        for stream in streams:
            stream.synchronize()
