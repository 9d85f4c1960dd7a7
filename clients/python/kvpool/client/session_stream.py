"""One open stream of numbered requests: many in flight, answers in any order, heartbeats, an end.

Sessions with pagestores and agents, matches and cache loans all run on it. grpc.aio cancels the whole call when a task
that awaits its `write` or `read` is cancelled. So one task writes and one reads, and callers only wait for their own
answer: a caller may be cancelled without hurting the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import grpc

from kvpool.client.config import ClientConfig
from kvpool.core.errors import DeadlineExceeded, KvPoolError, Overloaded, ServiceUnavailable
from kvpool.core.liveness import LivenessMonitor
from kvpool.wire.convert import batch, item_error_from_proto, unbatch
from kvpool.wire.status import StreamStatus, error_from_reason

if TYPE_CHECKING:
    from grpc.aio import StreamStreamCall

# Messages are generated classes that share field names (request_id, error) and no base.
RequestT = TypeVar("RequestT", bound=Any)
ResponseT = TypeVar("ResponseT", bound=Any)
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


class SessionStream(Generic[RequestT, ResponseT]):
    """Runs one stream-stream call from its first message until it breaks or is finished; never reconnects itself.

    Belongs to one event loop. A request keeps its place among those in flight until its last answer has come, also when
    its caller has left: the server still works on it.
    """

    def __init__(
        self,
        call: StreamStreamCall[RequestT, ResponseT],
        config: ClientConfig,
        *,
        name: str,
        channel: grpc.aio.Channel | None = None,
        on_broken: Callable[[KvPoolError], None] | None = None,
        on_unasked: Callable[[ResponseT], None] = lambda response: None,
        on_write: Callable[[RequestT], None] = lambda request: None,
        request_id_of: Callable[[ResponseT], int] = attrgetter("request_id"),
    ) -> None:
        """channel: one of the stream's own, closed with it. on_unasked: takes messages that answer no pending request;
        must neither block nor raise. on_write: gets each message right before it goes out, and may add to it; for
        streams that do not batch."""
        self._call, self._config, self._name, self._channel = call, config, name, channel
        self._on_broken, self._on_unasked, self._request_id_of = on_broken, on_unasked, request_id_of
        self._on_write = on_write
        self._status = StreamStatus(call, config.tls)
        self._loop = asyncio.get_running_loop()
        self._outgoing: deque[RequestT] = deque()
        # Besides requests there are messages without an answer (kept, cancel, heartbeats): at most a few a request.
        self._outgoing_max = 8 * config.requests_in_flight_max + 64
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # nothing is waiting to be written
        self._idle.set()
        self._places = asyncio.Semaphore(config.requests_in_flight_max)
        self._pending: dict[int, tuple[Reply[ResponseT], bool]] = {}  # by request id; whether it holds a place
        self._last_id = 0
        self._batches = False
        self._liveness: LivenessMonitor | None = None  # once heartbeats are sent
        self._heart: asyncio.Task[None] | None = None
        self.ended_well = False  # the server ended the stream with status OK
        self.failure: KvPoolError | None = None  # what ended the stream
        self.broken = asyncio.Event()  # it has ended, for whatever reason
        self.last_received_s = self._loop.time()
        self._tasks = [
            asyncio.create_task(self._write_all(), name=f"{name} writer"),
            asyncio.create_task(self._read_all(), name=f"{name} reader"),
        ]

    @property
    def is_full(self) -> bool:
        """Whether as many requests are in flight as there may be."""
        return self._places.locked()

    def next_id(self) -> int:
        """A request id, > 0, unique on this stream."""
        self._last_id += 1
        return self._last_id

    async def ask(
        self, message: RequestT, timeout_s: float | None = None, undo: Callable[[ResponseT], None] | None = None
    ) -> ResponseT:
        """Number a request, send it, wait for its one answer. raises: the refusal in it; as `request` does.

        undo: see `request`; not called for a refusal.
        """

        def undo_grant(response: ResponseT) -> None:
            if undo is not None and not response.HasField("error"):
                undo(response)

        limit_s = self._config.call_timeout_s if timeout_s is None else timeout_s
        return _accepted(await self.exchange(message, limit_s, undo_grant))

    async def exchange(
        self, message: RequestT, timeout_s: float, undo: Callable[[ResponseT], None] | None = None
    ) -> ResponseT:
        """The same without a look at what the answer says."""
        self._number(message)
        return await self.request(message.request_id, message, timeout_s=timeout_s, undo=undo)

    async def submit(
        self, message: RequestT, reply: Reply[ResponseT], before: Callable[[], Sequence[RequestT]] = tuple
    ) -> int:
        """Number a request and send it once there is room in flight; its answers go to `reply`. Returns its id.

        before: asked then for messages without an answer that must be sent right before it. Raises as `send` and
        `before` do.
        """
        self._number(message)
        await self._submit(message.request_id, message, reply, before)
        return int(message.request_id)

    async def request(
        self,
        request_id: int,
        message: RequestT,
        *,
        timeout_s: float,
        undo: Callable[[ResponseT], None] | None = None,
        reply: SingleReply[ResponseT] | None = None,
    ) -> ResponseT:
        """Send a request that has one answer, and wait for it; whatever that says.

        undo: takes an answer that comes after the caller was cancelled or timed out: nothing that it grants is lost.
        reply: in place of one made here, for a caller that may fail it. raises: DeadlineExceeded after timeout_s; what
        broke the stream or failed the reply; asyncio.CancelledError.
        """
        reply = reply or SingleReply(undo)
        try:
            async with asyncio.timeout(timeout_s):
                await self._submit(request_id, message, reply)
                return await reply.future
        except TimeoutError:
            reply.abandon()
            raise DeadlineExceeded(f"{self._name} did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            reply.abandon()
            raise

    async def give_back(self, message: RequestT) -> None:
        """Send a request that gives something back, before anything is awaited; then wait for its answer.

        It does not wait for room in flight: the number of such requests is bounded by what was granted.
        """
        message.request_id = self.next_id()
        self.send(message)
        reply = SingleReply[ResponseT]()
        self._pending[message.request_id] = (reply, False)
        limit_s = self._config.call_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                response = await reply.future
        except TimeoutError:
            raise DeadlineExceeded(f"{self._name} did not answer within {limit_s:g} s") from None
        _accepted(response)

    def send_soon(self, message: RequestT, *, first: bool = False) -> None:
        """Send a message as it is that has no answer of its own; nothing happens on a broken stream.

        first: before what waits to be sent, which may need what the message gives back.
        """
        if self.failure is None:
            try:
                self.send(message)
                if first:
                    self._outgoing.rotate(1)
            except KvPoolError as error:  # the queue is full: a session that loses what was given back must end
                self._break(ServiceUnavailable(f"{self._name} is stuck: {error.message}"))

    def send(self, *messages: RequestT) -> None:
        """Queue messages that have no answer, all or none. Raises what broke the stream, or Overloaded."""
        if self.failure is not None:
            raise error_from_reason(self.failure.reason, self.failure.message)  # a traceback of its own
        if len(self._outgoing) + len(messages) > self._outgoing_max:
            raise Overloaded(f"{self._name}: {self._outgoing_max} messages wait to be sent")
        self._outgoing.extend(messages)
        self._idle.clear()
        self._wake.set()

    def start_batching(self) -> None:
        """The server reads `batched`: send messages that wait together as one gRPC message from now on."""
        self._batches = True

    def start_heartbeats(self, message: RequestT, interval_ms: int) -> None:
        """Show that we live, and end the stream when the peer does not. message: sent as it is, again and again."""
        self._liveness = LivenessMonitor(max(interval_ms, 1) / 1e3)
        beating = self._beat(message, self._liveness)
        self._heart = asyncio.create_task(beating, name=f"{self._name} heartbeats")
        self._tasks.append(self._heart)

    async def finish(self, last: RequestT) -> bool:
        """Send a last message and wait until the server ends the stream. False if it did not end it well in time."""
        if self._heart is not None:
            self._heart.cancel()
        self.send_soon(last)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.call_timeout_s):
                await self._idle.wait()
                await self.broken.wait()
        await self.abort(f"{self._name} was closed")
        return self.ended_well

    async def abort(self, cause: KvPoolError | str) -> None:
        """End the stream, and its own channel, at once: requests in flight fail. Idempotent."""
        self._break(cause if isinstance(cause, KvPoolError) else ServiceUnavailable(cause))
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    # Inside

    def _number(self, message: RequestT) -> None:
        message.request_id = self.next_id()
        self._config.tracer.stamp(message)

    async def _submit(
        self,
        request_id: int,
        message: RequestT,
        reply: Reply[ResponseT],
        before: Callable[[], Sequence[RequestT]] = tuple,
    ) -> None:
        await self._places.acquire()
        try:
            self.send(*before(), message)
        except KvPoolError:
            self._places.release()
            raise
        self._pending[request_id] = (reply, True)

    async def _beat(self, message: RequestT, liveness: LivenessMonitor) -> None:
        """Say something with every other check: a message and its answer take the interpreter from an engine, which
        has two sessions for each kind of layer."""
        for is_due in itertools.cycle((True, False)):
            await asyncio.sleep(liveness.check_s)
            if self.failure is not None:
                return
            now_s = self._loop.time()
            if liveness.expired(now_s):
                silent_s = now_s - self.last_received_s
                self._break(ServiceUnavailable(f"{self._name}: nothing was heard for {silent_s:.1f} s"))
            elif is_due:
                self.send_soon(message)

    async def _write_all(self) -> None:
        try:
            while True:
                while self._outgoing:
                    message = batch(self._outgoing) if self._batches else self._outgoing.popleft()
                    self._on_write(message)
                    await self._call.write(message)
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
                if self._liveness is not None:
                    self._liveness.beat()
                for part in unbatch(response):
                    self._dispatch(part)
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


def _accepted(response: ResponseT) -> ResponseT:
    """The answer. Raises the refusal in it."""
    if response.HasField("error"):
        raise item_error_from_proto(response.error)
    return response
