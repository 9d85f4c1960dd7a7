"""Structured logs on stderr: logfmt for people and JSON lines for collectors."""

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import Enum
from typing import Final, TextIO

from kvpool.core.tracing import NO_TRACER, Tracer

_FIELDS: Final = "kvpool_fields"

_request_id: ContextVar[int] = ContextVar("kvpool_request_id", default=0)


def note_request(request_id: int) -> None:
    """Have records of this task, and of tasks that it starts, carry `request_id` until the next one is noted; 0: none.

    request_id: of the message on its stream, as the peer numbers it.
    """
    _request_id.set(request_id)


def show_trace_of(tracer: Tracer) -> None:
    """Have records carry trace_id and span_id of the tracer's current span, if there is one."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _Formatter):
            handler.formatter.tracer = tracer


class LogFormat(Enum):
    """How a record is written."""

    LOGFMT = "logfmt"
    JSON = "json"


class LogLevel(Enum):
    """The least severe level that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def fields(**values: object) -> dict[str, object]:
    """Structured values of one record: `log.info("node up", extra=fields(node_id=node_id))`."""
    return {_FIELDS: values}


def configure_logs(
    *,
    service: str,
    level: LogLevel = LogLevel.INFO,
    log_format: LogFormat = LogFormat.LOGFMT,
    stream: TextIO | None = None,
) -> None:
    """Send every record of this process to `stream` (default stderr). Replaces what was configured before."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_Formatter(service, log_format))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.value.upper())
    # grpc.aio logs every event that it polls, which at level debug would hide everything else.
    logging.getLogger("grpc").setLevel(max(logging.INFO, root.level))
    logging.captureWarnings(True)


class _Formatter(logging.Formatter):
    def __init__(self, service: str, log_format: LogFormat) -> None:
        super().__init__()
        self._service = service
        self._log_format = log_format
        self.tracer = NO_TRACER

    def format(self, record: logging.LogRecord) -> str:
        pairs: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "msg": record.getMessage(),
        }
        if request_id := _request_id.get():
            pairs["request_id"] = request_id
        pairs |= self.tracer.log_fields()
        extra = getattr(record, _FIELDS, None)
        if isinstance(extra, Mapping):
            # A field may not pose as one of the fixed ones.
            pairs |= {(f"field_{name}" if name in pairs else name): value for name, value in extra.items()}
        pairs["logger"] = record.name
        if record.exc_info:
            pairs["error"] = self.formatException(record.exc_info)
        if self._log_format is LogFormat.JSON:
            return json.dumps(pairs, default=_text, ensure_ascii=False)
        return " ".join(f"{name}={_logfmt(value)}" for name, value in pairs.items())


def _text(value: object) -> str:
    """Ids and hashes are bytes."""
    return value.hex() if isinstance(value, bytes) else str(value)


def _logfmt(value: object) -> str:
    """One value on one line: quoted where its end would not be clear."""
    text = _text(value)
    if text and text.isprintable() and not any(char in ' "=' for char in text):
        return text
    return json.dumps(text, ensure_ascii=False)
