"""Scripted servers in this process, for tests of the client library."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from kvpool.client.config import ClientConfig
from kvpool.core.elements import Dtype
from kvpool.core.errors import KvPoolError
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.wire.convert import unbatch
from kvpool.wire.status import error_to_status
from tests.fixtures.patience import PATIENCE_S, patient

SPEC = KeyspaceSpec(model_id="tiny", model_revision="1", groups=(KvGroup(2, 2, 8),), dtype=Dtype.FP32, chunk_tokens=16)


def test_config(**changes: Any) -> ClientConfig:
    """Short pauses, so that tests of reconnects are quick, and deadlines that only keep a test from hanging."""
    return patient(**({"backoff_initial_s": 0.005, "backoff_max_s": 0.02} | changes))


test_config.__test__ = False  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def serve(
    add: Callable[[Any, grpc.aio.Server], None], servicer: Any, address: str = "127.0.0.1:0"
) -> AsyncGenerator[tuple[grpc.aio.Server, str]]:
    """Run a server; yields it and its endpoint. `address` with a port: come back where an earlier one was."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield server, address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def refuse(context: Any, error: KvPoolError) -> None:
    """End a call as the services do."""
    status = error_to_status(error)
    await context.abort(status.code, status.message, status.trailing_metadata)


class Script:
    """One stream of a scripted servicer as the test sees it: what came in, and what is to go out."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self.message_count = 0  # as gRPC counts them: one may have been several
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.ended = asyncio.Event()

    def send(self, message: Any) -> None:
        """Answer."""
        self._outgoing.put_nowait(message)

    def end(self, error: KvPoolError | None = None) -> None:
        """End the stream, well or with a status."""
        self._outgoing.put_nowait(error or StopAsyncIteration())

    async def next(self, kind: str = "", timeout_s: float = PATIENCE_S) -> Any:
        """The next message (of that kind; others are skipped)."""
        async with asyncio.timeout(timeout_s):
            while True:
                message = await self.received.get()
                if not kind or message.WhichOneof("kind") == kind:
                    return message

    async def run(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """What a servicer method yields."""
        reader = asyncio.create_task(self._read(requests))
        try:
            while True:
                message = await self._outgoing.get()
                if isinstance(message, KvPoolError):
                    await refuse(self.context, message)
                if isinstance(message, StopAsyncIteration):
                    return
                yield message
        finally:
            self.ended.set()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            self.message_count += 1
            for part in unbatch(request):
                self.received.put_nowait(part)


class Streams:
    """The streams a scripted servicer was asked to open, in order."""

    def __init__(self) -> None:
        self._opened: asyncio.Queue[Script] = asyncio.Queue()
        self.count = 0

    async def run(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Body of a servicer's stream-stream method."""
        script = Script(context)
        self.count += 1
        self._opened.put_nowait(script)
        async for message in script.run(requests):
            yield message

    async def next(self, timeout_s: float = PATIENCE_S) -> Script:
        """The next stream that a client opens."""
        async with asyncio.timeout(timeout_s):
            return await self._opened.get()
