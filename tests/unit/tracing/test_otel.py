"""What travels between processes, and whose child, link or root a span is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvpool.client.sync import BackgroundLoop
from kvpool.core.errors import ArenaFull
from kvpool.core.tracing import NO_SPAN, NO_TRACER, SpanKind, Tracer
from kvpool.tracing.provider import tracer_with
from kvpool.v1 import index_pb2

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ENGINES = TracerProvider(shutdown_on_exit=False).get_tracer("engine")
LONG = "01" + PARENT[2:] + "-" + "a" * 1_000_000  # of a later version, which may say more


class Recorded:
    """A tracer and what it recorded."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer: Tracer = tracer_with("test", SimpleSpanProcessor(self._exporter))

    def span(self, name: str) -> Any:
        return next(span for span in self._exporter.get_finished_spans() if span.name == name)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]


def test_a_message_carries_the_context_to_the_other_side() -> None:
    here, there = Recorded(), Recorded()
    message = index_pb2.MatchStreamRequest()
    with here.tracer.request("ask", kind=SpanKind.CLIENT):
        here.tracer.stamp(message)
        assert dict(here.tracer.metadata()) == {"traceparent": message.trace.traceparent}
    sent = index_pb2.MatchStreamRequest.FromString(message.SerializeToString())
    with there.tracer.request("answer", sent.trace):
        pass
    asked, answered = here.span("ask"), there.span("answer")
    assert answered.context.trace_id == asked.context.trace_id
    assert answered.parent.span_id == asked.context.span_id


def test_tracestate_goes_along() -> None:
    recorded, message = Recorded(), index_pb2.MatchStreamRequest()
    carried = index_pb2.MatchStreamRequest()
    carried.trace.traceparent, carried.trace.tracestate = PARENT, "vendor=1"
    with recorded.tracer.request("one", carried.trace):
        recorded.tracer.stamp(message)
    assert message.trace.tracestate == "vendor=1"


def test_tracestate_goes_along_with_work_that_requests_share() -> None:
    recorded, message = Recorded(), index_pb2.MatchStreamRequest()
    carried = index_pb2.MatchStreamRequest()
    carried.trace.traceparent, carried.trace.tracestate = PARENT, "vendor=1"
    causes: list[object | None] = []
    for trace_of in (carried.trace, None):
        with recorded.tracer.request("one", trace_of):
            causes.append(recorded.tracer.here())
    with recorded.tracer.part_of(causes, "shared"):
        recorded.tracer.stamp(message)
    assert len(recorded.span("shared").links) == 1
    assert message.trace.tracestate == "vendor=1"


@pytest.mark.parametrize(
    "parent", ["", "x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "zz" + PARENT[2:], PARENT[:-1], "\u00e9" * 55, LONG]
)
def test_what_cannot_be_read_begins_a_trace_and_is_no_error(parent: str, caplog: pytest.LogCaptureFixture) -> None:
    recorded, message = Recorded(), index_pb2.MatchStreamRequest()
    message.trace.traceparent = parent
    with recorded.tracer.request("other", kind=SpanKind.CLIENT), recorded.tracer.request("mine", message.trace):
        pass
    assert recorded.span("mine").parent is None
    assert not caplog.records, "or each request of a hostile client would write a line"


@pytest.mark.parametrize(
    "state",
    [
        ",".join(f"v{at}={'x' * 100}" for at in range(30)),
        ",".join(f"v{at}=x" for at in range(33)),
        "no member",
        "vendor=\u00e9",
        "vendor=1\nlevel=error",
        "a=1,b",
        "0a=1",
        "a= ",
    ],
)
def test_a_tracestate_that_cannot_be_read_is_left_out_and_the_trace_goes_on(
    state: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorded, message, onward = Recorded(), index_pb2.MatchStreamRequest(), index_pb2.MatchStreamRequest()
    message.trace.traceparent, message.trace.tracestate = PARENT, state
    with recorded.tracer.request("mine", message.trace):
        recorded.tracer.stamp(onward)
    assert onward.trace.traceparent.startswith(PARENT[:35])
    assert not onward.trace.tracestate
    assert not caplog.records


def test_who_is_not_sampled_says_so_to_the_next() -> None:
    recorded, message, onward = Recorded(), index_pb2.MatchStreamRequest(), index_pb2.MatchStreamRequest()
    message.trace.traceparent = PARENT[:-2] + "00"
    with recorded.tracer.request("mine", message.trace) as span:
        assert not span.recording
        recorded.tracer.stamp(onward)
    assert onward.trace.traceparent.startswith(PARENT[:35])
    assert onward.trace.traceparent.endswith("-00")
    assert not recorded.names


def test_parts_need_a_request_and_links_a_cause() -> None:
    tracer = Recorded().tracer
    assert tracer.part("part") is NO_SPAN
    assert tracer.part_of([None], "part") is NO_SPAN
    assert tracer.linked("linked", [None]) is NO_SPAN
    assert tracer.here() is None
    assert tracer.metadata() == ()
    assert tracer.log_fields() == {}


def test_shared_work_is_a_part_of_one_request_and_linked_to_the_others() -> None:
    recorded = Recorded()
    causes: list[object | None] = [None]
    for name in ("a", "b"):
        with recorded.tracer.request(name):
            causes.append(recorded.tracer.here())
    with recorded.tracer.part_of([*causes, causes[1]], "shared"):
        pass
    with recorded.tracer.linked("later", causes):
        pass
    first, second = (recorded.span(name).context.span_id for name in ("a", "b"))
    assert recorded.span("shared").parent.span_id == first
    assert [link.context.span_id for link in recorded.span("shared").links] == [second]
    assert recorded.span("later").parent is None
    assert [link.context.span_id for link in recorded.span("later").links] == [first, second]


def test_linked_work_is_kept_with_what_it_is_linked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    recorded, message = Recorded(), index_pb2.MatchStreamRequest()
    message.trace.traceparent = PARENT
    with recorded.tracer.request("sampled by its caller", message.trace):
        cause = recorded.tracer.here()
    with recorded.tracer.request("a root, left out"):
        left_out = recorded.tracer.here()
    with recorded.tracer.linked("linked", [left_out, cause]):
        pass
    assert recorded.tracer.linked("nothing", [left_out]) is NO_SPAN
    assert recorded.names == ["sampled by its caller", "linked"]
    assert len(recorded.span("linked").links) == 1


def test_errors_are_identified_by_their_reason_alone() -> None:
    recorded = Recorded()
    with pytest.raises(ArenaFull), recorded.tracer.request("full"):
        raise ArenaFull("page 0123 of /data/secret")
    span = recorded.span("full")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "ARENA_FULL"
    assert not span.status.description
    assert not span.events
    later = recorded.tracer.request("ended elsewhere")
    with pytest.raises(ArenaFull), later.current():
        raise ArenaFull("page 0123 of /data/secret")
    later.end()
    span = recorded.span("ended elsewhere")
    assert not span.status.description and not span.events


def test_a_batch_of_many_requests_is_linked_to_some_of_them() -> None:
    recorded, causes = Recorded(), list[object | None]()
    for _ in range(40):
        with recorded.tracer.request("one"):
            causes.append(recorded.tracer.here())
    with recorded.tracer.linked("batch", causes):
        pass
    assert len(recorded.span("batch").links) == 32


async def test_an_engines_own_span_is_continued_into_tasks_and_left_as_it_was() -> None:
    recorded = Recorded()
    with ENGINES.start_as_current_span("engine") as engine:
        await asyncio.create_task(_one(recorded.tracer))
        assert trace.get_current_span() is engine
    assert recorded.span("client").parent.span_id == engine.get_span_context().span_id


def test_the_synchronous_client_continues_the_span_of_the_thread_that_calls_it() -> None:
    recorded, loop = Recorded(), BackgroundLoop()
    try:
        with ENGINES.start_as_current_span("engine") as engine:
            loop.run(lambda: _one(recorded.tracer))
        loop.run(lambda: _one(recorded.tracer))
    finally:
        loop.stop()
    first, second = (span for span in recorded.spans if span.name == "client")
    assert first.parent is not None and first.parent.span_id == engine.get_span_context().span_id
    assert second.parent is None


async def _one(tracer: Tracer) -> None:
    with tracer.request("client", kind=SpanKind.CLIENT):
        await asyncio.sleep(0)


def test_without_tracing_nothing_is_done() -> None:
    message = index_pb2.MatchStreamRequest()
    with NO_TRACER.request("a", message.trace) as span, span.current():
        span.set({"a": 1})
        span.fail("x")
        NO_TRACER.stamp(message)
    span.end()
    assert span is NO_SPAN
    assert not message.HasField("trace")
    assert (NO_TRACER.here(), NO_TRACER.metadata(), NO_TRACER.log_fields()) == (None, (), {})
    NO_TRACER.close()
