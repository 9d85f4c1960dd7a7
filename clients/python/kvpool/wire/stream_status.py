"""The true end of a grpc.aio stream that the client writes to.

When a server ends a stream while the client is still writing, grpc.aio overwrites the server's status by its own
INTERNAL "Internal error from Core", in one of five cases here (https://github.com/grpc/grpc/issues/36066). The status
is there for a moment, when the call's done callbacks run, so it is taken then.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from kvpool.core.errors import KvPoolError, ServiceUnavailable
from kvpool.wire.status import error_from_rpc, error_from_status
from kvpool.wire.tls import TlsCredentials, narrowed

T = TypeVar("T")

_LOST_STATUS: Final = "Internal error from Core"


class StreamStatus:
    """Remembers how the server ended `call`. Make it right after the call, before anything is awaited."""

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
        return ServiceUnavailable("the server has ended the stream")

    def _keep(self, call: grpc.aio.Call) -> None:
        code = _result_now(call.code())
        message = _result_now(call.details()) or ""
        if code is grpc.StatusCode.OK:
            self.ended_well = True
        elif code is grpc.StatusCode.INTERNAL and message == _LOST_STATUS:
            self._error = ServiceUnavailable("the stream broke while it was written to")
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
