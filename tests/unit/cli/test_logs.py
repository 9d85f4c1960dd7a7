"""Reading the ends of logs."""

from pathlib import Path

import pytest

from kvpool_cli import logs
from kvpool_cli.logs import last_lines
from kvpool_cli.main import run_command as main


def test_the_last_lines_after_a_position(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\nthree\n")
    assert last_lines(path, 2) == ["two", "three"]
    assert last_lines(path, 9, start=4) == ["two", "three"]
    assert last_lines(path, 0) == []
    assert last_lines(path, 2, start=1000) == ["two", "three"], "a log that was rotated is shorter than it was"
    assert last_lines(tmp_path / "nothing", 2) == []


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_TAIL_BYTES", 8)
    path = tmp_path / "log"
    path.write_text("one\ntwo\nthree\n")
    assert last_lines(path, 1) == ["three"]


def test_logs_of_named_processes_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("index-0", "agent-0"):
        (tmp_path / "logs" / f"{name}.log").write_text(f"{name} one\n{name} two\n")
    assert main(["--state-dir", str(tmp_path), "cluster", "logs", "-n", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["agent-0: agent-0 two", "index-0: index-0 two"]
    assert main(["--state-dir", str(tmp_path), "cluster", "logs", "index-0", "-n", "5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["--state-dir", str(tmp_path), "cluster", "logs", "index-9"]) == 1
