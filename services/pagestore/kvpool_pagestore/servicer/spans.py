"""Attributes and log lines of the requests of a session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvpool.core.errors import KvPoolError
from kvpool.core.spans import SpanAnswer
from kvpool.core.tracing import BYTES, NO_SPAN, PAGES, REQUEST_ID, SERVED_PAGES, Span, Tracer, rpc_attributes
from kvpool.v1 import pagestore_pb2 as pb
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.engine.fetch import Acquired, Source
from kvpool_pagestore.engine.pages import ReserveAnswer
from kvpool_server.logs import fields

_log = logging.getLogger(__name__)

_SOURCES = {
    pb.SOURCE_STAGING: Source.STAGING.value,
    pb.SOURCE_DISK: Source.DISK.value,
    pb.SOURCE_REMOTE: Source.REMOTE.value,
}
_RPC = rpc_attributes("PageStoreService", "Session")


def request_span(tracer: Tracer, request: pb.SessionRequest) -> Span:
    """The pagestore's span of a reserve, commit or acquire."""
    if not tracer.recording:
        return NO_SPAN
    attributes = {**_RPC, REQUEST_ID: request.request_id}
    kind = str(request.WhichOneof("kind")).removesuffix("_span")  # however the pages are named
    return tracer.request(f"pagestore.{kind}", request.trace, attributes=attributes)


def note_reserved(span: Span, answers: Sequence[ReserveAnswer]) -> None:
    """How a reserve ended; the rest are there already, or refused."""
    if span.recording:
        granted = sum(isinstance(answer, Grant) for answer in answers)
        span.set({PAGES: len(answers), SERVED_PAGES: granted})
        _note_errors(span, answers)
        _log.debug("reserve ended", extra=fields(pages=len(answers), served_pages=granted))


def note_span_reserved(span: Span, answer: SpanAnswer) -> None:
    """The same for a span of pages."""
    if span.recording:
        failed_count = len(answer.failed)
        page_count = answer.granted.count + answer.exists.size + answer.pending.size + failed_count
        span.set({PAGES: page_count, SERVED_PAGES: answer.granted.count})
        _note_errors(span, [error for _, error in answer.failed])
        _log.debug("reserve ended", extra=fields(pages=page_count, served_pages=answer.granted.count))


def note_committed(span: Span, errors: Sequence[KvPoolError | None]) -> None:
    """How a commit ended."""
    if span.recording:
        span.set({PAGES: len(errors), SERVED_PAGES: errors.count(None)})
        _note_errors(span, errors)
        _log.debug("commit ended", extra=fields(pages=len(errors), served_pages=errors.count(None)))


def _note_errors(span: Span, answers: Sequence[object]) -> None:
    error = next((answer for answer in answers if isinstance(answer, KvPoolError)), None)
    if error is not None:
        span.fail(error)


class AcquireCounts:
    """What became of an acquire's items, which settle one after another; for its span and the log."""

    def __init__(self, span: Span, page_count: int) -> None:
        self._span = span
        self._pages: dict[str, int] = {}  # by where they came from, misses as "miss"
        self._size_bytes = 0
        span.set({PAGES: page_count})

    def note(self, acquired: Sequence[Acquired]) -> None:
        """Some items are decided."""
        if not self._span.recording:
            return
        for one in acquired:
            self._count(one.source.value if one.source is not None else "miss")
            if one.grant is not None:
                self._size_bytes += one.grant.slot.page.page_bytes
            if one.error is not None:
                self._span.fail(one.error)

    def note_span(self, answer: SpanAnswer, page_bytes: Callable[[int], int]) -> None:
        """The same for pages of a span. page_bytes: of a page, by its number."""
        if not self._span.recording:
            return
        for page, source in zip(answer.granted.pages.tolist(), answer.granted.sources.tolist(), strict=True):
            self._count(_SOURCES[source])
            self._size_bytes += page_bytes(page)
        for _, error in answer.failed:
            self._count("miss")
            if error is not None:
                self._span.fail(error)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Write the counts to the span when the block ends, however it ends."""
        try:
            yield
        finally:
            if self._span.recording:
                hit_count = sum(count for source, count in self._pages.items() if source != "miss")
                by_source = {f"kvpool.pages.{source}": count for source, count in self._pages.items()}
                self._span.set({**by_source, SERVED_PAGES: hit_count, BYTES: self._size_bytes})
                _log.debug("acquire ended", extra=fields(pages=sum(self._pages.values()), served_pages=hit_count))

    def _count(self, source: str) -> None:
        self._pages[source] = self._pages.get(source, 0) + 1
