"""The span of a store ends with the last of its requests, whenever that ends, and has the results of all."""

from __future__ import annotations

import asyncio
from typing import Any

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvpool.client.engine_requests import StoreRequest
from kvpool.client.request_spans import end_with_stores, request_span
from kvpool.core.errors import ServiceUnavailable, Stopped
from kvpool.core.tracing import NO_SPAN, NO_TRACER
from kvpool.tracing.provider import tracer_with
from kvpool.v1 import gpuagent_pb2


def handle() -> StoreRequest:
    return StoreRequest(lambda message: None, range(2), None)


def done(stored_chunks: int) -> gpuagent_pb2.EngineResponse:
    return gpuagent_pb2.EngineResponse(store_done=gpuagent_pb2.EngineStoreDone(stored_chunks=stored_chunks))


class Spans:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = tracer_with("test", SimpleSpanProcessor(self._exporter))

    async def ended(self) -> list[Any]:
        await asyncio.sleep(0)
        return list(self._exporter.get_finished_spans())


async def test_requests_that_ended_before_and_after_the_store_was_begun() -> None:
    spans, early, late = Spans(), handle(), handle()
    early.deliver(done(2))
    end_with_stores(request_span(spans.tracer, "store", b"k" * 16, 4), [early, late], None)
    assert await spans.ended() == []
    late.deliver(done(1))
    (span,) = await spans.ended()
    assert span.name == "kvpool.store"
    assert span.attributes["kvpool.chunks.served"] == 3
    assert "error.type" not in span.attributes


async def test_a_broken_session_and_what_was_not_begun() -> None:
    spans, broken = Spans(), handle()
    end_with_stores(request_span(spans.tracer, "store", b"k" * 16, 2), [broken], None)
    broken.fail(ServiceUnavailable("gone"))
    end_with_stores(request_span(spans.tracer, "store", b"k" * 16, 2), [], Stopped("not begun"))
    assert {span.attributes["error.type"] for span in await spans.ended()} == {"SERVICE_UNAVAILABLE", "STOPPED"}


async def test_without_tracing_nothing_is_asked_of_the_handles() -> None:
    assert request_span(NO_TRACER, "store", b"k" * 16, 2) is NO_SPAN
    end_with_stores(NO_SPAN, [handle()], None)
