"""One open bidirectional gRPC stream whose messages carry request ids: many requests in flight, answers in any order.

grpc.aio cancels the whole call when a task that awaits its `write` or `read` is cancelled. So one task writes and one
reads, and callers only wait for their own answer: a caller may be cancelled without hurting the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import grpc

from kvpool.core.errors import DeadlineExceeded, KvPoolError, Overloaded, ServiceUnavailable
from kvpool.wire.status import error_from_reason
from kvpool.wire.stream_status import StreamStatus
from kvpool.wire.tls import TlsCredentials

if TYPE_CHECKING:
    from grpc.aio import StreamStreamCall

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
ResponseContraT = TypeVar("ResponseContraT", contravariant=True)

_log = logging.getLogger(__name__)


class Reply(Protocol[ResponseContraT]):
    """Where the answers of one request go. Called on the event loop; must neither block nor raise."""

    def deliver(self, response: ResponseContraT) -> bool:
        """Take one answer; True if it was the last one of the request."""
        ...

    def fail(self, error: KvPoolError) -> None:
        """The stream broke: no more answers will come. Called at most once."""
        ...


class SingleReply(Generic[ResponseT]):
    """The one answer of a request. An answer that its caller no longer waits for is handed to `undo`."""

    __slots__ = ("_undo", "future")

    def __init__(self, undo: Callable[[ResponseT], None] | None = None) -> None:
        self.future: asyncio.Future[ResponseT] = asyncio.get_running_loop().create_future()
        self._undo = undo

    def deliver(self, response: ResponseT) -> bool:
        if not self.future.done():
            self.future.set_result(response)
        elif self._undo is not None:
            self._undo(response)
        return True

    def fail(self, error: KvPoolError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def abandon(self) -> None:
        """The caller has left. An answer that came in the same instant is undone here, a later one in `deliver`."""
        if not self.future.done():
            self.future.cancel()
        elif not self.future.cancelled() and self.future.exception() is None and self._undo is not None:
            self._undo(self.future.result())


class RequestStream(Generic[RequestT, ResponseT]):
    """Runs one stream-stream call from its first message until it breaks or is finished; never reconnects itself.

    A request keeps its place among those in flight until its last answer has come, also when its caller has left: the
    server still works on it.
    """

    def __init__(
        self,
        call: StreamStreamCall[RequestT, ResponseT],
        request_id_of: Callable[[ResponseT], int],
        *,
        name: str,
        in_flight_max: int,
        tls: TlsCredentials | None,
        on_broken: Callable[[KvPoolError], None] | None = None,
        on_unasked: Callable[[ResponseT], None] = lambda response: None,
    ) -> None:
        """tls: of the call's channel. on_unasked: takes messages that answer no pending request; must neither block nor
        raise."""
        self._call = call
        self._on_unasked = on_unasked
        self._status = StreamStatus(call, tls)
        self._request_id_of = request_id_of
        self._name = name
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._outgoing: deque[RequestT] = deque()
        # Besides requests there are messages without an answer (kept, cancel, heartbeats): at most a few a request.
        self._outgoing_max = 8 * in_flight_max + 64
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # nothing is waiting to be written
        self._idle.set()
        self._places = asyncio.Semaphore(in_flight_max)
        self._pending: dict[int, tuple[Reply[ResponseT], bool]] = {}  # by request id; whether it holds a place
        self._last_id = 0
        self.ended_well = False  # the server ended the stream with status OK
        self.failure: KvPoolError | None = None
        self.broken = asyncio.Event()
        self.last_received_s = self._loop.time()
        self._tasks = [
            asyncio.create_task(self._write_all(), name=f"{name} writer"),
            asyncio.create_task(self._read_all(), name=f"{name} reader"),
        ]

    @property
    def in_flight(self) -> int:
        """Requests whose last answer has not come."""
        return len(self._pending)

    def next_id(self) -> int:
        """A request id, > 0, unique on this stream."""
        self._last_id += 1
        return self._last_id

    def send(self, *messages: RequestT) -> None:
        """Queue messages that have no answer, all or none. Raises what broke the stream, or Overloaded."""
        if self.failure is not None:
            raise error_from_reason(self.failure.reason, self.failure.message)  # a traceback of its own
        if len(self._outgoing) + len(messages) > self._outgoing_max:
            raise Overloaded(f"{self._name}: {self._outgoing_max} messages wait to be sent")
        self._outgoing.extend(messages)
        self._idle.clear()
        self._wake.set()

    async def submit(
        self,
        request_id: int,
        message: RequestT,
        reply: Reply[ResponseT],
        before: Callable[[], Sequence[RequestT]] = tuple,
    ) -> None:
        """Queue a request once there is room in flight; its answers go to `reply`. Raises as `send` and `before` do.

        before: asked then for messages without an answer that must be sent right before it.
        """
        await self._places.acquire()
        try:
            self.send(*before(), message)
        except KvPoolError:
            self._places.release()
            raise
        self._pending[request_id] = (reply, True)

    def post(self, request_id: int, message: RequestT) -> asyncio.Future[ResponseT]:
        """Queue a request at once, whatever is in flight, and return its answer to come. Raises as `send` does.

        For requests that give something back: they must not wait for those that ask for more, and their number is
        bounded by what was granted.
        """
        self.send(message)
        reply = SingleReply[ResponseT]()
        self._pending[request_id] = (reply, False)
        return reply.future

    async def request(
        self,
        request_id: int,
        message: RequestT,
        *,
        timeout_s: float,
        undo: Callable[[ResponseT], None] | None = None,
    ) -> ResponseT:
        """Send a request that has one answer, and wait for it.

        undo: takes an answer that comes after the caller was cancelled or timed out: nothing that it grants is lost.
        raises: DeadlineExceeded after timeout_s; what broke the stream; asyncio.CancelledError.
        """
        reply = SingleReply(undo)
        try:
            async with asyncio.timeout(timeout_s):
                await self.submit(request_id, message, reply)
                return await reply.future
        except TimeoutError:
            reply.abandon()
            raise DeadlineExceeded(f"{self._name} did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            reply.abandon()
            raise

    async def finish(self, last: RequestT, timeout_s: float) -> bool:
        """Send a last message and wait until the server ends the stream. False if it did not end it well in time."""
        if self.failure is None:
            with contextlib.suppress(KvPoolError):
                self.send(last)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                await self.broken.wait()
        await self.abort(ServiceUnavailable(f"{self._name} was closed"))
        return self.ended_well

    async def abort(self, error: KvPoolError) -> None:
        """End the stream at once: requests in flight fail with `error`. Idempotent."""
        self._break(error)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write_all(self) -> None:
        try:
            while True:
                while self._outgoing:
                    await self._call.write(self._outgoing.popleft())
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the call has ended: the reader learns why
        except Exception as error:
            _log.exception("%s: a message could not be written", self._name)
            self._break(ServiceUnavailable(f"{self._name}: a message could not be written ({error})"))

    async def _read_all(self) -> None:
        error: KvPoolError = ServiceUnavailable(f"{self._name} was cancelled")
        try:
            async for response in self._call:
                self.last_received_s = self._loop.time()
                self._dispatch(response)
            self.ended_well = True
            error = ServiceUnavailable(f"{self._name}: the server ended the stream")
        except grpc.RpcError as rpc_error:
            self.ended_well = self._status.ended_well
            error = self._status.error(rpc_error)
        except Exception as other:
            _log.exception("%s: an answer could not be read", self._name)
            error = ServiceUnavailable(f"{self._name}: an answer could not be read ({other})")
        finally:
            self._break(error)

    def _dispatch(self, response: ResponseT) -> None:
        request_id = self._request_id_of(response)
        known = self._pending.get(request_id)
        if known is None:
            self._on_unasked(response)
        elif known[0].deliver(response) and self._pending.pop(request_id, None) is not None:
            self._give_place(known[1])

    def _give_place(self, held: bool) -> None:
        if held:
            self._places.release()

    def fail(self, error: KvPoolError) -> None:
        """End the stream without waiting for its tasks; `abort` must still be called."""
        self._break(error)

    def _break(self, error: KvPoolError) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self._call.cancel()
        self._outgoing.clear()
        self._idle.set()
        pending, self._pending = self._pending, {}
        for reply, holds_place in pending.values():
            self._give_place(holds_place)
            reply.fail(error)
        self.broken.set()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._on_broken is not None:
            self._on_broken(error)
