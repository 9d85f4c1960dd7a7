"""`python -m bench replay-live` against a running cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from tests.e2e.cli_cluster import SMALL, Cluster

pytestmark = pytest.mark.e2e

TO_STDOUT = ("--json", "-")
REQUESTS = [[1, 2, 3], [1, 2, 4, 5], [9], [1, 2, 4, 5, 6], [1, 2, 3]]


def test_a_tiny_trace_hits_what_it_stored_and_every_byte_is_true(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(tmp_path / "cluster")
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": blocks} for blocks in REQUESTS]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def replay() -> dict[str, Any]:
        assert (
            main(
                ["replay-live", str(trace), "--state-dir", str(cluster.state_dir), "--block-bytes", "8KiB", *TO_STDOUT]
            )
            == 0
        )
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    cluster.run("cluster", "up", "--detach", *SMALL)
    try:
        document = replay()
        assert (document["requests"], document["block_references"]) == (5, 16)
        assert document["hits"] == 0 + 2 + 0 + 4 + 3
        assert document["hit_rate"] == 9 / 16
        assert (document["stored_blocks"], document["failed_blocks"], document["wrong_blocks"]) == (7, 0, 0)
        assert document["bytes_verified"] == 9 * document["block_bytes"] == 9 * 8192
        again = replay()
        assert again["hits"] == 16 and again["stored_blocks"] == 0
    finally:
        cluster.run("cluster", "down")
