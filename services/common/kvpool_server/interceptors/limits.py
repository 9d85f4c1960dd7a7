"""Limits of calls: how many are open at once, and how long one may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvpool.core.addresses import peer_host
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, Overloaded
from kvpool_server.interceptors.wrapping import (
    AioInterceptor,
    AioWrapper,
    Call,
    Handler,
    SyncInterceptor,
    as_coroutine,
    behavior_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Bounds of one server. A stream is one call."""

    open_calls: int = 32_768
    peer_open_calls: int = 8_192  # of one host, over all its connections
    request_s: float = 20.0  # until the request of a unary call must have come


class OpenCalls:
    """Counts open calls. Belongs to one event loop."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._by_host: dict[str, int] = {}
        self.count = 0

    @contextmanager
    def place(self, peer: str) -> Iterator[None]:
        """Hold a place for a call. Raises Overloaded when all are taken."""
        host, limits = peer_host(peer), self._limits
        if self.count >= limits.open_calls:
            raise Overloaded(f"this server has {limits.open_calls} calls open already")
        if self._by_host.get(host, 0) >= limits.peer_open_calls:
            raise Overloaded(f"{host} has {limits.peer_open_calls} calls open already")
        self.count += 1
        self._by_host[host] = self._by_host.get(host, 0) + 1
        try:
            yield
        finally:
            self.count -= 1
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]


class AioLimits(AioWrapper):
    """Refuses calls beyond the limits, and ends unary ones whose request does not come."""

    def __init__(self, limits: CallLimits) -> None:
        super().__init__()
        self._limits = limits
        self.open_calls = OpenCalls(limits)

    def wrap(self, method: str, inner: Handler) -> Handler:
        behavior = as_coroutine(method, behavior_of(inner))
        read = self._read_request

        async def run(requests: Any, context: Any) -> Any:
            with self.open_calls.place(context.peer()):
                return await behavior(requests, context)

        async def run_unary(requests: Any, context: Any) -> Any:
            with self.open_calls.place(context.peer()):
                return await behavior(await read(method, context), context)

        build: Any = grpc.stream_stream_rpc_method_handler if inner.response_streaming else None
        build = build or grpc.stream_unary_rpc_method_handler
        return build(
            run if inner.request_streaming else run_unary, inner.request_deserializer, inner.response_serializer
        )

    async def _read_request(self, method: str, context: Any) -> Any:
        try:
            async with asyncio.timeout(self._limits.request_s):
                request = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(f"{method}: no request came within {self._limits.request_s:g} s") from None
        if request is grpc.aio.EOF:
            raise InvalidRequest(f"{method} got no request")
        return request


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePolicy:
    """How long a call may take: when its client set no deadline, and whatever deadline it set.

    Streams have no cap unless their full method name is in `caps_s`, which also overrides the cap of unary calls.
    """

    unary_cap_s: float = 30.0
    longest_s: float = 600.0  # of a unary call: a Flush or Clear of a large node takes minutes, all others seconds
    caps_s: Mapping[str, float] = field(default_factory=dict)

    def cap_s(self, call: Call) -> float | None:
        return self.caps_s.get(call.method, None if call.streaming else self.unary_cap_s)


class AioDeadline(AioInterceptor):
    """Cancels a handler at the cap; at a client's own deadline gRPC cancels it."""

    def __init__(self, policy: DeadlinePolicy) -> None:
        super().__init__()
        self._policy = policy

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        cap_s = _cap_s(self._policy, call)
        if call.streaming and cap_s is not None:
            # Before the cap: gRPC could send no status after a first write, with the metadata, that was cut short.
            await call.context.send_initial_metadata(())
        timeout = asyncio.timeout(cap_s)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise _exceeded(call, cap_s) from None


class SyncDeadline(SyncInterceptor):
    """Refuses calls that come too late. A thread cannot be cancelled: a handler that loops asks `context.is_active`."""

    def __init__(self, policy: DeadlinePolicy) -> None:
        super().__init__()
        self._policy = policy

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        _cap_s(self._policy, call)
        yield


def _cap_s(policy: DeadlinePolicy, call: Call) -> float | None:
    """Seconds after which the server itself ends the call. Raises DeadlineExceeded when the client's have passed."""
    remaining_s = call.remaining_s()
    if remaining_s is None:
        return policy.cap_s(call)
    if remaining_s <= 0:
        raise _exceeded(call, 0.0)
    return policy.longest_s if remaining_s > policy.longest_s and not call.streaming else None


def _exceeded(call: Call, cap_s: float | None) -> DeadlineExceeded:
    if not cap_s:
        return DeadlineExceeded(f"the deadline of {call.method} had passed before the call began")
    return DeadlineExceeded(f"{call.method} did not finish within {cap_s:g} s, the server's cap")
