"""One call between simulated processes: what the client sees of it, and what its server does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf import text_format

from kvpool.core.errors import KvPoolError
from kvpool.wire.status import error_to_status
from tests.sim.loop import Process, Violation

if TYPE_CHECKING:
    from tests.sim.network import Network

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""The name of the process whose call is being served."""

_Coders = tuple[Any, Any]  # of requests, and of answers
_END = object()  # of a direction of a stream
_GONE = (grpc.StatusCode.UNAVAILABLE, "no server listens there")
_BROKEN = (grpc.StatusCode.UNAVAILABLE, "the connection broke")


class Call:
    """Both ends of one call. What the client sees are the methods of a grpc.aio call."""

    def __init__(
        self, network: Network, client: Process, endpoint: str, path: str, coders: _Coders, request: bytes | None
    ) -> None:
        self._network, self._client, self._path = network, client, path
        self._serialize, self._deserialize = coders
        self._server: Process | None = network.listeners.get(endpoint)
        self._endpoint = endpoint
        self._to_client: deque[Any] = deque()
        self._client_wakes: asyncio.Future[None] | None = None
        self._to_server: deque[Any] = deque()  # of a call with one request: it comes with the call, as gRPC sends it
        if request is not None:
            self._to_server.extend((request, _END))
        self._server_wakes: asyncio.Future[None] | None = None
        self._last_to_server_s = self._last_to_client_s = 0.0
        self._handler: asyncio.Task[None] | None = None
        self._server_over = False
        self._broken = False
        self._status: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] | None = None
        self._on_done: list[Callable[[Any], None]] = []
        self._connect()

    # The client's side

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._status is not None:
            callback(self)
        else:
            self._on_done.append(callback)

    def done(self) -> bool:
        return self._status is not None

    async def code(self) -> grpc.StatusCode:
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        assert self._status is not None
        return self._status[1]

    async def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        assert self._status is not None
        return self._status[2]

    def error(self) -> grpc.aio.AioRpcError:
        code, details, pairs = self._status or (grpc.StatusCode.INTERNAL, "no status", ())
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*pairs), details=details)

    async def write(self, message: Any) -> None:
        if self._status is not None:
            if self._status[0] is grpc.StatusCode.OK:
                raise asyncio.InvalidStateError("the RPC has ended")
            raise self.error()
        self.send(message)

    async def done_writing(self) -> None:
        self.send_end()

    async def read(self) -> Any:
        while not self._to_client:
            if self._status is not None:
                if self._status[0] is grpc.StatusCode.OK:
                    return grpc.aio.EOF
                raise self.error()
            self._client_wakes = asyncio.get_running_loop().create_future()
            try:
                await self._client_wakes
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._deserialize(self._to_client.popleft())

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self.fail(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def send(self, message: Any) -> None:
        if self._status is not None or self._server is None or self._broken:
            return
        data = self._serialize(message)
        network = self._network
        if network.chance(network.faults.broken_stream):
            self._break()
            return
        self._last_to_server_s = network.send(
            self._client, self._server, self._last_to_server_s, lambda: self._arrived_at_server(data)
        )

    def send_end(self) -> None:
        if self._status is None and self._server is not None and not self._broken:
            self._last_to_server_s = self._network.send(
                self._client, self._server, self._last_to_server_s, lambda: self._arrived_at_server(_END)
            )

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """The call is over for the client; the server learns of it later."""
        self._end_client(code, details, ())
        if self._server is not None and not self._server_over:
            self._network.send(self._client, self._server, self._last_to_server_s, self._end_server)

    # Between

    def _connect(self) -> None:
        network, loop = self._network, self._network.loop
        server = self._server
        if server is None or not server.alive:
            loop.call_later(network.delay_s(), self._end_client, *_GONE, (), context=self._client.context.copy())
            self._server = None
            return
        server.on_kill.append(self._server_died)
        self._client.on_kill.append(self._client_died)
        self._last_to_server_s = network.send(self._client, server, 0.0, self._begin_handler)

    def _break(self) -> None:
        """The connection is lost: both sides learn of it, each in its time."""
        network, server = self._network, self._server
        assert server is not None
        self._broken = True
        network.loop.call_later(network.delay_s() * 20, self._end_server, context=server.context.copy())
        context = self._client.context.copy()
        network.loop.call_later(network.delay_s() * 20, self._end_client, *_BROKEN, (), context=context)

    def _server_died(self) -> None:
        context = self._client.context.copy()
        self._network.loop.call_later(self._network.delay_s(), self._end_client, *_BROKEN, (), context=context)

    def _client_died(self) -> None:
        if self._server is not None:
            loop, context = self._network.loop, self._server.context.copy()
            loop.call_later(self._network.delay_s(), self._end_server, context=context)

    def _end_client(self, code: grpc.StatusCode, details: str, pairs: tuple[tuple[str, str], ...]) -> None:
        if self._status is not None:
            return
        self._status = code, details, pairs
        self._forget()
        for callback in self._on_done:
            callback(self)
        self._wake_client()

    def _wake_client(self) -> None:
        if self._client_wakes is not None and not self._client_wakes.done():
            self._client_wakes.set_result(None)

    def _forget(self) -> None:
        if self._server is not None and self._server_over and self._status is not None:
            for process, reported in ((self._server, self._server_died), (self._client, self._client_died)):
                if reported in process.on_kill:
                    process.on_kill.remove(reported)

    # The server's side

    def _arrived_at_server(self, data: Any) -> None:
        if not self._server_over:
            self._to_server.append(data)
            if self._server_wakes is not None and not self._server_wakes.done():
                self._server_wakes.set_result(None)

    def _begin_handler(self) -> None:
        assert self._server is not None
        if self._network.listeners.get(self._endpoint) is not self._server:
            return
        method = self._network.handlers[self._endpoint].get(self._path)
        if method is None:
            raise Violation(f"no process serves {self._path} at {self._endpoint}")
        self._handler = self._network.loop.spawn(self._server, self._serve(method), f"{self._path}")

    def _end_server(self) -> None:
        self._server_over = True
        self._forget()
        if self._handler is not None:
            self._handler.cancel()

    async def _requests(self, method: Any) -> AsyncIterator[Any]:
        while True:
            while not self._to_server:
                self._server_wakes = asyncio.get_running_loop().create_future()
                await self._server_wakes
            data = self._to_server.popleft()
            if data is _END:
                return
            message = method.request_deserializer(data)
            self._trace(message)
            yield message

    def _trace(self, message: Any) -> None:
        trace = self._network.loop.trace
        if trace is not None:
            text = text_format.MessageToString(message, as_one_line=True)
            trace(f"{self._server} from {self._client} {self._path.rpartition('/')[2]} {text[:400]}")

    async def _serve(self, method: Any) -> None:
        """Run the servicer's method and tell the client how it ended."""
        CALLER.set(self._client.name.partition("#")[0])
        try:
            requests = self._requests(method)
            context = _ServerSide(self, method)
            if method.request_streaming and method.response_streaming:
                served = method.stream_stream(requests, context)
            elif method.response_streaming:
                served = method.unary_stream(await anext(requests), context)
            else:
                self.answer(method, await method.unary_unary(await anext(requests), context), last=True)
                return
            if hasattr(served, "__aiter__"):
                async for message in served:
                    self.answer(method, message)
            elif served is not None:
                await served
            self._tell_end(grpc.StatusCode.OK, "", ())
        except asyncio.CancelledError:
            if not self._server_over:
                self._tell_end(grpc.StatusCode.CANCELLED, "the server cancelled the call", ())
            raise
        except KvPoolError as error:
            status = error_to_status(error)
            self._tell_end(status.code, status.message, status.trailing_metadata)
        except Exception as error:
            self._network.unforeseen.append(f"{self._path} at {self._server}: {error!r}")
            self._tell_end(grpc.StatusCode.INTERNAL, "internal error", ())
        finally:
            self._server_over = True
            self._forget()

    def answer(self, method: Any, message: Any, *, last: bool = False) -> None:
        """Send the client one message; the last one ends the call."""
        data = method.response_serializer(message)
        network = self._network
        if network.chance(network.faults.broken_stream):
            self._break()
            return
        if self._server_over or self._broken:
            return
        assert self._server is not None

        def arrived() -> None:
            if self._status is None:
                self._to_client.append(data)
                self._wake_client()
            if last:
                self._end_client(grpc.StatusCode.OK, "", ())

        self._last_to_client_s = network.send(self._server, self._client, self._last_to_client_s, arrived)

    def _tell_end(self, code: grpc.StatusCode, details: str, pairs: tuple[tuple[str, str], ...]) -> None:
        assert self._server is not None
        if not self._broken:
            self._network.send(
                self._server, self._client, self._last_to_client_s, lambda: self._end_client(code, details, pairs)
            )

    @property
    def server_over(self) -> bool:
        return self._server_over


class _ServerSide:
    """What a servicer asks of its context."""

    def __init__(self, call: Call, method: Any) -> None:
        self._call, self._method = call, method

    async def write(self, message: Any) -> None:
        self._call.answer(self._method, message)

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def cancelled(self) -> bool:
        return self._call.server_over

    def peer(self) -> str:
        return "sim:1"
