"""A small service in two shapes, grpc.aio and threads, behind all interceptors, with a client that calls every kind."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from kvpool.core import errors
from kvpool_server.interceptors import (
    CallLimits,
    DeadlinePolicy,
    Identity,
    RequestMetrics,
    aio_interceptors,
    current_identity,
    sync_interceptors,
)
from kvpool_server.interceptors.wrapping import Metadata
from kvpool_server.listen import TcpAddress
from kvpool_server.server import BulkServer, ControlServer
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.standstill import stood_still

SERVICE = "test.Echo"
LOOPBACK = TcpAddress("127.0.0.1", 0)
KNOWN: dict[bytes, Callable[[], Exception]] = {
    b"invalid": lambda: errors.InvalidRequest("hash of 15 bytes", item_index=2),
    b"corrupt": lambda: errors.PageCorrupt("page 7"),
    b"group": lambda: ExceptionGroup("two", [errors.ArenaFull("a"), errors.ArenaFull("b")]),
    b"bug": lambda: KeyError("tenant secret"),
    b"stub": lambda: NotImplementedError("Method not implemented!"),
}


def answer(request: bytes) -> bytes:
    """What every method of the test service does with one request."""
    if request in KNOWN:
        raise KNOWN[request]()
    return current_identity().tenant.encode() + b":" + request


class TokenAuthenticator:
    """The token is the tenant."""

    def authenticate(self, metadata: Metadata) -> Identity | None:
        token = metadata.get("authorization")
        return Identity(str(token)) if token else None


class AioEcho:
    """Async handlers; `finished` records how streams ended."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self.started = asyncio.Event()
        self.stream_tasks: list[asyncio.Task[Any] | None] = []  # which began, and which cleaned up, a download

    async def unary(self, request: bytes, context: Any) -> bytes:
        if request == b"abort":
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "chosen by the handler")
        if request == b"wait":
            self.started.set()
            await asyncio.Event().wait()
        return answer(request)

    async def download(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.stream_tasks.append(asyncio.current_task())
        try:
            self.started.set()
            if request == b"late":
                stood_still(3600.0)
            yield answer(b"first")
            if request == b"wait":
                await asyncio.Event().wait()
            while request == b"flood":
                yield bytes(1 << 20)
            yield answer(request)
        finally:
            self.stream_tasks.append(asyncio.current_task())
            self.finished.set()

    async def upload(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"+".join([answer(request) async for request in requests])

    async def talk(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await context.write(answer(request))

    def forgotten(self, request: bytes, context: Any) -> bytes:
        raise NotImplementedError("Method not implemented!")


class SyncEcho:
    """The same for threads."""

    def __init__(self) -> None:
        self.finished = threading.Event()

    def unary(self, request: bytes, context: Any) -> bytes:
        if request == b"abort":
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "chosen by the handler")
        return answer(request)

    def download(self, request: bytes, context: Any) -> Iterator[bytes]:
        try:
            yield answer(b"first")
            while request == b"flood":
                yield bytes(1 << 20)
            yield answer(request)
        finally:
            self.finished.set()

    def upload(self, requests: Iterator[bytes], context: Any) -> bytes:
        return b"+".join(answer(request) for request in requests)

    def talk(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for request in requests:
            yield answer(request)

    def forgotten(self, request: bytes, context: Any) -> bytes:
        raise NotImplementedError("Method not implemented!")


def read(data: bytes) -> bytes:
    """As messages are read, of which some are none."""
    if data == b"unreadable":
        raise DecodeError("Error parsing message")
    return data


def handlers(echo: Any) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Unary": grpc.unary_unary_rpc_method_handler(echo.unary, read),
            "Download": grpc.unary_stream_rpc_method_handler(echo.download, read),
            "Upload": grpc.stream_unary_rpc_method_handler(echo.upload, read),
            "Talk": grpc.stream_stream_rpc_method_handler(echo.talk, read),
            "Forgotten": grpc.unary_unary_rpc_method_handler(echo.forgotten),
        },
    )


class Client:
    """Calls every kind of method with one request, and gives the last answer."""

    def __init__(self, target: str, channel: Any, tenant: str | None = "acme") -> None:
        self.target = target
        self.channel = channel
        self.metadata = (("authorization", tenant),) if tenant else ()

    def as_tenant(self, tenant: str | None) -> "Client":
        return Client(self.target, self.channel, tenant)

    def call(self, method: str, request: bytes, timeout_s: float | None = PATIENCE_S) -> Any:
        path = f"/{SERVICE}/{method}"
        options: dict[str, Any] = {"timeout": timeout_s, "metadata": self.metadata}
        if method == "Download":
            return self.channel.unary_stream(path)(request, **options)
        if method == "Upload":
            return self.channel.stream_unary(path)(iter([b"first", request]), **options)
        if method == "Talk":
            return self.channel.stream_stream(path)(iter([b"first", request]), **options)
        return self.channel.unary_unary(path)(request, **options)

    async def last(self, method: str, request: bytes, timeout_s: float | None = PATIENCE_S) -> bytes:
        call = self.call(method, request, timeout_s)
        if method in ("Download", "Talk"):
            responses = [response async for response in call]
            return bytes(responses[-1])
        return bytes(await call)

    async def failure(self, method: str, request: bytes, timeout_s: float | None = PATIENCE_S) -> Any:
        """The grpc.RpcError of a call made by the thread client, which unlike grpc.aio never loses a status."""

        def call() -> None:
            path = f"/{SERVICE}/{method}"
            options: dict[str, Any] = {"timeout": timeout_s, "metadata": self.metadata}
            channel: Any  # the stubs cannot tell the messages of a method without a serializer
            with grpc.insecure_channel(self.target) as channel:
                if method == "Download":
                    list(channel.unary_stream(path)(request, **options))
                elif method == "Upload":
                    channel.stream_unary(path)(iter([b"first", request]), **options)
                elif method == "Talk":
                    list(channel.stream_stream(path)(iter([b"first", request]), **options))
                else:
                    channel.unary_unary(path)(request, **options)

        with pytest.raises(grpc.RpcError) as raised:
            await asyncio.to_thread(call)
        return raised.value


class World:
    """A server of one kind with a client."""

    def __init__(self, echo: Any, server: Any, registry: CollectorRegistry, client: Client) -> None:
        self.echo = echo
        self.server = server
        self.registry = registry
        self.client = client

    def count(self, method: str, code: str) -> float:
        labels = {"method": method if method == "unknown" else f"/{SERVICE}/{method}", "grpc_code": code}
        return self.registry.get_sample_value("kvpool_test_grpc_requests_total", labels) or 0.0

    def in_flight(self, method: str) -> float | None:
        return self.registry.get_sample_value("kvpool_test_grpc_requests_in_flight", {"method": f"/{SERVICE}/{method}"})


@asynccontextmanager
async def aio_world(deadlines: DeadlinePolicy, limits: CallLimits | None = None) -> AsyncIterator[World]:
    registry = CollectorRegistry()
    echo = AioEcho()
    server = ControlServer(
        interceptors=aio_interceptors(
            metrics=RequestMetrics("test", registry),
            authenticator=TokenAuthenticator(),
            deadlines=deadlines,
            limits=limits,
        ),
        service_names=[SERVICE],
    )
    server.grpc.add_generic_rpc_handlers((handlers(echo),))
    port = server.listen_tcp(LOOPBACK)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield World(echo, server, registry, Client(f"127.0.0.1:{port}", channel))
    finally:
        await server.stop(0)


@asynccontextmanager
async def sync_world(deadlines: DeadlinePolicy, threads: int = 32) -> AsyncIterator[World]:
    registry = CollectorRegistry()
    echo = SyncEcho()
    server = BulkServer(
        threads=threads,
        interceptors=sync_interceptors(
            metrics=RequestMetrics("test", registry), authenticator=TokenAuthenticator(), deadlines=deadlines
        ),
    )
    server.grpc.add_generic_rpc_handlers((handlers(echo),))
    port = server.listen_tcp(LOOPBACK)
    server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield World(echo, server, registry, Client(f"127.0.0.1:{port}", channel))
    finally:
        await asyncio.to_thread(server.stop, 0)
