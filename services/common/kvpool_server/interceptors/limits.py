"""How many calls a grpc.aio server has open at once, of one peer and of all, and how long a request may take to come.

gRPC calls the handler of a unary call only when the request has come: a peer that opens calls and sends nothing would
have them open always, with neither handler nor deadline. So the handlers of unary requests are served as those of a
stream of one request, which begin at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from kvpool.core.addresses import peer_host
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, Overloaded
from kvpool_server.interceptors.wrapping import AioWrapper, Handler, as_coroutine, behavior_of


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
        """Hold a place for a call. Raises Overloaded when there is none."""
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
