"""kvpool.core.tracing on top of OpenTelemetry's API.

The current span is OpenTelemetry's own, shared with other tracing code of the process, such as an engine's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Token
from types import TracebackType
from typing import Any, Final, Self

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvpool.core.errors import KvPoolError
from kvpool.core.tracing import NO_SPAN, Attributes, CarriedContext, Span, SpanKind, Tracer

_KINDS: Final = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
    SpanKind.SERVER: trace.SpanKind.SERVER,
}
_FAILED: Final = trace.Status(trace.StatusCode.ERROR)
_TRACEPARENT_CHARS: Final = range(55, 257)  # that of a later version of W3C's format may be longer
_TRACESTATE_CHARS_MAX: Final = 512
_TRACESTATE_MEMBERS_MAX: Final = 32
_TRACESTATE_MEMBER: Final = re.compile(
    r"[ \t]*(?:(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])?[ \t]*"
)
_LINKS_MAX: Final = 32  # of one span; the batches that have links are larger
_W3C: Final = TraceContextTextMapPropagator()


class OtelSpan(Span):
    """A span of OpenTelemetry."""

    __slots__ = ("_span", "_token", "recording")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._token: Token[Context] | None = None
        self.recording = span.is_recording()

    def set(self, attributes: Attributes) -> None:
        if self.recording:
            self._span.set_attributes(attributes)

    def fail(self, error: KvPoolError | str) -> None:
        if self.recording:
            self._span.set_attribute("error.type", error if isinstance(error, str) else error.reason)
            self._span.set_status(_FAILED)

    def current(self) -> AbstractContextManager[object]:
        return trace.use_span(self._span, record_exception=False, set_status_on_exception=False)

    def end(self) -> None:
        if self.recording:
            self.recording = False
            self._span.end()

    def __enter__(self) -> Self:
        self._token = otel_context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        token, self._token = self._token, None
        if token is not None:
            otel_context.detach(token)
        if error is not None:
            self.fail(error if isinstance(error, KvPoolError) else type(error).__name__)
        self.end()


class OtelTracer(Tracer):
    """A Tracer that records with a tracer of OpenTelemetry. Safe to use from any thread."""

    __slots__ = ("_close", "_tracer", "recording")

    def __init__(self, tracer: trace.Tracer, close: Callable[[], None] = lambda: None) -> None:
        """close: sends what is left."""
        self._tracer, self._close = tracer, close
        self.recording = True

    def request(
        self,
        name: str,
        carried: CarriedContext | None = None,
        *,
        kind: SpanKind = SpanKind.SERVER,
        attributes: Attributes | None = None,
    ) -> Span:
        context = None if carried is None else _carried_context(carried)
        if context is None and carried is not None:
            context = Context()  # the current span is that of another request, or of the code that opened the stream
        return self._start(name, context, kind, attributes)

    def within(self, carried: CarriedContext) -> AbstractContextManager[object]:
        return _attached(_carried_context(carried) or Context())

    def part(self, name: str, *, kind: SpanKind = SpanKind.INTERNAL, attributes: Attributes | None = None) -> Span:
        if not trace.get_current_span().get_span_context().is_valid:
            return NO_SPAN
        return self._start(name, None, kind, attributes)

    def part_of(self, causes: Iterable[object | None], name: str, *, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        contexts = _distinct(causes)
        if not contexts:
            return NO_SPAN
        # One that is recorded, if there is one: who is not sampled loses nothing by it.
        parent = next((one for one in contexts if one.trace_flags.sampled), contexts[0])
        links = [trace.Link(one) for one in contexts if one is not parent and one.trace_flags.sampled]
        return self._start(
            name, trace.set_span_in_context(trace.NonRecordingSpan(parent), Context()), kind, None, links
        )

    def linked(self, name: str, causes: Iterable[object | None]) -> Span:
        links = [trace.Link(cause) for cause in _distinct(causes) if cause.trace_flags.sampled]
        return self._start(name, Context(), SpanKind.INTERNAL, None, links) if links else NO_SPAN

    def here(self) -> object | None:
        context = trace.get_current_span().get_span_context()
        return context if context.is_valid else None

    def stamp(self, message: Any) -> None:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier)
        if carrier:
            message.trace.traceparent = carrier["traceparent"]
            message.trace.tracestate = carrier.get("tracestate", "")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier)
        return tuple(carrier.items())

    def log_fields(self) -> Mapping[str, str]:
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return {}
        return {"trace_id": trace.format_trace_id(context.trace_id), "span_id": trace.format_span_id(context.span_id)}

    def close(self) -> None:
        self._close()

    def _start(
        self,
        name: str,
        context: Context | None,
        kind: SpanKind,
        attributes: Attributes | None,
        links: Sequence[trace.Link] = (),
    ) -> Span:
        return OtelSpan(
            self._tracer.start_span(
                name,
                context,
                kind=_KINDS[kind],
                attributes=attributes,
                links=links[:_LINKS_MAX],
                record_exception=False,
                set_status_on_exception=False,
            )
        )


@contextmanager
def _attached(context: Context) -> Iterator[None]:
    token = otel_context.attach(context)
    try:
        yield
    finally:
        otel_context.detach(token)


def _distinct(causes: Iterable[object | None]) -> list[trace.SpanContext]:
    return list({cause.span_id: cause for cause in causes if isinstance(cause, trace.SpanContext)}.values())


def _is_tracestate(text: str) -> bool:
    """Whether OpenTelemetry would take it: of all else it writes a line, and a hostile peer could fill the log."""
    if not 0 < len(text) <= _TRACESTATE_CHARS_MAX:
        return False
    members = text.split(",")
    return len(members) <= _TRACESTATE_MEMBERS_MAX and all(map(_TRACESTATE_MEMBER.fullmatch, members))


def _carried_context(carried: CarriedContext) -> Context | None:
    """None if nothing came with the message, or nothing that can be read."""
    parent = carried.traceparent
    if len(parent) not in _TRACEPARENT_CHARS:
        return None
    carrier = {"traceparent": parent}
    if _is_tracestate(carried.tracestate):
        carrier["tracestate"] = carried.tracestate
    context = _W3C.extract(carrier, Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None
