"""The ready file appears whole, replaces an old one, and names its fault."""

import json
import os
from pathlib import Path

import pytest

from kvpool.core.errors import StartupFailed
from kvpool_server.ready import clear_ready_file, write_ready_file


def test_it_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("of an earlier run")
    clear_ready_file(path)
    assert not path.exists()
    clear_ready_file(path)
    write_ready_file(path, endpoint="h:1", metrics_url="http://h:2/metrics")
    assert json.loads(path.read_text()) == {
        "pid": os.getpid(),
        "endpoint": "h:1",
        "metrics_url": "http://h:2/metrics",
    }
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_path_nothing_happens() -> None:
    clear_ready_file(None)
    write_ready_file(None, endpoint="h:1")


def test_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match="missing"):
        write_ready_file(tmp_path / "missing" / "ready.json", endpoint="h:1")
    directory = tmp_path / "directory"
    directory.mkdir()
    with pytest.raises(StartupFailed, match="directory"):
        clear_ready_file(directory)
