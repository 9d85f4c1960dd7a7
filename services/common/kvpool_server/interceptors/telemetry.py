"""Metrics and spans of calls. A stream that carries many requests has a span for each, made where it is served."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpool.core.errors import KvPoolError
from kvpool.core.tracing import Attributes, Span, Tracer
from kvpool.wire.status import error_to_status
from kvpool_server.interceptors.wrapping import AioInterceptor, Call, Metadata, SyncInterceptor

_BUCKETS_S: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0)
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
# One label value for all names that are not served: the names come from clients, and have no end.
_UNKNOWN_METHOD: Final = "unknown"


class RequestMetrics:
    """The metrics of one service. The labels are closed sets: methods that are served, and gRPC's codes."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        prefix = f"kvpool_{service}_grpc"
        self._requests = Counter(
            f"{prefix}_requests", "Calls that ended, by status code.", ["method", "grpc_code"], registry=registry
        )
        self._duration = Histogram(
            f"{prefix}_request_duration_seconds",
            "Wall time of one call; of a stream, from its start to its end.",
            ["method"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._in_flight = Gauge(
            f"{prefix}_requests_in_flight", "Calls being handled now.", ["method"], registry=registry
        )

    def started(self, method: str) -> float:
        self._in_flight.labels(method).inc()
        return time.perf_counter()

    def ended(self, method: str, code: grpc.StatusCode, started_at: float) -> None:
        self._in_flight.labels(method).dec()
        self._duration.labels(method).observe(time.perf_counter() - started_at)
        self._requests.labels(method, code.name).inc()

    def not_served(self) -> None:
        self._requests.labels(_UNKNOWN_METHOD, grpc.StatusCode.UNIMPLEMENTED.name).inc()


class AioMetrics(AioInterceptor):
    """Measures calls of a grpc.aio server."""

    def __init__(self, metrics: RequestMetrics) -> None:
        super().__init__()
        self._metrics = metrics

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        started_at = self._metrics.started(call.method)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._metrics.ended(call.method, _code(call, error), started_at)

    def not_served(self) -> None:
        self._metrics.not_served()


class SyncMetrics(SyncInterceptor):
    """Measures calls of a thread-pool server."""

    def __init__(self, metrics: RequestMetrics) -> None:
        super().__init__()
        self._metrics = metrics

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        started_at = self._metrics.started(call.method)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._metrics.ended(call.method, _code(call, error), started_at)

    def not_served(self) -> None:
        self._metrics.not_served()


def _code(call: Call, error: BaseException | None) -> grpc.StatusCode:
    """The status the client gets: what the handler set, else what the way it ended stands for."""
    code = call.context.code()  # grpc.aio gives a number, the thread-pool server a StatusCode or None
    chosen = _CODES.get(code) if isinstance(code, int) else code
    if chosen is not None and chosen is not grpc.StatusCode.OK:
        return chosen
    if error is None:
        return grpc.StatusCode.OK
    if isinstance(error, Exception):
        return grpc.StatusCode.UNKNOWN
    # Cancelled: by the client that left, or by its deadline.
    expired = call.remaining_s() == 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED


_STATUS_CODE: Final = "rpc.grpc.status_code"
# What nodes, probes and status displays call all the time: traced as part of the caller's trace only.
_HOUSEKEEPING: Final = frozenset(
    {
        "RegisterNode",
        "RenewLeases",
        "EndLease",
        "ListNodes",
        "GetKeyspacePolicies",
        "RestoreKeyspacePolicies",
        "ListChainGroups",
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
                _record_error(span, error)
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
            _record_error(span, error)
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


def _record_error(span: Span, error: KvPoolError) -> None:
    if span.recording:
        code = error_to_status(error).code.value
        span.set({_STATUS_CODE: int(code[0])})
        span.fail(error)


def _text(metadata: Metadata, name: str) -> str:
    value = metadata.get(name, "")
    return value if isinstance(value, str) else ""
