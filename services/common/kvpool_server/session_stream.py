"""Session streams of a service: a state machine of values, and the loop that runs it for one call.

`SessionMachine` takes messages, times and ends, and returns events; it does no I/O. `SessionStream` reads, writes and
keeps time for it, and asks a `SessionHandler` for the answers.

What peers may rely on:
- The reader waits for no disk, no handler and no slow reader: heartbeats are answered whatever else goes on.
- Messages begin in the order in which they came. One that `handle_now` serves (release, abort, ...) is done before the
  next one is looked at; a request runs up to its first await by then, so that a release behind an acquire, or an abort
  behind a commit, finds it begun. Requests end in any order.
- At most `requests_max` requests are unfinished; one more is refused with Overloaded. Messages that give something back
  are never refused for that.
- A stream whose peer says nothing for four heartbeats ends, opened or not; so does one whose peer lets `OUTBOX_MAX`
  answers pile up. Only an explicit `close` is a normal end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KvPoolError, Overloaded, Stopped
from kvpool.core.liveness import LivenessMonitor
from kvpool.core.tracing import Span
from kvpool.wire.convert import batch, item_error_to_proto, unbatch
from kvpool_server.logs import note_request

_log = logging.getLogger(__name__)

OUTBOX_MAX = 4096  # a peer that lets so many answers pile up does not read
FLUSH_S = 2.0  # for a peer that reads to get its last answers

# Messages are generated classes that share field names (request_id, kind, heartbeat, closed, error) and no base.
RequestT = TypeVar("RequestT", bound=Any)
ResponseT = TypeVar("ResponseT", bound=Any)
RequestContraT = TypeVar("RequestContraT", contravariant=True)
ResponseCoT = TypeVar("ResponseCoT", covariant=True)


class Role(Enum):
    """What a kind of message is to its session."""

    OPEN = auto()  # the first message, once
    REQUEST = auto()  # counts as unfinished until its last answer
    NOTICE = auto()  # served at once and in order
    HEARTBEAT = auto()
    CLOSE = auto()


class SessionPhase(Enum):
    """The life of a session stream."""

    UNOPENED = auto()  # no message has come
    OPENING = auto()  # `open` is being worked on
    OPEN = auto()
    ENDED = auto()  # by either side


@dataclass(frozen=True, slots=True)
class Begin:
    """Serve this message, now."""

    role: Role
    message: Any


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the message with an error; the session goes on."""

    message: Any
    error: KvPoolError


@dataclass(frozen=True, slots=True)
class Beat:
    """Answer a heartbeat."""


@dataclass(frozen=True, slots=True)
class End:
    """End the stream. error: None if the peer has closed it. abnormal: the peer has left, or is taken to have left."""

    error: KvPoolError | None
    abnormal: bool = False


SessionEvent: TypeAlias = Begin | Refuse | Beat | End


class SessionMachine:
    """What a session stream does next. Time is passed in."""

    def __init__(self, roles: Mapping[str, Role], *, requests_max: int, heartbeat_s: float) -> None:
        """roles: by the name in the oneof `kind`."""
        self._roles, self._requests_max = roles, requests_max
        self._liveness = LivenessMonitor(heartbeat_s)
        self._unfinished = 0
        self._peer_waits = False  # for the answer to `open`: it is not to say anything
        self.phase = SessionPhase.UNOPENED
        self.check_s = self._liveness.check_s

    def receive(self, message: Any) -> SessionEvent | None:
        """A message has come; what to do with it."""
        if self.phase is SessionPhase.ENDED:
            return None
        self._liveness.beat()
        kind = message.WhichOneof("kind")
        role = self._roles.get(kind or "")
        if self.phase is SessionPhase.UNOPENED:
            if role is not Role.OPEN:
                first = next(name for name, role in self._roles.items() if role is Role.OPEN)
                return End(InvalidRequest(f"the first message of a session must be `{first}`"))
            self.phase, self._peer_waits = SessionPhase.OPENING, True
            return Begin(role, message)
        if role is Role.HEARTBEAT:
            return Beat()
        if role is Role.CLOSE:
            return End(None)
        if role is Role.OPEN or role is None:
            return Refuse(message, InvalidRequest(f"message {kind or 'without a known kind'} is not expected here"))
        if self.phase is SessionPhase.OPENING:
            return Refuse(message, InvalidRequest("wait for `ready` or `opened` before the first request"))
        if role is Role.REQUEST:
            if self._unfinished >= self._requests_max:
                return Refuse(message, Overloaded(f"{self._unfinished} requests of this session are unfinished"))
            self._unfinished += 1
        return Begin(role, message)

    def answered(self) -> None:
        """The peer gets an answer; from now on its messages prove that it is alive."""
        if self._peer_waits:
            self._peer_waits = False
            self._liveness.beat()

    def opened(self) -> None:
        """`open` has been served."""
        if self.phase is SessionPhase.OPENING:
            self.phase = SessionPhase.OPEN

    def finished(self) -> None:
        """A request has been given its last answer."""
        self._unfinished -= 1

    def check(self, now_s: float) -> SessionEvent | None:
        """Return the end of a stream whose peer is silent. Call it every `check_s`."""
        expired = self._liveness.expired(now_s)
        if self._peer_waits:
            self._liveness.beat()
        elif expired:
            silent = f"the peer was silent for {self._liveness.limit_s:g} s; its session is over"
            return End(DeadlineExceeded(silent), abnormal=True)
        return None

    def end(self) -> bool:
        """The stream ends now; False if it had ended before: only the first reason counts."""
        first, self.phase = self.phase is not SessionPhase.ENDED, SessionPhase.ENDED
        return first


class SessionHandler(Protocol[RequestContraT, ResponseCoT]):
    """What a service does with the messages of one session. Refusals are raised as KvPoolError."""

    async def open(self, request: RequestContraT, send: Callable[[ResponseCoT], None]) -> None:
        """Open the session and send what answers that. An error ends the stream. May be cancelled.

        send: may be kept; what is sent once `open` has returned answers no message.
        """
        ...

    def handle_now(self, request: RequestContraT) -> ResponseCoT | None:
        """Serve a notice; the answer, if it has one."""
        ...

    async def handle(self, request: RequestContraT, send: Callable[[ResponseCoT], None], span: Span) -> ResponseCoT:
        """Serve a request. Earlier parts of the answer go to `send`, the last one is returned."""
        ...

    def refused(self, request: RequestContraT) -> None:
        """A request was refused before it could begin."""
        ...

    def span(self, request: RequestContraT) -> Span:
        """Return the span of a request; `handle` records the outcome in it."""
        ...

    async def ended(self) -> KvPoolError:
        """Return when the service itself ends the session, with the reason."""
        ...

    async def end(self, end: End) -> None:
        """The session is over: let go of everything. Requests that run end by themselves, or are cancelled then.

        Called once; also if `open` has failed or was never called."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules(Generic[ResponseT]):
    """What the sessions of one service have in common."""

    roles: Mapping[str, Role]
    response: Callable[..., ResponseT]  # the message class
    requests_max: int
    heartbeat_s: float
    cancels_requests: bool  # when a session ends; else they are waited for
    # Whether the peer that sent this first message reads `batched`.
    reads_batched: Callable[[Any], bool] = lambda _: False


class SessionStream(Generic[RequestT, ResponseT]):
    """Serves one call."""

    def __init__(self, rules: SessionRules[ResponseT], handler: SessionHandler[RequestT, ResponseT]) -> None:
        self._rules, self._handler = rules, handler
        self._machine = SessionMachine(rules.roles, requests_max=rules.requests_max, heartbeat_s=rules.heartbeat_s)
        self._outbox: deque[ResponseT] = deque()
        self._wake = asyncio.Event()
        self._over: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._opening: asyncio.Task[None] | None = None
        self._requests: dict[asyncio.Task[None], None] = {}  # in the order in which they came
        self._batches = False  # whether the peer reads `batched`
        self._complete = False  # no more answers will be queued
        self._finishing: asyncio.Future[None] | None = None

    async def serve(self, messages: AsyncIterator[RequestT], write: Callable[[ResponseT], Awaitable[None]]) -> None:
        """Until the session ends and the handler has let go of everything. Raises the error that ended it."""
        helpers = [asyncio.ensure_future(work) for work in (self._read(messages), self._check(), self._await_end())]
        writer = asyncio.ensure_future(self._write(write))
        try:
            end = await asyncio.shield(self._over)
        except asyncio.CancelledError:
            self._end(End(Stopped("the peer's call was cancelled"), abnormal=True))
            raise
        finally:
            # However often the call is cancelled, everything is let go of.
            self._finishing = asyncio.ensure_future(self._finish(self._over.result(), helpers, writer))
            await asyncio.shield(self._finishing)
        if end.error is not None:
            raise end.error

    # Inside

    async def _read(self, messages: AsyncIterator[RequestT]) -> None:
        try:
            async for message in messages:
                for part in unbatch(message):
                    event = self._machine.receive(part)
                    if event is None:
                        continue
                    self._apply(event)
                    if isinstance(event, Begin) and event.role is not Role.NOTICE:
                        await asyncio.sleep(0)  # its first step is taken before the next message is looked at
            # A peer that is killed looks like this too.
            self._end(End(Stopped("the peer left without closing its session"), abnormal=True))
        except KvPoolError as error:
            self._end(End(error))
        except Exception as error:
            _log.exception("a session's messages could not be read")
            cause = Stopped(f"the session's messages could not be read ({error})")
            self._end(End(cause, abnormal=True))

    def _apply(self, event: SessionEvent) -> None:
        match event:
            case Begin(Role.NOTICE, message):
                self._handle_now(message)
            case Begin(Role.REQUEST, message):
                task = asyncio.ensure_future(self._handle(message))
                self._requests[task] = None
                task.add_done_callback(lambda ended: self._requests.pop(ended, None))
            case Begin(Role.OPEN, message):
                self._batches = self._rules.reads_batched(message)
                self._opening = asyncio.ensure_future(self._open(message))
            case Refuse(message, error):
                if self._rules.roles.get(message.WhichOneof("kind") or "") is Role.REQUEST:
                    self._handler.refused(message)
                self._answer(message, self._refusal(error))
            case Beat():
                self._send(self._empty("heartbeat"))
            case End():
                self._end(event)

    async def _open(self, message: RequestT) -> None:
        def send(response: ResponseT) -> None:
            self._machine.answered()
            if self._machine.phase is SessionPhase.OPENING:
                response.request_id = message.request_id
            self._send(response)

        note_request(message.request_id)
        try:
            await self._handler.open(message, send)
        except KvPoolError as error:
            self._end(End(error))
        except Exception:
            _log.exception("a session could not be opened")
            self._end(End(_internal()))
        except asyncio.CancelledError:
            if self._over.done():  # by `_finish`
                raise
            _log.exception("a session could not be opened: what it waited for was cancelled")
            self._end(End(_internal()))
        else:
            self._machine.opened()

    def _handle_now(self, message: RequestT) -> None:
        try:
            response = self._handler.handle_now(message)
        except KvPoolError as error:
            response = self._refusal(error)
        except Exception:
            _log.exception("a message failed")
            response = self._refusal(_internal())
        if response is not None:
            self._answer(message, response)

    async def _handle(self, message: RequestT) -> None:
        note_request(message.request_id)

        def send(response: ResponseT) -> None:
            self._answer(message, response)

        try:
            with self._handler.span(message) as span:
                try:
                    response = await self._handler.handle(message, send, span)
                except KvPoolError as error:
                    span.fail(error)
                    response = self._refusal(error)
                except Exception:
                    _log.exception("a request failed")
                    internal = _internal()
                    span.fail(internal)
                    response = self._refusal(internal)
                except asyncio.CancelledError:
                    if self._over.done():  # by `_finish`, at the session's end
                        reason = self._over.result().error or Stopped("the session ended first")
                    else:  # the request was not cancelled: gRPC says this of a call whose channel is closed
                        _log.exception("a request failed: what it waited for was cancelled")
                        reason = _internal()
                    span.fail(reason)
                    response = self._refusal(reason)
        finally:
            self._machine.finished()
        self._answer(message, response)

    def _answer(self, message: RequestT, response: ResponseT) -> None:
        response.request_id = message.request_id
        self._send(response)

    def _send(self, response: ResponseT) -> None:
        """Queue an answer without waiting: no holder of slots hangs on a slow reader."""
        if len(self._outbox) >= OUTBOX_MAX:
            self._end(End(Overloaded("the peer does not read its answers"), abnormal=True))
        else:
            self._outbox.append(response)
            self._wake.set()

    def _refusal(self, error: KvPoolError) -> ResponseT:
        return self._rules.response(error=item_error_to_proto(error))

    def _empty(self, kind: str) -> ResponseT:
        response = self._rules.response()
        getattr(response, kind).SetInParent()
        return response

    async def _write(self, write: Callable[[ResponseT], Awaitable[None]]) -> None:
        """Ends once the session is over and all is written, or when the call has ended."""
        try:
            while True:
                while self._outbox:
                    await write(batch(self._outbox) if self._batches else self._outbox.popleft())
                if self._complete:
                    return
                self._wake.clear()
                await self._wake.wait()
        except Exception as error:
            # The call has ended under us; its reader sees that too, and ends the session.
            _log.debug("an answer could not be written: %s", error)

    async def _check(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._machine.check_s)
            event = self._machine.check(loop.time())
            if event is not None:
                self._apply(event)

    async def _await_end(self) -> None:
        error = await self._handler.ended()
        self._end(End(error))

    def _end(self, event: End) -> None:
        if self._machine.end():
            self._over.set_result(event)

    async def _finish(self, end: End, helpers: list[asyncio.Task[None]], writer: asyncio.Future[None]) -> None:
        if self._opening is not None:
            helpers.append(self._opening)
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        try:
            await self._handler.end(end)
        except Exception:
            _log.exception("a session could not let go of everything")
        for request in self._requests if self._rules.cancels_requests else ():
            request.cancel()
        if self._requests:
            await asyncio.wait(self._requests)
        if end.error is None:
            self._send(self._empty("closed"))
        self._complete = True
        self._wake.set()
        await asyncio.wait((writer,), timeout=FLUSH_S)
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)


def peer_address(peer: str) -> str:
    """A peer as gRPC names it, without its port: "unix:" for all of this host's sockets."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


def _internal() -> KvPoolError:
    return KvPoolError("internal error in the service; its log has the details")
