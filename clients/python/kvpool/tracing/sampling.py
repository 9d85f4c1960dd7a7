"""Sampling of work that is linked to requests instead of being a part of one."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes


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
