"""Whether a process traces is said by OpenTelemetry's variables; without them OpenTelemetry is not even imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvpool.client.config import ClientConfig
from kvpool.core.tracing import NO_TRACER
from kvpool.tracing.process import open_tracer, process_tracer, tracing_wanted
from kvpool.tracing.provider import tracer_with

REPOSITORY = Path(__file__).parents[3]
ROOTS = ("clients/python", "services/common", "services/index", "services/pagestore", "services/gpuagent")
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "false"}, True),
    ],
)
def test_the_variables_decide(variables: dict[str, str], wanted: bool) -> None:
    assert tracing_wanted(variables) is wanted


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "use otlp, console or none"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "port 4317"),
        (ENDPOINT | {"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "OTEL_BSP_MAX_QUEUE_SIZE"),
    ],
)
def test_what_is_not_served_is_reported_and_does_not_prevent_serving(
    variables: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_tracer("index", variables) is NO_TRACER
    assert said in caplog.text


def test_an_absent_package_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "kvpool.tracing.provider", None)
    assert open_tracer("index", ENDPOINT) is NO_TRACER
    assert "install kvpool[tracing]" in caplog.text


def test_the_resource_is_the_environments_where_it_says_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod,service.namespace=kv")
    plain = _resource()
    assert (plain["service.name"], plain["service.namespace"]) == ("kvpool-index", "kv")
    assert plain["deployment.environment.name"] == "prod"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    assert _resource()["service.name"] == "mine"


def _resource() -> dict[str, Any]:
    exporter = InMemorySpanExporter()
    with tracer_with("kvpool-index", SimpleSpanProcessor(exporter)).request("one"):
        pass
    (span,) = exporter.get_finished_spans()
    return dict(span.resource.attributes)


def test_a_client_takes_part_in_what_its_engine_has_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClientConfig().tracer is NO_TRACER
    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    assert process_tracer().recording
    assert ClientConfig().tracer.recording
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert process_tracer() is NO_TRACER


def test_without_the_variables_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys, kvpool_index.main, kvpool_pagestore.main, kvpool_gpuagent.main, kvpool.client.sync\n"
        "from kvpool.client.config import ClientConfig\n"
        "from kvpool_server.metrics import new_registry\n"
        "from kvpool_server.metrics import open_service_tracer\n"
        "ClientConfig(); open_service_tracer('index', new_registry())\n"
        "found = [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert not found, found\n"
    )
    path = os.pathsep.join(str(REPOSITORY / root) for root in ROOTS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", code], env={**kept, "PYTHONPATH": path}, check=True, timeout=60)
