"""`kvpool replay`: traces, capacities, results."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kvpool.cli.main import main
from kvpool.cli.output import CommandFailed
from kvpool.cli.replay_trace import read_trace

LINE = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}


def trace_file(directory: Path, *requests: list[int]) -> Path:
    file = directory / "trace.jsonl"
    file.write_text("".join(json.dumps({**LINE, "hash_ids": blocks}) + "\n" for blocks in requests))
    return file


def test_a_replay_without_a_cluster_is_run_by_the_benchmark(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = trace_file(tmp_path, [1, 2, 3], [1, 2, 4], [1, 2, 3])
    assert main(["replay", str(file), "--policy", "lru", "--capacity", "100%", "--json", "-"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["hits"], document["policy"], document["capacity_blocks"]) == (5, "lru", 4)


def test_a_replay_without_a_cluster_wants_the_source_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["replay", str(trace_file(tmp_path, [1])), "--capacity", "5"]) == 1
    assert "source checkout" in capsys.readouterr().err


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
    for arguments, complaint in (
        ([], "say --capacity"),
        (["--capacity", "5", "--limit", "-1"], "must be >= 0"),
        (["--live", "--capacity", "5"], "leave out --capacity"),
        (["--live", "--index", "127.0.0.1:1"], "needs an agent"),
    ):
        assert main(["replay", file, *arguments]) == 1
        assert complaint in capsys.readouterr().err


def test_a_limit_and_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{json.dumps(LINE)}\n" * 3))
    assert read_trace("-", limit=2).requests == [[1, 2], [1, 2]]
