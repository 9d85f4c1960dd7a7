"""Server interceptors, for grpc.aio and for the thread-pool server.

Order, outermost first, and why:

1. metrics: counts what the client sees, so it must be outside of everything that changes the outcome;
2. errors: turns any exception of what is inside into a status, so that the others may simply raise;
3. limits: neither work nor time for more calls than are allowed;
4. tracing, where it is on: inside of errors, so that it sees them before they are statuses;
5. auth: no work or time is spent on an unknown caller;
6. deadline: nearest to the handler, whose run time it bounds;
7. messages: what cannot be read is the handler's first concern, after all the others have had their say.

`aio_interceptors` and `sync_interceptors` build the list in that order.
"""

from collections.abc import Sequence

import grpc

from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool_server.interceptors.auth import (
    AioAuth,
    Authenticator,
    DefaultTenantAuthenticator,
    Identity,
    SyncAuth,
    current_identity,
)
from kvpool_server.interceptors.errors import AioErrors, AioMessages, SyncErrors, SyncMessages
from kvpool_server.interceptors.limits import AioDeadline, AioLimits, CallLimits, DeadlinePolicy, SyncDeadline
from kvpool_server.interceptors.telemetry import AioMetrics, AioTracing, RequestMetrics, SyncMetrics, SyncTracing

__all__ = [
    "Authenticator",
    "CallLimits",
    "DeadlinePolicy",
    "DefaultTenantAuthenticator",
    "Identity",
    "RequestMetrics",
    "aio_interceptors",
    "current_identity",
    "sync_interceptors",
]


def aio_interceptors(
    *,
    metrics: RequestMetrics,
    authenticator: Authenticator,
    deadlines: DeadlinePolicy,
    tracer: Tracer = NO_TRACER,
    limits: CallLimits | None = None,
) -> Sequence[grpc.aio.ServerInterceptor]:
    """The interceptors of a grpc.aio server, outermost first."""
    tracing = [AioTracing(tracer)] if tracer.recording else []
    around = [AioMetrics(metrics), AioErrors(), AioLimits(limits or CallLimits())]
    return [*around, *tracing, AioAuth(authenticator), AioDeadline(deadlines), AioMessages()]


def sync_interceptors(
    *, metrics: RequestMetrics, authenticator: Authenticator, deadlines: DeadlinePolicy, tracer: Tracer = NO_TRACER
) -> Sequence[grpc.ServerInterceptor]:
    """The interceptors of a thread-pool server, outermost first."""
    tracing = [SyncTracing(tracer)] if tracer.recording else []
    around = [SyncMetrics(metrics), SyncErrors(), *tracing, SyncAuth(authenticator), SyncDeadline(deadlines)]
    return [*around, SyncMessages()]
