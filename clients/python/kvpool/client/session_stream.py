"""What sessions with a pagestore and with an agent have in common: numbered requests, refusals, heartbeats, an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import grpc

from kvpool.client.config import ClientConfig
from kvpool.client.stream import Reply, RequestStream
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable
from kvpool.v1 import common_pb2
from kvpool.wire.convert import item_error_from_proto

if TYPE_CHECKING:
    from grpc.aio import StreamStreamCall

_SILENT_INTERVALS = 4  # as the services count: a peer silent for so many heartbeat intervals is gone


class _Numbered(Protocol):
    request_id: int


class _Refusable(Protocol):
    request_id: int

    @property
    def error(self) -> common_pb2.ItemError: ...
    def HasField(self, field_name: Any, /) -> bool: ...


RequestT = TypeVar("RequestT", bound=_Numbered)
ResponseT = TypeVar("ResponseT", bound=_Refusable)


class SessionStream(Generic[RequestT, ResponseT]):
    """The stream of one session, on a channel of its own. Belongs to one event loop."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: StreamStreamCall[RequestT, ResponseT],
        config: ClientConfig,
        *,
        name: str,
        numbers_all: bool = False,
        on_broken: Callable[[KvPoolError], None] | None = None,
        on_unasked: Callable[[ResponseT], None] = lambda response: None,
    ) -> None:
        """numbers_all: heartbeats and `close` have request ids too. on_unasked: see RequestStream."""
        self._channel = channel
        self._config, self._tracer = config, config.tracer
        self._numbers_all = numbers_all
        self._name = name
        self._stream: RequestStream[RequestT, ResponseT] = RequestStream(
            call,
            lambda response: response.request_id,
            name=name,
            in_flight_max=config.requests_in_flight_max,
            tls=config.tls,
            on_broken=on_broken,
            on_unasked=on_unasked,
        )
        self._heart: asyncio.Task[None] | None = None

    @property
    def broken(self) -> asyncio.Event:
        """Set when the session has ended, for whatever reason."""
        return self._stream.broken

    @property
    def failure(self) -> KvPoolError | None:
        """What ended the session."""
        return self._stream.failure

    async def ask(
        self, message: RequestT, timeout_s: float | None = None, undo: Callable[[ResponseT], None] | None = None
    ) -> ResponseT:
        """Number a request, send it, wait for its one answer. raises: the refusal in it; as RequestStream.request does.

        undo: see RequestStream.request; not called for a refusal.
        """

        def undo_grant(response: ResponseT) -> None:
            if undo is not None and not response.HasField("error"):
                undo(response)

        message.request_id = self._stream.next_id()
        self._tracer.stamp(message)
        limit_s = self._config.call_timeout_s if timeout_s is None else timeout_s
        response = await self._stream.request(message.request_id, message, timeout_s=limit_s, undo=undo_grant)
        if response.HasField("error"):
            raise item_error_from_proto(response.error)
        return response

    async def submit(
        self, message: RequestT, reply: Reply[ResponseT], before: Callable[[], Sequence[RequestT]] = tuple
    ) -> int:
        """Number a request and send it once there is room in flight; returns its id. before: see RequestStream."""
        message.request_id = self._stream.next_id()
        self._tracer.stamp(message)
        await self._stream.submit(message.request_id, message, reply, before)
        return message.request_id

    async def give_back(self, message: RequestT, timeout_s: float | None = None) -> None:
        """Send a request that gives something back, before anything is awaited; then wait for its answer."""
        message.request_id = self._stream.next_id()
        answer = self._stream.post(message.request_id, message)
        limit_s = self._config.call_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                response = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"{self._name} did not answer within {limit_s:g} s") from None
        if response.HasField("error"):
            raise item_error_from_proto(response.error)

    def give_back_soon(self, message: RequestT) -> None:
        """The same without waiting. A broken session has given everything back by its own rules."""
        if self._stream.failure is not None:
            return
        message.request_id = self._stream.next_id()
        self._send_or_fail(message)

    def _send_or_fail(self, message: RequestT) -> None:
        try:
            self._stream.send(message)
        except KvPoolError as error:  # the queue is full: a session that loses what was given back must end
            self._stream.fail(ServiceUnavailable(f"{self._name} is stuck: {error.message}"))

    def send_soon(self, message: RequestT) -> None:
        """Send a message as it is that has no answer of its own; nothing happens on a broken session."""
        if self._stream.failure is None:
            self._send_or_fail(message)

    def start_heartbeats(self, message: RequestT, interval_ms: int) -> None:
        """Show that we live, and end the session when the peer does not."""
        interval_s = max(interval_ms, 1) / 1e3
        self._heart = asyncio.create_task(self._beat(message, interval_s), name=f"{self._name} heartbeats")

    async def _beat(self, message: RequestT, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        while self._stream.failure is None:
            asleep_s = loop.time()
            await asyncio.sleep(interval_s / 2)
            silent_s, slept_s = loop.time() - self._stream.last_received_s, loop.time() - asleep_s
            # If it was we who stood still, what the peer has said meanwhile is read before it is judged.
            if silent_s > _SILENT_INTERVALS * interval_s and slept_s < interval_s:
                self._stream.fail(ServiceUnavailable(f"{self._name}: nothing was heard for {silent_s:.1f} s"))
            else:
                self._send_numbered(message)

    def _send_numbered(self, message: RequestT) -> None:
        if self._numbers_all:
            message.request_id = self._stream.next_id()
        self.send_soon(message)

    async def finish(self, last: RequestT) -> bool:
        """Send a last message, wait for the end, close the channel; False if the peer did not confirm."""
        await self._stop_heart()
        if self._numbers_all:
            last.request_id = self._stream.next_id()
        ended_well = await self._stream.finish(last, self._config.call_timeout_s)
        await self._channel.close()
        return ended_well

    async def abort(self, cause: str) -> None:
        """End the stream and the channel at once. Idempotent."""
        await self._stop_heart()
        await self._stream.abort(ServiceUnavailable(cause))
        await self._channel.close()

    async def _stop_heart(self) -> None:
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)
