"""Several endpoints of one service, and unary calls with a deadline that move on to the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import grpc

from kvpool.client.channel import closed_channel_error, open_channel
from kvpool.client.config import ClientConfig
from kvpool.client.retry import TRANSIENT, Backoff
from kvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvPoolError,
    ServiceUnavailable,
    StoreUnavailable,
    TlsFailed,
    WireVersionRefused,
)
from kvpool.wire.status import error_from_rpc
from kvpool.wire.tls_errors import is_unix, narrowed

if TYPE_CHECKING:
    from grpc.aio import UnaryUnaryMultiCallable

StubT = TypeVar("StubT")
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
ResultT = TypeVar("ResultT")
_REDIAL_S = 5.0


class _Opened(NamedTuple, Generic[StubT]):
    """A channel in use. before: the one of the last certificates, on which long streams may go on."""

    channel: grpc.aio.Channel
    stub: StubT
    generation: int  # of certificates and of connections that were left
    before: grpc.aio.Channel | None


class Endpoints(Generic[StubT]):
    """Stubs for several endpoints of one service, one of them in use; a failure moves on to the next."""

    def __init__(
        self, endpoints: tuple[str, ...], config: ClientConfig, make_stub: Callable[[grpc.aio.Channel], StubT]
    ) -> None:
        """Raises InvalidRequest when there is no endpoint."""
        if not endpoints:
            raise InvalidRequest("no endpoint is configured; give at least one host:port or unix:/path")
        self._endpoints = endpoints
        self._config = config
        self._make_stub = make_stub
        self._opened: dict[str, _Opened[StubT]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._position = 0
        self._redials, self._redialled_s = 0, float("-inf")
        self._closed = False

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self._endpoints[self._position]

    @property
    def count(self) -> int:
        """Configured endpoints."""
        return len(self._endpoints)

    @property
    def config(self) -> ClientConfig:
        """Settings of every call."""
        return self._config

    def stub(self) -> StubT:
        """The stub of the endpoint in use. Raises ServiceUnavailable after close."""
        if self._closed:
            raise ServiceUnavailable("this client is closed; open a new one")
        endpoint, tls = self.endpoint, self._config.tls
        known = self._opened.get(endpoint)
        generation = self._redials + (tls.generation if tls is not None and not is_unix(endpoint) else 0)
        if known is None or known.generation != generation:
            if known is not None and known.before is not None:  # two generations old: its streams are reopened
                closing = asyncio.ensure_future(known.before.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            channel = open_channel(endpoint, self._config)
            before = known.channel if known is not None else None
            known = self._opened[endpoint] = _Opened(channel, self._make_stub(channel), generation, before)
        return known.stub

    def fail(self, endpoint: str) -> None:
        """Say that `endpoint` did not serve; unless another caller said so before, the next one comes into use."""
        if endpoint == self.endpoint:
            self._position = (self._position + 1) % len(self._endpoints)

    def leave(self, endpoint: str) -> bool:
        """Say that the replica at `endpoint` has lost its store: another may have its own. False if nothing changes.

        Without another endpoint a new connection comes into use, one in five seconds at most: a name can stand for
        several replicas, as that of a Kubernetes Service does. Streams on the old one end by themselves.
        """
        if endpoint != self.endpoint or len(self._endpoints) > 1:
            self.fail(endpoint)
            return True
        now_s = asyncio.get_running_loop().time()
        if is_unix(endpoint) or now_s - self._redialled_s < _REDIAL_S:
            return False
        self._redials, self._redialled_s = self._redials + 1, now_s
        return True

    async def close(self) -> None:
        """Close all channels; calls in flight end with ServiceUnavailable. Idempotent."""
        self._closed = True
        opened, self._opened = self._opened, {}
        for each in opened.values():
            await each.channel.close()
            if each.before is not None:
                await each.before.close()
        await asyncio.gather(*self._closing)

    async def call(
        self,
        method: Callable[[StubT], UnaryUnaryMultiCallable[RequestT, ResponseT]],
        request: RequestT,
        *,
        timeout_s: float | None = None,
        idempotent: bool = True,
    ) -> ResponseT:
        """One unary call; an idempotent one is repeated, on the next endpoint, while its deadline allows.

        raises: the KvPoolError that the server names; ServiceUnavailable, DeadlineExceeded.
        """
        limit_s = self._config.call_timeout_s if timeout_s is None else timeout_s
        retry_on: tuple[type[KvPoolError], ...] = TRANSIENT
        if len(self._endpoints) > 1:
            # Of one attempt: another endpoint may answer, or be of a release that fits.
            retry_on = (*TRANSIENT, DeadlineExceeded, WireVersionRefused)

        refused = set[str]()  # certificates do not come to fit within the time of a call

        async def attempt(remaining_s: float) -> ResponseT:
            endpoint = self.endpoint
            # An endpoint that hangs must leave time for the others.
            share = len(self._endpoints) if idempotent else 1
            try:
                return await self._call_once(method, request, max(remaining_s / share, 1e-3))
            except StoreUnavailable:
                self.leave(endpoint)  # for the next call, as no caller waits for a store
                raise
            except retry_on as error:
                if isinstance(error, TlsFailed):
                    refused.add(endpoint)
                self.fail(endpoint)
                raise

        if not idempotent:
            return await attempt(limit_s)
        backoff = Backoff(self._config.backoff_initial_s, self._config.backoff_max_s)

        def give_up() -> bool:
            return self._closed or len(refused) == len(set(self._endpoints))

        return await call_with_retry(attempt, timeout_s=limit_s, backoff=backoff, retry_on=retry_on, give_up=give_up)

    async def _call_once(
        self,
        method: Callable[[StubT], UnaryUnaryMultiCallable[RequestT, ResponseT]],
        request: RequestT,
        timeout_s: float,
    ) -> ResponseT:
        try:
            metadata = (*self._config.metadata, *self._config.tracer.metadata())
            return await method(self.stub())(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise narrowed(error_from_rpc(error), self._config.tls) from error
        except grpc.aio.UsageError as error:
            raise closed_channel_error(error) from error
        except asyncio.CancelledError as error:
            # gRPC cancels the calls of a channel that is closed, which is not a cancellation of the caller.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ServiceUnavailable("the channel was closed under the call; open a new client") from error


async def call_with_retry(
    attempt: Callable[[float], Awaitable[ResultT]],
    *,
    timeout_s: float,
    backoff: Backoff,
    retry_on: tuple[type[KvPoolError], ...] = TRANSIENT,
    give_up: Callable[[], bool] = lambda: False,
) -> ResultT:
    """Await `attempt(remaining seconds)` until it succeeds, fails for good, or another pause would pass the deadline.

    give_up: asked after a failure whether there is no use in another attempt. Only for calls that may be carried out
    twice. Raises the last attempt's error.
    """
    ends_at_s = time.monotonic() + timeout_s
    while True:
        remaining_s = ends_at_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s")
        try:
            return await attempt(remaining_s)
        except retry_on:
            pause_s = backoff.next_s()
            if give_up() or time.monotonic() + pause_s >= ends_at_s:
                raise
        await asyncio.sleep(pause_s)
