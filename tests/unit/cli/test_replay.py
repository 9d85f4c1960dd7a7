"""`kvpool replay`: traces, capacities, results."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kvpool.cli.main import main
from kvpool.cli.output import CommandFailed
from kvpool.cli.replay_trace import blocks_from_text, read_trace

LINE = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}


def trace_file(directory: Path, *requests: list[int]) -> Path:
    file = directory / "trace.jsonl"
    file.write_text("".join(json.dumps({**LINE, "hash_ids": blocks}) + "\n" for blocks in requests))
    return file


@pytest.mark.parametrize("policy", ["default", "chain", "s3-fifo", "lru", "belady"])
def test_the_result_as_json(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = trace_file(tmp_path, [1, 2, 3], [1, 2, 4], [1, 2, 3])
    assert main(["replay", str(file), "--policy", policy, "--capacity", "100%", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["hits"] == 5 and document["hit_rate"] == 5 / 9
    assert document["policy"] == ("chain" if policy == "default" else policy)
    assert (document["requests"], document["block_references"], document["capacity_blocks"]) == (3, 9, 4)
    assert document["references_per_s"] > 0


def test_a_small_cache_hits_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = trace_file(tmp_path, [1, 2], [3, 4], [1, 2])
    for policy, hits in (("lru", 0), ("belady", 2)):
        assert main(["replay", str(file), "--policy", policy, "--capacity", "2", "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["hits"] == hits


def test_people_get_lines_and_a_file_gets_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, result = trace_file(tmp_path, [1], [1]), tmp_path / "result.json"
    assert main(["replay", str(file), "--capacity", "1", "--json", str(result)]) == 0
    assert "prefix hit rate 0.5000 (1 of 2 blocks)" in capsys.readouterr().out
    assert json.loads(result.read_text())["hit_rate"] == 0.5


@pytest.mark.parametrize(
    ("text", "blocks"), [("5000", 5000), ("5%", 50), ("0.25%", 2), ("1MiB", 256), ("8192B", 2), ("1.5GiB", 393216)]
)
def test_capacities(text: str, blocks: int) -> None:
    assert blocks_from_text(text, unique_blocks=1000, block_bytes=4096) == blocks


@pytest.mark.parametrize("text", ["", "x", "0", "-5", "5 %x", "0.01%", "1KiB", "nan%", "inf%", "1e400%", "GiB"])
def test_capacities_that_are_none(text: str) -> None:
    with pytest.raises(CommandFailed, match="--capacity"):
        blocks_from_text(text, unique_blocks=1000, block_bytes=4096)


def test_a_capacity_in_bytes_wants_the_size_of_a_block() -> None:
    with pytest.raises(CommandFailed, match="--block-bytes"):
        blocks_from_text("1GiB", unique_blocks=1000, block_bytes=0)


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
def test_a_bad_line_is_named(line: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n\n{line}\n")
    assert main(["replay", str(file), "--capacity", "5"]) == 1
    error = capsys.readouterr().err
    assert f"{file}:3: " in error and complaint in error and error.count("\n") == 1


def test_a_trace_that_is_not_there_or_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none"), "--capacity", "5"]) == 1
    assert "cannot be read" in capsys.readouterr().err
    empty = trace_file(tmp_path)
    assert main(["replay", str(empty), "--capacity", "5"]) == 1
    assert "has no requests" in capsys.readouterr().err
    empty.write_bytes(b"\xff\xfe\n")
    assert main(["replay", str(empty), "--capacity", "5"]) == 1
    assert "is no text" in capsys.readouterr().err


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
