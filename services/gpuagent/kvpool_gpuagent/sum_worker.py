"""A process that sums page bytes for the agent: `python -m kvpool_gpuagent.sum_worker FD PARENT_PID BLOCK_BYTES`.

It maps the agent's arena segments for reading only and answers with sums; whoever outlives whom, it writes nowhere. It
ends with its control socket FD, or with its parent. See core.sum_frames for what is said.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import struct
import sys
from collections import deque
from contextlib import suppress

from xxhash import xxh3_64_intdigest

from kvpool_gpuagent.core.sum_frames import COMMAND, DONE, MOST_PIECES, PIECE, REFUSED, Command
from kvpool_server.process import die_with_parent

_MADV_POPULATE_READ = 22  # since Linux 5.14; the mmap module of Python 3.11 does not name it
_POPULATE_STEP_BYTES = 4 << 20  # 0.3 ms


class SumWorker:
    """Serves one agent, one request at a time; between requests it fills in page tables."""

    def __init__(self, control: socket.socket, block_bytes: int) -> None:
        self._control, self._block_bytes = control, block_bytes
        self._segments: dict[int, mmap.mmap] = {}
        self._channels: dict[int, socket.socket] = {}
        self._unpopulated: deque[tuple[int, int]] = deque()  # segment, offset
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Until the agent closes the control socket."""
        self._control.send(DONE)
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll(0 if self._unpopulated else None)}
            if not ready:
                self._populate()
            elif self._control.fileno() not in ready:
                for descriptor in ready:
                    self._answer(self._channels[descriptor])
            elif not self._obey():
                return

    def _obey(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        if not message:
            return False
        command, segment, size_bytes = COMMAND.unpack(message)
        if command == Command.ANSWER_ON:
            channel = socket.socket(fileno=descriptors[0])
            self._channels[channel.fileno()] = channel
            self._poll.register(channel, select.POLLIN)
        elif command == Command.MAP:
            self._control.send(DONE if self._map(segment, descriptors[0], size_bytes) else REFUSED)
        else:
            mapping = self._segments.pop(segment, None)
            if mapping is not None:
                mapping.close()
            self._control.send(DONE)
        return True

    def _map(self, segment: int, descriptor: int, size_bytes: int) -> bool:
        try:
            self._segments[segment] = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError):  # no memory, or a file shorter than it is said to be
            return False
        finally:
            os.close(descriptor)
        self._unpopulated.append((segment, 0))
        return True

    def _populate(self) -> None:
        """Fill in page tables, which first touches would do in small steps."""
        segment, offset = self._unpopulated.popleft()
        mapping = self._segments.get(segment)
        if mapping is None or offset >= len(mapping):
            return
        with suppress(OSError):  # an older kernel: they come page by page
            mapping.madvise(_MADV_POPULATE_READ, offset, min(_POPULATE_STEP_BYTES, len(mapping) - offset))
            self._unpopulated.append((segment, offset + _POPULATE_STEP_BYTES))

    def _answer(self, channel: socket.socket) -> None:
        try:
            request = channel.recv(MOST_PIECES * PIECE.size)
            if request:
                channel.send(self._sums(request))
                return
        except OSError:  # the agent has closed it before it read what it asked for
            pass
        self._poll.unregister(channel)
        del self._channels[channel.fileno()]
        channel.close()

    def _sums(self, request: bytes) -> bytes:
        digest, step = xxh3_64_intdigest, self._block_bytes
        sums: list[int] = []
        for segment, offset, size_bytes in PIECE.iter_unpack(request):
            mapping = self._segments.get(segment)
            end = offset + size_bytes
            if mapping is None or end > len(mapping):
                return REFUSED
            with memoryview(mapping) as view:
                for at in range(offset, end, step):
                    with view[at : min(at + step, end)] as block:
                        sums.append(digest(block))
        return struct.pack(f"<{len(sums)}Q", *sums)


def main(arguments: list[str]) -> None:
    """See above."""
    descriptor, parent_pid, block_bytes = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the agent, which then closes the socket
    die_with_parent(parent_pid, signal.SIGKILL)
    with socket.socket(fileno=descriptor) as control, suppress(ConnectionError):
        SumWorker(control, block_bytes).run()


if __name__ == "__main__":
    main(sys.argv[1:])
