"""Spans of calls that carry one request; streams that carry many have a span for each, made where it is served."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import KvPoolError
from kvpool.core.tracing import Attributes, Span, Tracer
from kvpool.wire.status import error_to_status
from kvpool_server.interceptors.wrapping import AioInterceptor, Call, Metadata, SyncInterceptor

_STATUS_CODE: Final = "rpc.grpc.status_code"
# What nodes, probes and status displays ask all the time: part of a trace that somebody began, never one of its own.
_HOUSEKEEPING: Final = frozenset(
    {
        "RegisterNode",
        "RenewLeases",
        "EndLease",
        "ListNodes",
        "GetKeyspacePolicies",
        "RestoreKeyspacePolicies",
        "ReconcileDigests",
        "ReconcileSplitGroups",
        "ReportStale",
        "GetIndexInfo",
        "GetPageStoreStatus",
        "GetAgentStatus",
        "Check",
    }
)


@dataclass(slots=True)
class _Carried:
    """The trace context in a call's metadata."""

    traceparent: str
    tracestate: str

    @classmethod
    def of(cls, metadata: Metadata) -> "_Carried":
        return cls(_text(metadata, "traceparent"), _text(metadata, "tracestate"))


class AioTracing(AioInterceptor):
    """Spans of the unary calls of a grpc.aio server."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        carried = None if call.streaming else _wanted(call)
        if carried is None:
            yield
            return
        with self._tracer.request(_name(call), carried, attributes=_attributes(call)) as span:
            try:
                yield
            except KvPoolError as error:
                _tell(span, error)
                raise
            span.set({_STATUS_CODE: 0})


class SyncTracing(SyncInterceptor):
    """Spans of the calls of a thread-pool server: each of them moves the pages of one request."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        carried = _wanted(call)
        if carried is None:
            yield
            return
        # Not the current one while it lasts: gRPC runs the parts of a streaming handler in contexts of their own.
        span = self._tracer.request(_name(call), carried, attributes=_attributes(call))
        try:
            yield
            span.set({_STATUS_CODE: 0})
        except KvPoolError as error:
            _tell(span, error)
            raise
        except BaseException as error:
            span.fail(type(error).__name__)
            raise
        finally:
            span.end()


def _wanted(call: Call) -> _Carried | None:
    """None for a call that gets no span."""
    carried = _Carried.of(call.metadata())
    method = call.method.rpartition("/")[2]
    return carried if carried.traceparent or method not in _HOUSEKEEPING else None


def _name(call: Call) -> str:
    return call.method.strip("/")


def _attributes(call: Call) -> Attributes:
    return {"rpc.system": "grpc", "rpc.service": call.service, "rpc.method": call.method.rpartition("/")[2]}


def _tell(span: Span, error: KvPoolError) -> None:
    if span.recording:
        code = error_to_status(error).code.value
        span.set({_STATUS_CODE: int(code[0])})
        span.fail(error)


def _text(metadata: Metadata, name: str) -> str:
    value = metadata.get(name, "")
    return value if isinstance(value, str) else ""
