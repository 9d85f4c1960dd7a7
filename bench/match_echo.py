"""The gRPC part of a match: a stream between two processes that answers each message with one of a match's size.

    with running_echo() as endpoint:
        async with echo_stream(endpoint) as exchange:
            seconds = await exchange(request_bytes)

Run: python -m bench.match_echo; it prints its port and serves until it is ended. Started by bench.match_latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from kvpool_server.process import poll_grpc_directly

_METHOD = "/kvpool.bench/Echo"
_ANSWER = bytes(103)  # what one run at one node takes


@contextlib.contextmanager
def running_echo() -> Iterator[str]:
    """A process that echoes; yields its endpoint."""
    process = subprocess.Popen([sys.executable, "-m", "bench.match_echo"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def echo_stream(endpoint: str) -> AsyncIterator[Callable[[bytes], Awaitable[float]]]:
    """A function that sends one message and returns the seconds until its answer was there."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(_METHOD)()

        async def exchange(message: bytes) -> float:
            started_s = time.perf_counter()
            await call.write(message)
            await call.read()
            return time.perf_counter() - started_s

        yield exchange
        call.cancel()


async def _serve() -> None:
    async def echo(_: AsyncIterator[bytes], context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(_ANSWER)

    server = grpc.aio.server()
    service, _, name = _METHOD.strip("/").partition("/")
    handlers: dict[str, Any] = {name: grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    poll_grpc_directly()
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
