"""What benches report, and the baselines they stand beside."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.rig.bare import BareStream, Buffer
from bench.rig.machine import CopyBaseline, FileBaseline, drop_from_page_cache, random_bytes
from bench.rig.results import Results
from kvpool_cli.errors import CommandFailed


def test_a_case_is_the_median_beside_the_median_of_its_baseline(tmp_path: Path) -> None:
    results = Results()
    for value, baseline in ((1.0, 4.0), (2.0, 4.0), (9.0, 8.0)):
        results.add("get", "GB/s", value, baseline, "memcpy")
    results.add("alone", "ms", 3.0, None, "nothing")
    path = tmp_path / "bench.json"
    results.write(path)
    assert json.loads(path.read_text()) == {
        "get": {"value": 2.0, "unit": "GB/s", "baseline": 4.0, "ratio": 0.5},
        "alone": {"value": 3.0, "unit": "ms", "baseline": 0.0, "ratio": 0.0},
    }
    lines = results.render().splitlines()
    assert "1.00 to 9.00" in lines[2] and "memcpy" in lines[2]
    with pytest.raises(CommandFailed, match="cannot be written"):
        results.write(tmp_path / "none" / "bench.json")


def test_random_bytes_are_the_same_for_a_seed_only() -> None:
    assert np.array_equal(random_bytes(1001, 1), random_bytes(1001, 1))
    assert not np.array_equal(random_bytes(1001, 1), random_bytes(1001, 2))
    assert random_bytes(1001, 1).shape == (1001,)


def test_copies_and_files_move_all_of_their_bytes(tmp_path: Path) -> None:
    assert CopyBaseline(10_000, 3).rate() > 0
    assert CopyBaseline(10_000, 3).rate(2) > 0
    files = FileBaseline(tmp_path, 100_000, 4096)
    assert files.size_bytes == 24 * 4096
    assert files.write_rate(2) > 0
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    assert content == content[:4096] * 24 and len(set(content)) > 200
    assert files.read_rate(4) > 0
    assert files._target.tobytes() == content
    assert files.write_rate(1) > 0
    assert len(list(tmp_path.iterdir())) == 1, "the older file is gone"
    files.remove()
    drop_from_page_cache([path])  # a file that vanished is none of its business


def test_a_bare_stream_carries_every_byte_both_ways() -> None:
    stream = BareStream(page_bytes=150_001, page_count=3, frame_bytes=1 << 16)
    try:
        assert stream.read_rate() > 0
        assert stream.write_rate() > 0
    finally:
        stream.close()
    assert stream._server.returncode == 0


def test_a_stream_that_is_cut_short_is_no_sample() -> None:
    buffer = Buffer(10_000, 2, 4096)
    frames = list(buffer.frames())
    assert [len(frame) for frame in frames] == [4096, 4096, 1808] * 2
    buffer.take(iter(frames))
    with pytest.raises(ValueError, match="18192 of 20000 bytes"):
        buffer.take(iter(frames[:-1]))
