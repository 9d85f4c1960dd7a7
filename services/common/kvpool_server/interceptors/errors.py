"""Exceptions to gRPC statuses: the one place where a domain error meets a status code, also for unreadable messages.

gRPC itself would log a stack trace for each message that it cannot parse, and answer with UNKNOWN or INTERNAL: a client
that sends random bytes could fill the disk with logs, and would look like a bug of ours.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from kvpool.core.errors import InvalidRequest, KvPoolError, NotServed
from kvpool.wire.status import ServerStatus, error_to_status
from kvpool.wire.weight import FREE_BYTES, check_weight
from kvpool_server.interceptors.wrapping import (
    AioInterceptor,
    AioWrapper,
    Call,
    Handler,
    SyncInterceptor,
    SyncWrapper,
    as_coroutine,
    behavior_of,
    rebuild,
)
from kvpool_server.logs import fields

_log = logging.getLogger(__name__)

_INTERNAL_REASON: Final = "INTERNAL"


class AioErrors(AioInterceptor):
    """KvPoolError by the table of kvpool.wire.status; anything else INTERNAL with an id. Cancellation passes."""

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AbortError:
            raise  # the handler chose a status itself (health and reflection do)
        except Exception as error:
            if _write_failed(call, error):
                raise _left(call, error) from None
            status = _status_of(call, error)
            try:
                await call.context.abort(status.code, status.message, status.trailing_metadata)
            except grpc.aio.InternalError as late:
                raise _left(call, late) from None


class SyncErrors(SyncInterceptor):
    """The same for a thread-pool server."""

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if type(error) is Exception and not error.args and call.context.code() is not None:
                raise  # what context.abort() raises: the handler chose a status itself
            status = _status_of(call, error)
            call.context.set_trailing_metadata(status.trailing_metadata)
            call.context.abort(status.code, status.message)


def _write_failed(call: Call, error: Exception) -> bool:
    """Whether a write did; beside it, in a TaskGroup, nothing failed in an unknown way."""
    if not isinstance(error, ExceptionGroup):
        return isinstance(error, grpc.aio.InternalError)
    failed = [_write_failed(call, member) for member in error.exceptions]
    known = (_known_error(call, member) is not None for member in error.exceptions)
    return any(failed) and all(one or other for one, other in zip(failed, known, strict=True))


def _left(call: Call, error: Exception) -> asyncio.CancelledError:
    """What a failed write means: the client left before grpc.aio got round to cancelling the handler."""
    _log.debug("client left in the middle of a write", extra=fields(method=call.method, error=error))
    return asyncio.CancelledError()


def _status_of(call: Call, error: Exception) -> ServerStatus:
    known = _known_error(call, error)
    if known is not None:
        return error_to_status(known)
    # The client gets an id to quote, and nothing that would reveal our internals or other tenants.
    incident = secrets.token_hex(6)
    _log.error("unexpected error in a request", exc_info=error, extra=fields(incident=incident, method=call.method))
    return ServerStatus(
        grpc.StatusCode.INTERNAL,
        f"internal error {incident}; the server's log has the details under this id",
        (("kvpool-reason", _INTERNAL_REASON),),
    )


def _known_error(call: Call, error: Exception) -> KvPoolError | None:
    if isinstance(error, KvPoolError):
        return error
    if isinstance(error, NotImplementedError):  # what the generated base classes raise
        return NotServed(f"{call.method} is not served by this version")
    if isinstance(error, ExceptionGroup):  # of a TaskGroup whose members failed in a known way
        members = [_known_error(call, member) for member in error.exceptions]
        return members[0] if all(member is not None for member in members) else None
    return None


Deserializer = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a message up to where an exception is turned into a status."""

    error: InvalidRequest


class AioMessages(AioWrapper):
    """Refuses unreadable messages of a grpc.aio server."""

    def wrap(self, method: str, inner: Handler) -> Handler:
        deserialize = inner.request_deserializer
        if deserialize is None:
            return inner
        behavior = as_coroutine(method, behavior_of(inner))
        if inner.request_streaming:
            # A message of a stream is read when the handler asks for it: what is raised there comes out of the handler.
            return rebuild(inner, behavior, _reading(method, deserialize))

        async def run(request: Any, context: Any) -> Any:
            return await behavior(_checked(request), context)

        return rebuild(inner, run, _standing_in(method, deserialize))


class SyncMessages(SyncWrapper):
    """The same for a thread-pool server, which hides from a stream's handler what its deserializer raises."""

    def wrap(self, method: str, inner: Handler) -> Handler:
        behavior, deserialize = behavior_of(inner), inner.request_deserializer
        if deserialize is None:
            return inner

        def run(request: Any, context: Any) -> Any:
            return behavior(map(_checked, request) if inner.request_streaming else _checked(request), context)

        def run_stream(request: Any, context: Any) -> Iterator[Any]:
            yield from run(request, context)

        return rebuild(inner, run_stream if inner.response_streaming else run, _standing_in(method, deserialize))


def _reading(method: str, deserialize: Deserializer) -> Deserializer:
    """Raises InvalidRequest for what cannot be read, or would take too much memory."""
    # Generated code reads by a method of the message's class.
    message = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)

    def read(data: bytes) -> Any:
        try:
            if message is not None and len(data) > FREE_BYTES:
                check_weight(data, message)
            return deserialize(data)
        except DecodeError as error:
            raise InvalidRequest(f"{method} got {len(data)} bytes that are no message of it ({error})") from None

    return read


def _standing_in(method: str, deserialize: Deserializer) -> Deserializer:
    read_or_raise = _reading(method, deserialize)

    def read(data: bytes) -> Any:
        try:
            return read_or_raise(data)
        except InvalidRequest as error:
            return _Unreadable(error)

    return read


def _checked(request: Any) -> Any:
    if isinstance(request, _Unreadable):
        raise request.error
    return request
