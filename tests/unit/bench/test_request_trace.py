"""Traces of requests: what is read, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.request_trace import read_trace
from kvpool_cli.errors import CommandFailed

LINE = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}


def trace_file(directory: Path, *requests: list[int]) -> Path:
    file = directory / "trace.jsonl"
    file.write_text("".join(json.dumps({**LINE, "hash_ids": blocks}) + "\n" for blocks in requests))
    return file


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "no JSON"),
        ("[1]", "want a JSON object"),
        ('{"hash_ids": 5}', "hash_ids must be"),
        ('{"input_length": 5}', "hash_ids must be"),
        ('{"hash_ids": [1, "2"]}', "hash_ids must be"),
        ('{"hash_ids": [1, true]}', "hash_ids must be"),
        ('{"hash_ids": [1, 2, 1]}', "twice"),
        ('{"hash_ids": [1], "timestamp": -1}', "timestamp"),
        ('{"hash_ids": [1], "input_length": "x"}', "input_length"),
    ],
)
def test_a_bad_line_is_named(line: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n\n{line}\n")
    with pytest.raises(CommandFailed) as failure:
        read_trace(str(file))
    error = str(failure.value)
    assert f"{file}:3: " in error and complaint in error and "\n" not in error


def test_a_trace_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="cannot be read"):
        read_trace(str(tmp_path / "none"))
    empty = trace_file(tmp_path)
    with pytest.raises(CommandFailed, match="has no requests"):
        read_trace(str(empty))
    empty.write_bytes(b"\xff\xfe\n")
    with pytest.raises(CommandFailed, match="is no text"):
        read_trace(str(empty))


def test_options_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(trace_file(tmp_path, [1]))
    assert main(["replay", file, "--capacity", "5", "--limit", "-1"]) == 1
    assert "must be >= 0" in capsys.readouterr().err
    assert main(["replay-live", file, "--state-dir", str(tmp_path)]) == 1
    assert "no cluster runs" in capsys.readouterr().err


def test_a_limit_and_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{json.dumps(LINE)}\n" * 3))
    assert read_trace("-", limit=2).requests == [[1, 2], [1, 2]]
