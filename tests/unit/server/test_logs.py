"""One record is one line, whatever is in it."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvpool_server.logs import LogFormat, LogLevel, configure_logs, fields

log = logging.getLogger("tests.logs")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where records go; the root logger is put back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_logfmt_quotes_what_needs_it(stream: io.StringIO) -> None:
    configure_logs(service="index", stream=stream)
    log.info("node up", extra=fields(node_id="n 1", chunk=b"\x01\xff", empty="", text='say "x"\nforged=1', count=3))
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert 'level=info service=index msg="node up" node_id="n 1" chunk=01ff empty=""' in line
    assert r'text="say \"x\"\nforged=1" count=3' in line


def test_json_lines_with_traceback(stream: io.StringIO) -> None:
    configure_logs(service="index", log_format=LogFormat.JSON, stream=stream)
    try:
        raise OSError("disk on fire")
    except OSError:
        log.exception("write failed", extra=fields(msg="posing", size_bytes=4))
    record = json.loads(stream.getvalue())
    assert record["msg"] == "write failed"
    assert record["field_msg"] == "posing"
    assert record["size_bytes"] == 4
    assert "disk on fire" in record["error"]


def test_bytes_are_hexadecimal_in_both_formats(stream: io.StringIO) -> None:
    for log_format in LogFormat:
        configure_logs(service="index", log_format=log_format, stream=stream)
        log.info("node up", extra=fields(node_id=b"o\xd3"))
    first, second = stream.getvalue().splitlines()
    assert "6fd3" in first and "6fd3" in second, (first, second)


def test_level(stream: io.StringIO) -> None:
    configure_logs(service="index", level=LogLevel.WARNING, stream=stream)
    log.info("quiet")
    log.warning("loud")
    assert "quiet" not in stream.getvalue() and "loud" in stream.getvalue()
