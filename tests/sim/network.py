"""gRPC between simulated processes: the real stubs on one side, the real servicers on the other, no sockets between.

A connection keeps its order and delivers everything until it breaks, as TCP does. Messages are delayed; a partition
holds them back until it ends, so that very old ones arrive, or breaks the connection. A unary call may lose its request
or its answer, or be carried out twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import grpc.aio

from tests.sim.calls import Call
from tests.sim.loop import Process, SimLoop, current_process


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
    last_arrival_s: float = 0.0  # when all that is on its way will have arrived

    def listen(self, endpoint: str, process: Process, add: Callable[[Any], None]) -> None:
        """Serve an endpoint; `add` registers servicers at what looks like a server."""
        server = _Server()
        add(server)
        self.listeners[endpoint] = process
        self.handlers[endpoint] = server.methods

    def delay_s(self) -> float:
        if self.rng.random() < self.faults.slow:
            delay_s = self.rng.random() * self.faults.slow_s
            self.last_arrival_s = max(self.last_arrival_s, self.loop.now_s + delay_s)
            return delay_s
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
            self.last_arrival_s = max(self.last_arrival_s, at_s)
        self.loop.call_at(at_s, deliver, context=target.context.copy())
        return at_s

    def open_channel(self, endpoint: str, config: Any = None) -> Any:
        """Takes the place of open_channel in kvpool.client."""
        return SimChannel(self, endpoint, current_process())


class _Server:
    """What servicers are added to."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Nothing: the same methods are registered by `add_registered_method_handlers`, too."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.methods.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


class SimChannel:
    """A grpc.aio.Channel of one process."""

    def __init__(self, network: Network, endpoint: str, process: Process) -> None:
        self._network = network
        self._endpoint = endpoint
        self._process = process
        self._calls: dict[Call, None] = {}  # in order: a set's differs from process to process
        self.closed = False

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            return self._unary(path, request_serializer(request), response_deserializer, timeout)

        return start

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(metadata: Any = None, timeout: float | None = None) -> Call:
            return self._stream(path, request_serializer, response_deserializer)

        return start

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(request: Any, timeout: float | None = None, metadata: Any = None) -> Call:
            return self._stream(path, request_serializer, response_deserializer, request_serializer(request))

        return start

    stream_unary = unary_unary

    async def close(self, grace: float | None = None) -> None:
        self.closed = True
        for call in list(self._calls):
            call.fail(grpc.StatusCode.CANCELLED, "the channel was closed")

    def _stream(self, path: str, serialize: Any, deserialize: Any, request: bytes | None = None) -> Call:
        if self.closed:
            raise grpc.aio.UsageError("Channel is closed.")
        call = Call(self._network, self._process, self._endpoint, path, (serialize, deserialize), request)
        self._calls[call] = None
        call.add_done_callback(lambda ended: self._calls.pop(ended, None))
        return call

    async def _unary(self, path: str, request: bytes, deserialize: Any, timeout_s: float | None) -> Any:
        network, faults = self._network, self._network.faults
        if self.closed:
            raise grpc.aio.UsageError("Channel is closed.")
        if network.chance(faults.twice):
            network.loop.spawn(self._process, self._ignored(path, request))
        lose_answer = network.chance(faults.lost_answer)
        lose_request = network.chance(faults.lost_request)
        call = self._stream(path, _as_it_is, deserialize, None if lose_request else request)
        try:
            async with asyncio.timeout(timeout_s):
                if lose_request:
                    await asyncio.sleep(network.delay_s())
                    call.fail(grpc.StatusCode.UNAVAILABLE, "the request was lost")
                answer = await call.read()
                if lose_answer:
                    raise grpc.aio.AioRpcError(
                        grpc.StatusCode.UNAVAILABLE,
                        grpc.aio.Metadata(),
                        grpc.aio.Metadata(),
                        details="the answer was lost",
                    )
                if answer is grpc.aio.EOF:
                    raise call.error()
                return answer
        except TimeoutError:
            call.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            error = call.error()  # it may have ended well at the same instant
            raise error if error.code() is not grpc.StatusCode.OK else _late() from None
        finally:
            call.cancel()

    async def _ignored(self, path: str, request: bytes) -> None:
        call = self._stream(path, _as_it_is, _as_it_is, request)
        try:
            async with asyncio.timeout(5.0):
                await call.read()
        except (TimeoutError, grpc.RpcError):
            pass
        finally:
            call.cancel()


def _late() -> grpc.aio.AioRpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, none, none, details="Deadline Exceeded")


def _as_it_is(data: bytes) -> bytes:
    return data
