"""A bare gRPC stream in a process of its own: the baseline of page streams.

Frames of the same size, fresh bytes out of an arena on one side, copied into a buffer on the other, no messages and no
checks. `python -m bench.rig.bare PAGE_BYTES PAGE_COUNT FRAME_BYTES` prints its endpoint and ends with its stdin.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from bench.rig.machine import Bytes, rate, shared_bytes, tune_process

if TYPE_CHECKING:
    import grpc

_READ, _WRITE = "/bench.Bare/Read", "/bench.Bare/Write"
_OPTIONS = [
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.max_send_message_length", 8 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
_TIMEOUT_S = 60.0


class Buffer:
    """Pages in memory that streams are cut out of and copied into."""

    def __init__(self, page_bytes: int, page_count: int, frame_bytes: int) -> None:
        self.size_bytes = page_bytes * page_count
        self._memory: Bytes = shared_bytes(self.size_bytes)
        self._page_bytes, self._frame_bytes = page_bytes, frame_bytes

    def frames(self) -> Iterator[bytes]:
        """Every page in frames, each a fresh copy."""
        view = self._memory.data
        for start in range(0, self.size_bytes, self._page_bytes):
            page = view[start : start + self._page_bytes]
            for offset in range(0, len(page), self._frame_bytes):
                yield bytes(page[offset : offset + self._frame_bytes])

    def take(self, frames: Iterator[bytes]) -> None:
        """Copy frames to where they came from. Raises ValueError unless they are exactly all."""
        view, position = self._memory.data, 0
        for frame in frames:
            view[position : position + len(frame)] = frame
            position += len(frame)
        if position != self.size_bytes:
            raise ValueError(f"{position} of {self.size_bytes} bytes came")


class BareStream:
    """The client of the bare server, which it starts."""

    def __init__(self, page_bytes: int, page_count: int, frame_bytes: int) -> None:
        import grpc

        self._buffer = Buffer(page_bytes, page_count, frame_bytes)
        command = [sys.executable, "-m", "bench.rig.bare", *map(str, (page_bytes, page_count, frame_bytes))]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self._channel = grpc.insecure_channel(self._server.stdout.readline().strip(), options=_OPTIONS)
        grpc.channel_ready_future(self._channel).result(_TIMEOUT_S)

    def read_rate(self) -> float:
        """GB/s from the server's memory into ours."""
        method: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_READ)
        return rate(self._buffer.size_bytes, lambda: self._buffer.take(iter(method(b"", timeout=_TIMEOUT_S))))

    def write_rate(self) -> float:
        """GB/s from our memory into the server's."""
        method: grpc.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(_WRITE)
        return rate(self._buffer.size_bytes, lambda: method(self._buffer.frames(), timeout=_TIMEOUT_S))

    def close(self) -> None:
        """End the server."""
        self._channel.close()
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait(_TIMEOUT_S)


def main(argv: list[str]) -> None:
    """Serve until stdin ends."""
    import grpc

    tune_process()
    sys.setswitchinterval(0.0005)  # as the services have it
    buffer = Buffer(*map(int, argv))

    def read(request: bytes, context: Any) -> Iterator[bytes]:
        return buffer.frames()

    def write(frames: Iterator[bytes], context: Any) -> bytes:
        buffer.take(frames)
        return b""

    server = grpc.server(ThreadPoolExecutor(4), options=_OPTIONS)
    handlers: dict[str, Any] = {
        "Read": grpc.unary_stream_rpc_method_handler(read),
        "Write": grpc.stream_unary_rpc_method_handler(write),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Bare", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop(0).wait()


if __name__ == "__main__":
    main(sys.argv[1:])
