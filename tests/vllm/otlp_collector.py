"""A collector of traces that processes under test send their spans to."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class OtlpCollector:
    """What has come in so far: (service, span of OTLP)."""

    endpoint: str = ""
    spans: list[tuple[str, Any]] = field(default_factory=list)

    def named(self, trace_id: bytes) -> dict[str, Any]:
        """The spans of one trace by their names."""
        return {span.name: span for _, span in list(self.spans) if span.trace_id == trace_id}


@contextmanager
def otlp_collector() -> Iterator[OtlpCollector]:
    """Listens on loopback, OTLP over gRPC."""
    collector = OtlpCollector()

    class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            for part in request.resource_spans:
                names = {one.key: one.value.string_value for one in part.resource.attributes}
                for scope in part.scope_spans:
                    collector.spans.extend((names.get("service.name", ""), span) for span in scope.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # generated without types
    register(Receiver(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
