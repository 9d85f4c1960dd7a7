"""The command line as a whole."""

import platform
import sys
from pathlib import Path

import pytest

from kvpool_cli.main import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"kvpool {command}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nothing"], ["up", "--deta"], ["up", "--arena-bytes", "much"]])
def test_what_is_not_understood_is_refused_with_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["up", "--pagestores", "65"], "--pagestores"),
        (["up", "--index-port", "65536"], "--index-port"),
        (["up", "--memory-index", "--redis", "redis://localhost"], "exclude each other"),
    ],
)
def test_impossible_options_are_one_line_and_code_2(
    argv: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--state-dir", str(tmp_path / "state"), *argv]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert part in lines[0]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "ppc64le")])
def test_other_platforms_are_refused(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert main(["status"]) == 2
    assert f"{system} {machine}" in capsys.readouterr().err


def test_the_state_directory_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPOOL_STATE_DIR", str(tmp_path / "named"))
    assert main(["down"]) == 0
    assert str(tmp_path / "named") in capsys.readouterr().out
    assert main(["--state-dir", str(tmp_path / "flag"), "down"]) == 0
    assert str(tmp_path / "flag") in capsys.readouterr().out
