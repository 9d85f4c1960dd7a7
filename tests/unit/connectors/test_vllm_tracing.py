"""What the vLLM connector asks of the pool for a request is a part of the trace that the request came with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvpool.client.config import ClientConfig
from kvpool.client.sync import BackgroundLoop
from kvpool.connectors.vllm.agent_connection import AgentConnection
from kvpool.connectors.vllm.layerwise_loads import LayerwiseLoads
from kvpool.core.tracing import TraceParent, Tracer
from kvpool.tracing.provider import tracer_with
from tests.fixtures.patience import PATIENCE_S
from tests.unit.connectors.test_vllm_agent_connection import NOWHERE, a_plan
from tests.unit.connectors.test_vllm_layerwise_loads import JOB, Ticket
from tests.unit.connectors.test_vllm_worker import Pool
from tests.unit.connectors.test_vllm_worker import World as WorkerWorld
from tests.unit.connectors.vllm_fakes import FakeConnection, FakePool, a_request
from tests.unit.connectors.vllm_worlds import BLOCKS, World

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
HEADERS = {"traceparent": f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01", "tracestate": "vendor=1"}
CAME = TraceParent(HEADERS["traceparent"], "vendor=1")


def test_a_requests_trace_goes_with_its_lookup_its_load_and_its_store() -> None:
    world = World(FakePool(3))
    request = a_request(120, trace_headers=HEADERS)
    (load,) = world.load(request).loads
    request.num_computed_tokens = 119
    world.ended(world.build(), loaded_chunks=3)
    world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    assert (world.connection.traces, load.trace) == ([CAME], CAME)

    other = World(FakePool(0))
    request = a_request(120, trace_headers=HEADERS)
    other.match(request)
    other.side.reset_cache()
    assert other.side.get_num_new_matched_tokens(request, 0) == 0
    request.num_computed_tokens = 119
    other.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    (store,) = other.build().stores
    assert (other.connection.traces, store.trace) == ([CAME, CAME], CAME)


@pytest.mark.parametrize("headers", [None, {}, {"tracestate": "vendor=1"}])
def test_a_request_without_a_trace_has_none(headers: dict[str, str] | None) -> None:
    world = World(FakePool(3))
    (load,) = world.load(a_request(120, trace_headers=headers)).loads
    assert (world.connection.traces, load.trace) == ([None], None)


def test_a_worker_begins_loads_and_stores_within_the_trace() -> None:
    world = WorkerWorld(Pool())
    world.load(trace=CAME)
    world.store(trace=CAME)
    assert world.connection.traces == [CAME, CAME]

    connection = FakeConnection(None)
    layer_loads = LayerwiseLoads(connection, lambda *end: None)  # type: ignore[arg-type]
    layer_loads.begin(replace(JOB, trace=CAME), Ticket)  # type: ignore[arg-type]
    assert connection.traces[0] == CAME


class Traced:
    """A connection whose client traces."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer: Tracer = tracer_with("test", SimpleSpanProcessor(self.exporter))
        config = ClientConfig(
            agent_endpoint=NOWHERE.agent_endpoint, connect_timeout_s=NOWHERE.connect_timeout_s, tracer=self.tracer
        )
        self.connection = AgentConnection(lambda: [a_plan()], config)

    def span_of_work(self, trace: TraceParent | None) -> Any:
        """The span of work that was begun with a trace, and that is asked of the pool as a match is."""

        async def work() -> None:
            with self.tracer.request("kvpool.match"):
                pass

        self.exporter.clear()
        self.connection.start(work, trace).result(PATIENCE_S)
        (span,) = self.exporter.get_finished_spans()
        return span


def test_the_spans_of_work_are_children_of_the_requests_span() -> None:
    traced = Traced()
    try:
        span = traced.span_of_work(CAME)
        assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, SPAN_ID)
        assert span.context.trace_state["vendor"] == "1"
        assert traced.span_of_work(None).parent is None, "a request's trace does not stay behind"
        for nonsense in ("", "00-nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 10_000, "\ud800" * 60):
            assert traced.span_of_work(TraceParent(nonsense, "=" * 100)).parent is None
    finally:
        traced.connection.close()


def test_without_a_trace_nothing_is_done_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = AgentConnection(lambda: [a_plan()], NOWHERE)
    started: list[Any] = []
    try:

        async def work() -> None: ...

        with monkeypatch.context() as patch:
            patch.setattr(BackgroundLoop, "start", lambda loop, work: started.append(work))
            connection.start(work)
        assert started == [work], "what is started is the work itself"
    finally:
        connection.close()
