"""Whether this process traces: decided once, by OpenTelemetry's environment variables, without importing it if not."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from kvpool.core.tracing import NO_TRACER, Tracer

if TYPE_CHECKING:
    from kvpool.tracing.export import CountSpans

_log = logging.getLogger(__name__)

_CLIENT: Final = "kvpool-client"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXTRA: Final = "install kvpool[tracing]"


def tracing_wanted(environment: Mapping[str, str]) -> bool:
    """Whether the variables ask for traces: an exporter is named, or else an endpoint of one."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter:
        return exporter != "none"
    return any(environment.get(name, "").strip() for name in _ENDPOINTS)


def open_tracer(service: str, environment: Mapping[str, str], count: CountSpans | None = None) -> Tracer:
    """The tracer that the environment asks for; `close` it in the end.

    service: its name unless the environment gives one. Trouble with tracing is no reason not to serve: it is logged,
    and nothing is traced.
    """
    if not tracing_wanted(environment):
        return NO_TRACER
    try:
        from kvpool.tracing.provider import tracer_of

        return tracer_of(service, environment, count or (lambda fate, span_count: None))
    except ImportError as error:
        _log.warning("the environment asks for traces, but OpenTelemetry is not here (%s): %s", error, _EXTRA)
    except ValueError as error:
        _log.warning("nothing is traced: %s", error)
    return NO_TRACER


class _ProcessTracer:
    """The one of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tracer: Tracer | None = None
        self._pid = 0

    def get(self, make: Callable[[], Tracer]) -> Tracer:
        with self._lock:
            if self._tracer is None or self._pid != os.getpid():  # the thread that exports is not forked
                self._tracer, self._pid = make(), os.getpid()
            return self._tracer


_process: Final = _ProcessTracer()


def process_tracer() -> Tracer:
    """The tracer of clients in this process that were given none: that of the engine's own OpenTelemetry if it has set
    one up, else one of our own if the environment asks for traces, else none."""
    if not tracing_wanted(os.environ) and "opentelemetry.sdk.trace" not in sys.modules:
        return NO_TRACER
    return _engines_own() or _process.get(lambda: open_tracer(_CLIENT, os.environ))


def _engines_own() -> Tracer | None:
    if "opentelemetry.sdk.trace" not in sys.modules or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    from kvpool.tracing.provider import engines_own_tracer

    return engines_own_tracer()
