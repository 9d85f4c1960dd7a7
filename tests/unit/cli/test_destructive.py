"""Commands that give up what engines would have to compute again, run without a terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from kvpool_cli.main import run_command as main

DESTRUCTIVE = [
    ["cache", "clear"],
    ["cache", "clear", "--keyspace", "llama"],
    ["cache", "evict", "--keyspace", "llama", "--whole-keyspace"],
    ["cache", "evict", "--keyspace", "llama", "TOKENS"],
]


@pytest.mark.parametrize("argv", DESTRUCTIVE)
def test_a_destructive_command_without_a_terminal_is_refused_before_anything_is_asked(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[1, 2, 3]")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    argv = [str(tokens) if word == "TOKENS" else word for word in argv]
    assert main([*argv, "--index", "127.0.0.1:1"]) == 2
    assert "--yes" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--keyspace", "--node"])
def test_a_name_that_came_out_empty_is_not_taken_for_all(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        ["cache", "clear"] if option == "--keyspace" else ["cache", "evict", "--keyspace", "k", "--whole-keyspace"]
    )
    assert main([*command, option, "", "--yes", "--index", "127.0.0.1:1"]) == 2  # "$NAME" of a script, say
    assert option in capsys.readouterr().err


def test_a_policy_is_not_set_for_an_empty_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "set", "--keyspace", "", "--quota", "1GiB", "--index", "127.0.0.1:1"]) == 2
    assert "--keyspace" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [*([*one, "--yes"] for one in DESTRUCTIVE[:3]), ["cache", "clear", "--dry-run"]])
@pytest.mark.usefixtures("no_retries")
def test_with_yes_or_as_a_dry_run_it_calls_the_cluster(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--index", "127.0.0.1:1"]) == 1
    assert "the index at 127.0.0.1:1 does not answer" in capsys.readouterr().err
