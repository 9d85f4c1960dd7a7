"""Spans of what an engine asks of its pool: match, load, store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpool.client.engine_items import StoreResult, TierTokens
from kvpool.core.errors import KvPoolError
from kvpool.core.tracing import (
    CHUNKS,
    FAILED_CHUNKS,
    KEYSPACE,
    NO_SPAN,
    OUTCOME,
    SERVED_CHUNKS,
    Span,
    SpanKind,
    Tracer,
    rpc_attributes,
)

if TYPE_CHECKING:
    from kvpool.client.engine_requests import StoreRequest

_RPC = rpc_attributes("GpuAgentService", "EngineSession")


def request_span(tracer: Tracer, operation: str, keyspace: bytes, chunk_count: int) -> Span:
    """A span of one request: part of the engine's own span if one is current, else the first of a trace."""
    if not tracer.recording:
        return NO_SPAN
    attributes = {**_RPC, KEYSPACE: keyspace.hex(), CHUNKS: chunk_count}
    return tracer.request(f"kvpool.{operation}", kind=SpanKind.CLIENT, attributes=attributes)


def note_matched(span: Span, served_chunks: int, chunk_count: int, error: KvPoolError | None) -> None:
    """How a match, or a load, ended."""
    if not span.recording:
        return
    outcome = "hit" if served_chunks == chunk_count else "partial" if served_chunks else "miss"
    span.set({SERVED_CHUNKS: served_chunks, OUTCOME: outcome})
    if error is not None:
        span.fail(error)


def note_loaded(
    span: Span, served_chunks: int, chunk_count: int, error: KvPoolError | None, tokens: TierTokens
) -> None:
    """How a load ended, and where its tokens came from."""
    note_matched(span, served_chunks, chunk_count, error)
    if span.recording:
        by_tier = {"staging": tokens.staging, "disk": tokens.disk, "remote": tokens.remote, "gpu": tokens.gpu}
        span.set({f"kvpool.tokens.{tier}": count for tier, count in by_tier.items()})


def end_with_stores(span: Span, requests: Sequence[StoreRequest], error: KvPoolError | None) -> None:
    """End the span of a store when the last of its requests ends: its caller does not wait for that.

    error: why the rest was not begun.
    """
    if not span.recording:
        return
    if error is not None:
        span.fail(error)
    outcomes: list[StoreResult] = []
    left_count = len(requests)

    def ended(outcome: StoreResult | BaseException) -> None:
        nonlocal left_count
        left_count -= 1
        if isinstance(outcome, StoreResult):
            outcomes.append(outcome)
        elif isinstance(outcome, KvPoolError):
            span.fail(outcome)
        if not left_count:
            _end_store(span, outcomes)

    for request in requests:
        request.when_done(ended)
    if not requests:
        _end_store(span, outcomes)


def _end_store(span: Span, outcomes: Sequence[StoreResult]) -> None:
    span.set(
        {
            SERVED_CHUNKS: sum(outcome.stored_chunks for outcome in outcomes),
            "kvpool.chunks.deduplicated": sum(outcome.deduplicated_chunks for outcome in outcomes),
            FAILED_CHUNKS: sum(len(outcome.failed_chunks) for outcome in outcomes),
        }
    )
    span.end()
