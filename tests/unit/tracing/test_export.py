"""A collector that is slow, dead or gone costs spans that are counted, never the time of the code that ends them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvpool.testing import eventually_sync
from kvpool.tracing import export
from kvpool.tracing.export import BoundedExport, ExportLimits, SpanFate
from tests.fixtures.patience import PATIENCE_S


class ScriptedExporter(SpanExporter):
    """Takes batches while `open` is set; waits otherwise."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.result: SpanExportResult | Exception = SpanExportResult.SUCCESS
        self.batches: list[list[str]] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches.append([span.name for span in spans])
        assert self.open.wait(PATIENCE_S)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Fates:
    """Spans by what became of them."""

    def __init__(self) -> None:
        self.counts = Counter[SpanFate]()
        self._lock = threading.Lock()

    def __call__(self, fate: SpanFate, span_count: int) -> None:
        with self._lock:
            self.counts[fate] += span_count


FLUSH_MS = int(1000 * PATIENCE_S)


@contextmanager
def provider(exporter: ScriptedExporter, fates: Fates, **limits: float) -> Iterator[TracerProvider]:
    values = {"queue_spans": 4, "batch_spans": 2, "delay_s": 60.0} | limits
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(BoundedExport(exporter, ExportLimits(**values), fates))  # type: ignore[arg-type]
    with patch.object(export, "_CLOSE_S", PATIENCE_S):
        yield made
        exporter.open.set()
        made.shutdown()


def end_spans(made: TracerProvider, *names: str) -> None:
    tracer = made.get_tracer("test")
    for name in names:
        tracer.start_span(name).end()


def test_full_batches_go_at_once_and_the_rest_when_asked() -> None:
    exporter, fates = ScriptedExporter(), Fates()
    with provider(exporter, fates) as made:
        end_spans(made, "a", "b")
        eventually_sync(lambda: exporter.batches == [["a", "b"]])
        end_spans(made, "c")
        assert made.force_flush(FLUSH_MS)
        assert exporter.batches == [["a", "b"], ["c"]]
    assert fates.counts == {SpanFate.EXPORTED: 3}


def test_a_collector_that_hangs_fills_the_queue_and_the_rest_is_dropped_and_counted() -> None:
    exporter, fates = ScriptedExporter(), Fates()
    exporter.open.clear()
    with provider(exporter, fates) as made:
        end_spans(made, "a", "b")
        eventually_sync(lambda: len(exporter.batches) == 1)
        end_spans(made, *"cdefgh")
        assert fates.counts == {SpanFate.QUEUE_FULL: 2}
        assert not made.force_flush(10)
        exporter.open.set()
        assert made.force_flush(FLUSH_MS)
    assert exporter.batches == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert fates.counts == {SpanFate.EXPORTED: 6, SpanFate.QUEUE_FULL: 2}


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("broken")])
def test_failed_exports_are_counted_and_said_once(
    result: SpanExportResult | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    exporter, fates = ScriptedExporter(), Fates()
    exporter.result = result
    with provider(exporter, fates) as made:
        for _ in range(3):
            end_spans(made, "a", "b")
            assert made.force_flush(FLUSH_MS)
    assert fates.counts == {SpanFate.EXPORT_FAILED: 6}
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "2 spans were dropped: the trace collector cannot be reached or is too slow"
    ]


def test_the_end_sends_what_is_left_and_drops_what_comes_later() -> None:
    exporter, fates = ScriptedExporter(), Fates()
    with provider(exporter, fates) as made:
        end_spans(made, "a")
        late = made.get_tracer("test").start_span("late")
        made.shutdown()
        late.end()
        made.shutdown()
    assert exporter.batches == [["a"]]
    assert fates.counts == {SpanFate.EXPORTED: 1, SpanFate.SHUTDOWN: 1}


def test_limits_come_from_the_variables() -> None:
    variables = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "100",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "200",
        "OTEL_BSP_SCHEDULE_DELAY": "250",
    }
    expected = ExportLimits(queue_spans=100, batch_spans=100, delay_s=0.25)
    assert ExportLimits.from_environment(variables) == expected
    assert ExportLimits.from_environment({"OTEL_BSP_MAX_QUEUE_SIZE": ""}) == ExportLimits()
    for wrong in ("0", "-1", "many", "1.5"):
        with pytest.raises(ValueError, match="OTEL_BSP_SCHEDULE_DELAY"):
            ExportLimits.from_environment({"OTEL_BSP_SCHEDULE_DELAY": wrong})
