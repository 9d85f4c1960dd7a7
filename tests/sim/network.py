"""gRPC between simulated processes: the real stubs on one side, the real servicers on the other, no sockets between.

A connection keeps its order and delivers everything until it breaks, as TCP does. Messages are delayed; a partition
holds them back until it ends, so that very old ones arrive, or breaks the connection. A unary call may lose its request
or its answer, or be carried out twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import grpc.aio
from google.protobuf import text_format

from kvpool.core.errors import KvPoolError, ServiceUnavailable
from kvpool.wire.status import error_to_status
from tests.sim.loop import Process, SimLoop, Violation, current_process

_END = object()  # of a direction of a stream


@dataclass(slots=True, kw_only=True)
class Faults:
    """How often the network misbehaves. Zero everything to let a history come to rest."""

    lost_request: float = 0.0
    lost_answer: float = 0.0
    twice: float = 0.0
    broken_stream: float = 0.0  # per message
    flipped: float = 0.0  # a piece of a pulled page with a wrong bit
    slow: float = 0.0  # a message that takes up to slow_s
    slow_s: float = 2.0

    def none(self) -> None:
        self.lost_request = self.lost_answer = self.twice = self.broken_stream = self.flipped = self.slow = 0.0


@dataclass(slots=True)
class Network:
    """All connections and who listens where."""

    loop: SimLoop
    rng: Random
    faults: Faults = field(default_factory=Faults)
    listeners: dict[str, Process] = field(default_factory=dict)  # by endpoint
    handlers: dict[str, dict[str, Any]] = field(default_factory=dict)  # by endpoint: RpcMethodHandler by method
    partitions: dict[frozenset[str], float] = field(default_factory=dict)  # names of processes: until when
    unforeseen: list[str] = field(default_factory=list)

    def listen(self, endpoint: str, process: Process, add: Callable[[Any], None]) -> None:
        """Serve an endpoint; `add` registers servicers at what looks like a server."""
        server = _Server()
        add(server)
        self.listeners[endpoint] = process
        self.handlers[endpoint] = server.methods

    def delay_s(self) -> float:
        if self.rng.random() < self.faults.slow:
            return self.rng.random() * self.faults.slow_s
        return 0.0001 + self.rng.random() * 0.002

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def partition(self, one: str, other: str, duration_s: float) -> None:
        self.partitions[frozenset((one, other))] = self.loop.time() + duration_s

    def held_until(self, one: Process, other: Process) -> float:
        """When the partition between two processes ends; 0 if there is none."""
        until_s = self.partitions.get(frozenset((one.name.split("#")[0], other.name.split("#")[0])), 0.0)
        return until_s if until_s > self.loop.time() else 0.0

    def send(self, source: Process, target: Process, at_least_s: float, deliver: Callable[[], None]) -> float:
        """Have `deliver` run in the target process later; when that will be, partitions aside."""
        at_s = max(self.loop.time() + self.delay_s(), at_least_s)
        held_s = self.held_until(source, target)
        if held_s:
            at_s = max(at_s, held_s + self.delay_s())
        self.loop.call_at(at_s, deliver, context=target.context.copy())
        return at_s

    def open_channel(self, endpoint: str, config: Any = None) -> Any:
        """Takes the place of kvpool.client.channel.open_channel."""
        return SimChannel(self, endpoint, current_process())


class _Server:
    """What servicers are added to."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        for handler in handlers:
            self.methods.update(handler._method_handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.methods.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


class SimChannel:
    """A grpc.aio.Channel of one process."""

    def __init__(self, network: Network, endpoint: str, process: Process) -> None:
        self._network = network
        self._endpoint = endpoint
        self._process = process
        self._calls: set[_Call] = set()
        self.closed = False

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            return self._unary(path, request_serializer(request), response_deserializer, timeout)

        return start

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(metadata: Any = None, timeout: float | None = None) -> _Call:
            return self._stream(path, request_serializer, response_deserializer)

        return start

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(request: Any, timeout: float | None = None, metadata: Any = None) -> _Call:
            call = self._stream(path, request_serializer, response_deserializer)
            call.send(request)
            call.send_end()
            return call

        return start

    stream_unary = unary_unary

    async def close(self, grace: float | None = None) -> None:
        self.closed = True
        for call in list(self._calls):
            call.fail(grpc.StatusCode.CANCELLED, "the channel was closed")

    def _stream(self, path: str, serialize: Any, deserialize: Any) -> _Call:
        if self.closed:
            raise grpc.aio.UsageError("Channel is closed.")
        call = _Call(self._network, self._process, self._endpoint, path, serialize, deserialize)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def _unary(self, path: str, request: bytes, deserialize: Any, timeout_s: float | None) -> Any:
        network, faults = self._network, self._network.faults
        if self.closed:
            raise grpc.aio.UsageError("Channel is closed.")
        if network.chance(faults.twice):
            network.loop.spawn(self._process, self._ignored(path, request))
        lose_answer = network.chance(faults.lost_answer)
        lose_request = network.chance(faults.lost_request)
        call = self._stream(path, lambda data: data, deserialize)
        try:
            async with asyncio.timeout(timeout_s):
                if lose_request:
                    await asyncio.sleep(network.delay_s())
                    call.fail(grpc.StatusCode.UNAVAILABLE, "the request was lost")
                call.send(request)
                call.send_end()
                answer = await call.read()
                if lose_answer:
                    call.fail(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
                    raise call.error()
                if answer is grpc.aio.EOF:
                    raise call.error()
                return answer
        except TimeoutError:
            call.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            raise call.error() from None
        finally:
            call.cancel()

    async def _ignored(self, path: str, request: bytes) -> None:
        call = self._stream(path, lambda data: data, lambda data: data)
        call.send(request)
        call.send_end()
        try:
            async with asyncio.timeout(5.0):
                await call.read()
        except (TimeoutError, grpc.RpcError):
            pass
        finally:
            call.cancel()


class _Call:
    """Both ends of one call. What the client sees are the methods of a grpc.aio call."""

    def __init__(
        self, network: Network, client: Process, endpoint: str, path: str, serialize: Any, deserialize: Any
    ) -> None:
        self._network, self._client, self._path = network, client, path
        self._serialize, self._deserialize = serialize, deserialize
        self._server: Process | None = network.listeners.get(endpoint)
        self._endpoint = endpoint
        self._to_client: deque[Any] = deque()
        self._client_wakes: asyncio.Future[None] | None = None
        self._to_server: deque[Any] = deque()
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
            for process, told in ((self._server, self._server_died), (self._client, self._client_died)):
                if told in process.on_kill:
                    process.on_kill.remove(told)

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
            raise Violation(f"nobody serves {self._path} at {self._endpoint}")
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
        try:
            requests = self._requests(method)
            if method.request_streaming and method.response_streaming:
                served = method.stream_stream(requests, self)
            elif method.response_streaming:
                served = method.unary_stream(await anext(requests), self)
            else:
                self._answer(method, await method.unary_unary(await anext(requests), self))
                served = None
            if hasattr(served, "__aiter__"):
                async for message in served:
                    self._answer(method, message)
            elif served is not None:
                self._writer = method
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

    def _answer(self, method: Any, message: Any) -> None:
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

        self._last_to_client_s = network.send(self._server, self._client, self._last_to_client_s, arrived)

    def _tell_end(self, code: grpc.StatusCode, details: str, pairs: tuple[tuple[str, str], ...]) -> None:
        assert self._server is not None
        if not self._broken:
            self._network.send(
                self._server, self._client, self._last_to_client_s, lambda: self._end_client(code, details, pairs)
            )

    # What a servicer asks of its context

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def cancelled(self) -> bool:
        return self._server_over

    def peer(self) -> str:
        return "sim"


_GONE = (grpc.StatusCode.UNAVAILABLE, "nobody listens there")
_BROKEN = (grpc.StatusCode.UNAVAILABLE, "the connection broke")


def unavailable(endpoint: str) -> ServiceUnavailable:
    return ServiceUnavailable(f"{endpoint} cannot be reached")
