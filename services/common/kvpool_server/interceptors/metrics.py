"""Request counts, durations and calls in flight, for both kinds of server."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpool_server.interceptors.wrapping import AioInterceptor, Call, SyncInterceptor

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
