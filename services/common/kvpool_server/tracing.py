"""Tracing of a service process: the environment's tracer, what it drops as metrics, its ids in the logs."""

import os

from prometheus_client import CollectorRegistry, Counter

from kvpool.core.tracing import Tracer
from kvpool.tracing.process import open_tracer, tracing_wanted
from kvpool_server.logs import show_trace_of


def open_service_tracer(service: str, registry: CollectorRegistry) -> Tracer:
    """What OpenTelemetry's environment variables ask for; records nothing without them. Close it in the end.

    service: short name, as in "index"; the trace's service.name is "kvpool-index" unless the environment says another.
    """
    if not tracing_wanted(os.environ):
        return open_tracer(service, {})
    spans = Counter(
        f"kvpool_{service}_trace_spans",
        "Recorded spans, by what became of them: exported, or dropped and why.",
        ["fate"],
        registry=registry,
    )
    tracer = open_tracer(
        f"kvpool-{service}", os.environ, lambda fate, span_count: spans.labels(fate.value).inc(span_count)
    )
    show_trace_of(tracer)
    return tracer
