"""Domain errors to gRPC statuses and back.

The status code is for generic clients and proxies; the exact error is the `reason`, sent as trailing
metadata, by which our clients rebuild the exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import grpc
import grpc.aio

from kvpool.core import errors
from kvpool.core.errors import KvPoolError
from kvpool.wire.tls_errors import explain_closed, explain_tls, narrowed

if TYPE_CHECKING:
    from kvpool.wire.tls import TlsCredentials

T = TypeVar("T")

REASON_KEY: Final = "kvpool-reason"
ITEM_INDEX_KEY: Final = "kvpool-item-index"
FIELD_KEY: Final = "kvpool-field"

# Statuses travel in HTTP/2 headers, which peers limit to 8 KiB in all; a percent-encoded message may grow threefold.
_MAX_MESSAGE_CHARS: Final = 1024

Pairs: TypeAlias = Iterable[tuple[str, str | bytes]]

STATUS_BY_ERROR: Final[Mapping[type[KvPoolError], grpc.StatusCode]] = MappingProxyType(
    {
        KvPoolError: grpc.StatusCode.INTERNAL,
        errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
        errors.GeometryUnsupported: grpc.StatusCode.INVALID_ARGUMENT,
        errors.ExportRefused: grpc.StatusCode.INVALID_ARGUMENT,
        errors.KeyspaceMismatch: grpc.StatusCode.FAILED_PRECONDITION,
        errors.PartitionRefused: grpc.StatusCode.FAILED_PRECONDITION,
        errors.StaleIncarnation: grpc.StatusCode.FAILED_PRECONDITION,
        errors.LeaseLost: grpc.StatusCode.FAILED_PRECONDITION,
        errors.SessionUnknown: grpc.StatusCode.FAILED_PRECONDITION,
        errors.SessionBusy: grpc.StatusCode.FAILED_PRECONDITION,
        errors.WireVersionRefused: grpc.StatusCode.FAILED_PRECONDITION,
        errors.DrainBlocked: grpc.StatusCode.FAILED_PRECONDITION,
        errors.KeyspaceUnknown: grpc.StatusCode.NOT_FOUND,
        errors.PageMissing: grpc.StatusCode.NOT_FOUND,
        errors.PageCorrupt: grpc.StatusCode.DATA_LOSS,
        errors.ArenaFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.TenantDenied: grpc.StatusCode.PERMISSION_DENIED,
        errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
        errors.NotServed: grpc.StatusCode.UNIMPLEMENTED,
        errors.StoreUnavailable: grpc.StatusCode.UNAVAILABLE,
        errors.ServiceUnavailable: grpc.StatusCode.UNAVAILABLE,
        errors.TlsFailed: grpc.StatusCode.UNAVAILABLE,
        errors.StoreFault: grpc.StatusCode.UNAVAILABLE,
        errors.Draining: grpc.StatusCode.UNAVAILABLE,
        errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
        errors.Stopped: grpc.StatusCode.ABORTED,
        errors.StartupFailed: grpc.StatusCode.INTERNAL,
    }
)

# What a status without a reason stands for: gRPC itself made it, or a proxy, or a server of another kind.
_ERROR_BY_BARE_STATUS: Final[Mapping[grpc.StatusCode, type[KvPoolError]]] = MappingProxyType(
    {
        grpc.StatusCode.UNAVAILABLE: errors.ServiceUnavailable,
        grpc.StatusCode.CANCELLED: errors.ServiceUnavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
        grpc.StatusCode.UNIMPLEMENTED: errors.NotServed,
        grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
        grpc.StatusCode.PERMISSION_DENIED: errors.TenantDenied,
        grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    }
)


class ServerStatus(NamedTuple):
    """How a server ends a call that failed."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str], ...]


def error_to_status(error: KvPoolError) -> ServerStatus:
    """The status of an error; a subclass that the table does not name has its base's code."""
    code = next(STATUS_BY_ERROR[base] for base in type(error).__mro__ if base in STATUS_BY_ERROR)
    metadata = [(REASON_KEY, error.reason)]
    if isinstance(error, errors.InvalidRequest) and error.item_index is not None:
        metadata.append((ITEM_INDEX_KEY, str(error.item_index)))
    if isinstance(error, errors.KeyspaceMismatch) and error.field.isascii() and error.field.isprintable():
        metadata.append((FIELD_KEY, error.field))
    return ServerStatus(code, error.message[:_MAX_MESSAGE_CHARS], tuple(metadata))


def error_from_rpc(rpc_error: grpc.RpcError) -> KvPoolError:
    """The domain error behind a failed call of grpc or grpc.aio: by reason, else by status code.

    Raise it `from rpc_error`. For a grpc.aio stream that is written to, use StreamStatus.

    A call that was cancelled on this side is asyncio.CancelledError under grpc.aio, and never comes here; a CANCELLED
    that does was made by the peer or by a channel that closed.
    """
    return error_from_status(*_parts(rpc_error))


def error_from_status(code: grpc.StatusCode | None, message: str, metadata: Pairs) -> KvPoolError:
    """The same for a status whose parts are at hand."""
    pairs = {key: value.decode("ascii", "replace") if isinstance(value, bytes) else value for key, value in metadata}
    reason = pairs.get(REASON_KEY)
    if reason is None:
        return _from_bare_status(code, message)
    error = error_from_reason(reason, message)
    index = pairs.get(ITEM_INDEX_KEY, "")
    if isinstance(error, errors.InvalidRequest) and index.isascii() and index.isdigit():
        error.item_index = int(index)
    if isinstance(error, errors.KeyspaceMismatch):
        error.field = pairs.get(FIELD_KEY, "")
    return error


def error_from_reason(reason: str, message: str) -> KvPoolError:
    """The error that a peer named; an unknown reason (a newer peer's) gives a plain KvPoolError that shows it."""
    if reason == KvPoolError.reason:
        return KvPoolError(message)
    return KvPoolError.from_message(reason, message)


def _from_bare_status(code: grpc.StatusCode | None, message: str) -> KvPoolError:
    if code is grpc.StatusCode.UNAVAILABLE and (explained := explain_tls(message)):
        return errors.TlsFailed(explained)
    if code is grpc.StatusCode.UNAVAILABLE:
        message = explain_closed(message) or message
    error_type = _ERROR_BY_BARE_STATUS.get(code) if code is not None else None
    if error_type is not None:
        return error_type(message)
    return KvPoolError(f"{code.name if code is not None else 'no status'}: {message}")


def _parts(rpc_error: grpc.RpcError) -> tuple[grpc.StatusCode | None, str, Pairs]:
    """Code, message and trailing metadata; an RpcError that is no call (a closed channel's) has none of them."""
    if not isinstance(rpc_error, grpc.aio.AioRpcError | grpc.Call):
        return grpc.StatusCode.UNAVAILABLE, str(rpc_error) or type(rpc_error).__name__, ()
    metadata: Pairs = rpc_error.trailing_metadata() or ()
    return rpc_error.code(), rpc_error.details() or "", metadata


_LOST_STATUS: Final = "Internal error from Core"


class StreamStatus:
    """Remembers how the server ended `call`, a grpc.aio stream that the client writes to. Make it right after the call,
    before anything is awaited.

    When a server ends a stream while the client is still writing, grpc.aio overwrites the server's status by its own
    INTERNAL "Internal error from Core", in one of five cases here (https://github.com/grpc/grpc/issues/36066). The
    status is there for a moment, when the call's done callbacks run, so it is taken then.
    """

    def __init__(self, call: grpc.aio.Call, tls: TlsCredentials | None) -> None:
        """tls: of the call's channel."""
        self._tls = tls
        self._error: KvPoolError | None = None
        self.ended_well = False  # the server ended the stream with status OK
        # The callback gets the call itself, whatever the stubs say.
        call.add_done_callback(lambda _: self._keep(call))

    def error(self, raised: Exception) -> KvPoolError:
        """The domain error behind `raised`, which reading from or writing to the call gave: raise it `from raised`."""
        if self._error is not None:
            return self._error
        if isinstance(raised, KvPoolError):
            return raised
        if isinstance(raised, grpc.RpcError) and not self.ended_well:
            return narrowed(error_from_rpc(raised), self._tls)
        # A write after the end: asyncio.InvalidStateError, or the overwritten status of a stream that ended with OK.
        return errors.ServiceUnavailable("the server has ended the stream")

    def _keep(self, call: grpc.aio.Call) -> None:
        code = _result_now(call.code())
        message = _result_now(call.details()) or ""
        if code is grpc.StatusCode.OK:
            self.ended_well = True
        elif code is grpc.StatusCode.INTERNAL and message == _LOST_STATUS:
            self._error = errors.ServiceUnavailable("the stream broke while it was written to")
        else:
            error = error_from_status(code, message, _result_now(call.trailing_metadata()) or ())
            self._error = narrowed(error, self._tls)


def _result_now(coroutine: Coroutine[Any, Any, T]) -> T | None:
    """The result of a coroutine that has nothing to wait for; None when it would have to wait."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    except asyncio.CancelledError:
        return None
    coroutine.close()
    return None
