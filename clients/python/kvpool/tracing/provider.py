"""A tracer of this process's own, as OpenTelemetry's environment variables want it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

import kvpool
from kvpool.core.tracing import Tracer
from kvpool.tracing.export import BoundedExport, CountSpans, ExportLimits
from kvpool.tracing.otel import OtelTracer

_SCOPE: Final = "kvpool"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def tracer_of(service: str, environment: Mapping[str, str], count: CountSpans) -> Tracer:
    """A tracer that exports. Raises ValueError for a variable that is not served, ImportError without an exporter."""
    exporter = _exporter(environment)
    return tracer_with(service, BoundedExport(exporter, ExportLimits.from_environment(environment), count))


def tracer_with(service: str, processor: SpanProcessor) -> Tracer:
    """A tracer whose spans go to `processor`; sampler, resource and span limits are those of the environment.

    service: the service's name where OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES give none.
    """
    resource = Resource.create()
    named = not str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service")
    own = {SERVICE_VERSION: kvpool.__version__} | ({} if named else {SERVICE_NAME: service})
    # Closed by its owner, who knows when the last span has ended; at exit only what was never closed.
    provider = TracerProvider(resource=resource.merge(Resource(own)))
    provider.sampler = LinkedSampler(provider.sampler)
    provider.add_span_processor(processor)
    return OtelTracer(provider.get_tracer(_SCOPE, kvpool.__version__), close=provider.shutdown)


def engines_own_tracer() -> Tracer | None:
    """A tracer of the provider that the rest of this process has set up for itself, if it has one."""
    sdk, api = sys.modules.get("opentelemetry.sdk.trace"), sys.modules.get("opentelemetry.trace")
    if sdk is None or api is None:
        return None
    provider = api.get_tracer_provider()
    if not isinstance(provider, sdk.TracerProvider):
        return None
    return OtelTracer(provider.get_tracer(_SCOPE, kvpool.__version__))  # its owner closes it


def _exporter(environment: Mapping[str, str]) -> SpanExporter:
    wanted = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if wanted == "console":
        return ConsoleSpanExporter(out=sys.stderr)
    if wanted != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER={wanted} is not served; use otlp, console or none")
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "grpc")
    if protocol != "grpc":
        raise ValueError(f"{_PROTOCOLS[1]}={protocol} is not served; use grpc, which collectors take on port 4317")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    # Its own words about every attempt say less than ours about what was dropped.
    logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
    return OTLPSpanExporter()


class LinkedSampler(Sampler):
    """As the sampler inside decides, except for a root span with links: recorded if something that it is linked to is.

    Otherwise a ratio of 1 % would keep one in a hundred of the write-backs that belong to the requests that it kept.
    """

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        is_root = not get_current_span(parent_context).get_span_context().is_valid
        if is_root and links and any(link.context.trace_flags.sampled for link in links):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        return self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"LinkedSampler{{{self._inner.get_description()}}}"
