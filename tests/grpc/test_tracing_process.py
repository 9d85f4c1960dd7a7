"""A service process under OpenTelemetry's variables: its spans reach a real receiver, and a dead one costs nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvpool.testing import eventually_sync
from kvpool.v1 import index_pb2, index_pb2_grpc
from tests.grpc.test_index_process import running

pytestmark = pytest.mark.e2e

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
METADATA = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.resources: dict[str, str] = {}
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for part in request.resource_spans:
                self.resources |= {one.key: one.value.string_value for one in part.resource.attributes}
                self.spans += [span for scope in part.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def receiver() -> Iterator[tuple[Receiver, str]]:
    server, collector = grpc.server(ThreadPoolExecutor(2)), Receiver()
    register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # generated without types
    register(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def ask(endpoint: str, count: int = 1) -> None:
    with grpc.insecure_channel(endpoint) as channel:
        stub = index_pb2_grpc.IndexServiceStub(channel)
        for _ in range(count):
            stub.ListKeyspaces(index_pb2.ListKeyspacesRequest(), timeout=60, metadata=METADATA)
            stub.ListNodes(index_pb2.ListNodesRequest(), timeout=60)  # housekeeping: no trace of its own


def test_spans_of_a_process_reach_a_collector(tmp_path: Path) -> None:
    with receiver() as (collector, endpoint):
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }
        with running(tmp_path, **variables) as (process, ready):
            ask(ready["endpoint"])
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
            assert process.returncode == 0, log
        (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert span.name == "kvpool.v1.IndexService/ListKeyspaces"
    reported = {one.key: one.value for one in span.attributes}
    assert reported["rpc.system"].string_value == "grpc"
    assert reported["rpc.grpc.status_code"].int_value == 0
    assert collector.resources["service.name"] == "kvpool-index"
    assert collector.resources["deployment.environment.name"] == "test"


def test_a_dead_collector_costs_drops_that_are_counted(tmp_path: Path) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "10",
        "OTEL_BSP_MAX_QUEUE_SIZE": "5",
    }
    with running(tmp_path, **variables) as (process, ready):

        def dropped() -> bool:
            ask(ready["endpoint"], count=50)  # more than its queue holds, unless they come slowly
            with urlopen(ready["metrics_url"], timeout=60) as response:
                text = response.read().decode()
            return 'trace_spans_total{fate="queue_full"}' in text and 'fate="export_failed"' in text

        eventually_sync(dropped)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
        assert "spans were dropped" in log
        assert "Transient error" not in log
