"""Replays of traces, and the optimum."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.eviction_replay import POLICIES, Lru, belady, blocks_from_text, replay, replay_trace
from bench.eviction_traces import SYNTHETIC
from bench.request_trace import Trace
from kvpool_cli.errors import CommandFailed
from kvpool_pagestore.core.eviction import EvictionPolicy

LINE = {"timestamp": 0, "input_length": 600, "output_length": 1}


def trace_file(directory: Path, *requests: list[int]) -> Path:
    file = directory / "trace.jsonl"
    file.write_text("".join(json.dumps({**LINE, "hash_ids": blocks}) + "\n" for blocks in requests))
    return file


def test_replay_counts_leading_blocks_and_belady_is_never_beaten() -> None:
    requests = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3], [5, 6, 7], [1, 2, 4]]
    assert replay(requests, Lru(), 100).hits == 0 + 2 + 0 + 3 + 2 + 3
    assert replay([], Lru(), 1).hit_rate == 0.0
    for capacity in range(1, 9):
        best = belady(requests, capacity)
        assert (best.requests, best.block_references) == (6, 17)
        assert replay(requests, Lru(), capacity).hits <= best.hits
        assert replay(requests, EvictionPolicy(), capacity).hits <= best.hits


def test_the_same_trace_hits_the_same_each_time() -> None:
    requests = [[number * 7919 % 50 * 10 + at for at in range(1 + number % 9)] for number in range(2000)]
    assert replay(requests, EvictionPolicy(), 60) == replay(requests, EvictionPolicy(), 60)


@pytest.mark.parametrize("name", ["chat", "agents", "documents"])
@pytest.mark.slow
def test_no_kind_of_traffic_hits_much_less_than_with_lru(name: str) -> None:
    trace = Trace(SYNTHETIC[name](random.Random(5))[:1500])
    unique = trace.unique_blocks
    for share in (0.02, 0.1, 0.3):
        ours, lru = (replay_trace(trace, policy, round(share * unique), unique) for policy in ("gdsf", "lru"))
        assert ours.result.hit_rate > lru.result.hit_rate - 0.002


@pytest.mark.parametrize("policy", POLICIES)
def test_the_result_as_json(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = trace_file(tmp_path, [1, 2, 3], [1, 2, 4], [1, 2, 3])
    assert main(["replay", str(file), "--policy", policy, "--capacity", "100%", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["hits"] == 5 and document["hit_rate"] == 5 / 9 and document["policy"] == policy
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


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none"), "--capacity", "5"]) == 1
    assert "cannot be read" in capsys.readouterr().err


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
