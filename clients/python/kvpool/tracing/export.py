"""Sending ended spans away: a bounded queue and one thread. A collector that is slow or dead costs spans, never time.

OpenTelemetry's own batch processor does the same but does not report how much it has dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_log = logging.getLogger(__name__)

_WARN_INTERVAL_S: Final = 60.0
_CLOSE_S: Final = 3.0  # for what is left at the end


class SpanFate(Enum):
    """What became of a span that was recorded."""

    EXPORTED = "exported"
    QUEUE_FULL = "queue_full"
    EXPORT_FAILED = "export_failed"
    SHUTDOWN = "shutdown"


CountSpans = Callable[[SpanFate, int], None]
"""Receives the count of spans that were exported or dropped. Called on any thread; must neither block nor raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLimits:
    """Bounds of the queue; the variables are OpenTelemetry's."""

    queue_spans: int = 2048  # OTEL_BSP_MAX_QUEUE_SIZE; further ones are dropped
    batch_spans: int = 512  # OTEL_BSP_MAX_EXPORT_BATCH_SIZE
    delay_s: float = 5.0  # OTEL_BSP_SCHEDULE_DELAY, there in milliseconds: between two batches that are not full

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ExportLimits:
        """Raises ValueError naming the variable that is no number > 0."""
        default = cls()
        queue_spans = _positive(environment, "OTEL_BSP_MAX_QUEUE_SIZE", default.queue_spans)
        batch_spans = _positive(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", default.batch_spans)
        delay_ms = _positive(environment, "OTEL_BSP_SCHEDULE_DELAY", round(default.delay_s * 1e3))
        return cls(queue_spans=queue_spans, batch_spans=min(batch_spans, queue_spans), delay_s=delay_ms / 1e3)


class BoundedExport(SpanProcessor):
    """Hands ended spans to an exporter on a thread of its own."""

    def __init__(
        self, exporter: SpanExporter, limits: ExportLimits, count: CountSpans = lambda fate, span_count: None
    ) -> None:
        self._exporter, self._limits, self._count = exporter, limits, count
        self._queue: deque[ReadableSpan] = deque()  # append and popleft are atomic
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._closing = False
        self._unreported_count = 0
        self._warned_s = float("-inf")
        # A daemon: an exporter that hangs in a dead network must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="trace export", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is kept of running spans."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, if it was sampled and there is room."""
        if not span.context.trace_flags.sampled:
            return
        if self._closing:
            self._count(SpanFate.SHUTDOWN, 1)
        elif len(self._queue) >= self._limits.queue_spans:
            self._unreported_count += 1
            self._count(SpanFate.QUEUE_FULL, 1)
        else:
            self._idle.clear()
            self._queue.append(span)
            if len(self._queue) >= self._limits.batch_spans:
                self._wake.set()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until the queue has been handed over. False if that took too long."""
        ends_at_s = time.monotonic() + timeout_millis / 1e3
        while self._queue or not self._idle.is_set():
            self._wake.set()
            if not self._idle.wait(max(0.0, ends_at_s - time.monotonic())):
                return False
        return True

    def shutdown(self) -> None:
        """Send what is left within a few seconds; the rest is dropped. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        self._exporter.shutdown()
        if left := len(self._queue):
            self._queue.clear()
            self._count(SpanFate.SHUTDOWN, left)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._limits.delay_s)
            self._wake.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._limits.batch_spans))]
            if not self._send(batch) and self._closing:
                break  # the collector is away, and the process waits for us
        if not self._queue:
            self._idle.set()

    def _send(self, batch: list[ReadableSpan]) -> bool:
        try:
            sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:
            _log.debug("spans could not be exported", exc_info=True)
            sent = False
        self._count(SpanFate.EXPORTED if sent else SpanFate.EXPORT_FAILED, len(batch))
        if not sent:
            self._unreported_count += len(batch)
        self._warn()
        return sent

    def _warn(self) -> None:
        """Say what was dropped, at most once a minute."""
        now_s = time.monotonic()
        if not self._unreported_count or now_s - self._warned_s < _WARN_INTERVAL_S:
            return
        dropped, self._unreported_count, self._warned_s = self._unreported_count, 0, now_s
        _log.warning("%d spans were dropped: the trace collector cannot be reached or is too slow", dropped)


def _positive(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{name} must be a whole number > 0, got {text!r}")
    return int(text)
