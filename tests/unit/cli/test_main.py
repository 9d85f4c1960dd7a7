"""The command line as a whole."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from kvpool_cli import __main__ as entry
from kvpool_cli.main import app, run_command
from tests.fixtures.patience import PATIENCE_S


def words_of_commands(group: Any, *words: str) -> Iterator[tuple[str, ...]]:
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from words_of_commands(one, *words, name)
        else:
            yield (*words, name)


COMMANDS = sorted(words_of_commands(app))


def test_help_lists_every_group_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(words[0] in text for words in COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_with_examples(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run_command([*words, "--help"]) == 0
    text = Text.from_ansi(capsys.readouterr().out).plain
    assert f"Usage: kvpool {' '.join(words)}" in text
    assert f"kvpool {' '.join(words)}" in text.split("Examples:")[1]
    for common in ("--index", "--state-dir", "--json", "--tls-ca-file"):
        assert common in text


def test_help_lists_commands_with_their_own_words_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "import sys; from kvpool_cli.main import run_command; run_command([sys.argv[1]])\n"
        "print(sorted({'numpy', 'kvpool.client.index', 'kvpool_cli.top'} & set(sys.modules)))"
    )
    for flag in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", script, flag], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"
    for one in vars(app)["commands"].values():
        assert one.short_help is None or one.help.startswith(one.short_help)


def test_help_shows_flags_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["-h"], ["cluster", "-h"], ["cluster", "up", "-h"]):
        assert run_command(argv) == 0
        assert "<bool>" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["nothing"],
        ["cluster", "nothing"],
        ["cluster", "--state-dir", "x"],
        ["cluster", "--nothing", "down"],
        ["cluster", "up", "--deta"],
        ["cluster", "up", "--arena-bytes", "much"],
        ["cache", "match"],
        ["cache", "pin", "x", "--for", "5"],
        ["policy", "set"],
        ["cluster", "up", "--device", "tpu"],
        ["cluster", "status", "--check", "--expect", "-1"],
        ["cluster", "logs", "--lines", "-1"],
        ["cache", "evict", "tokens.json", "--from-token", "-1", "--yes"],
        ["policy", "set", "--keyspace", "k", "--replicas", "17"],
        ["policy", "set", "--keyspace", "k", "--priority", "-101"],
        ["policy", "set", "--keyspace", "k", "--selective-min-uses", "-1"],
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_not_understood_is_one_line_or_document_and_code_2(
    argv: list[str], as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*argv, *(["--json"] if as_json else [])]) == 2
    captured = capsys.readouterr()
    if as_json:
        document = json.loads(captured.out)
        assert document["exit_code"] == 2 and document["error"] and not captured.err
    else:
        assert len(captured.err.splitlines()) == 1 and not captured.out


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["cluster", "up", "--pagestores", "65"], "--pagestores"),
        (["cluster", "up", "--pagestores", "0"], "--pagestores"),
        (["cluster", "up", "--index-port", "65536"], "--index-port"),
        (["cluster", "up", "--memory-index", "--redis", "redis://localhost"], "exclude each other"),
    ],
)
def test_impossible_options_are_one_line_and_code_2(
    argv: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["--state-dir", str(tmp_path / "state"), *argv]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert part in lines[0]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("argv", "code", "part"),
    [
        (["cluster", "up", "--arena-bytes", "much"], 2, "'--arena-bytes': 'much' is not a size; write"),
        (["cache", "match", "--text", "x", "--server", "host"], 2, "--server host wants http:// or https://"),
        (["cache", "match", "absent", "--text", "x", "--server", "http://127.0.0.1:1"], 2, "give one prompt: "),
        (["cache", "match", "--text", "x", "--server", "http://127.0.0.1:1"], 1, "name a vLLM or SGLang server that"),
        (["cluster", "status", "--index", "127.0.0.1:99999"], 2, "--index must be host:port with a port of 1 to 65535"),
        (["cluster", "status", "--index", "index-0:7100,index-1"], 2, "got 'index-1'"),
        (["cluster", "status", "--index", ","], 2, "--index must be host:port"),
        (["cluster", "status", "--index", "127.0.0.1:1"], 1, "see that it runs and that the address is right"),
        (["cache", "flush", "--node", "unix:/nothing", "--timeout", "500ms"], 1, "see that the pagestore runs and"),
        (["cluster", "logs", "index-1"], 1, "there are: index-0, pagestore-0"),
    ],
)
@pytest.mark.usefixtures("no_retries")
def test_an_error_says_what_to_do_next(
    argv: list[str], code: int, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("pagestore-0", "index-0"):
        (tmp_path / "logs" / f"{name}.log").write_text("ready\n")
    assert run_command(["--state-dir", str(tmp_path), *argv]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line
    assert "recompute" not in line, "that is advice for engines"


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "ppc64le")])
def test_other_platforms_are_refused(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert entry.main() == 2
    assert f"{system} {machine}" in capsys.readouterr().err


@pytest.mark.parametrize("missing", [("typer", "rich"), ("redis",)])
def test_without_the_extra_one_line_says_how_to_install_it_without_a_package_index(missing: tuple[str, ...]) -> None:
    """As in an engine's environment: packages of the extra cannot be imported."""
    script = (
        "import importlib.util as u, sys\n"
        "real = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name in {missing} else real(name, *a)\n"
        "from kvpool_cli.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"({', '.join(missing)})" in line and "pip install '/path/to/checkout[cli]'" in line
    assert "install 'kvpool" not in line, "kvpool is not on a package index"


def test_without_the_extra_json_is_answered_with_a_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvpool", "--json", "cluster", "status"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert entry.main() == 2
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["exit_code"] == 2 and "typer" in document["error"] and not captured.err


@pytest.mark.parametrize("argv", [["--json"], ["--json", "cluster"], ["cache", "--json"]])
def test_a_group_without_a_command_is_answered_with_a_document(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(argv) == 2
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["exit_code"] == 2 and "--help" in document["error"] and not captured.err


def test_the_state_directory_comes_from_anywhere_on_the_line_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPOOL_STATE_DIR", str(tmp_path / "named"))
    assert run_command(["cluster", "down"]) == 0
    assert str(tmp_path / "named") in capsys.readouterr().out
    flag = ["--state-dir", str(tmp_path / "flag")]
    joined = f"--state-dir={tmp_path / 'flag'}"
    for argv in (
        [*flag, "cluster", "down"],
        ["cluster", *flag, "down"],
        ["cluster", "--json", joined, "down"],
        ["cluster", "down", *flag],
        ["cluster", "--state-dir", str(tmp_path / "less"), "down", *flag],
    ):
        assert run_command(argv) == 0
        assert str(tmp_path / "flag") in capsys.readouterr().out


@pytest.mark.usefixtures("no_retries")
def test_the_index_comes_from_the_environment_unless_the_line_names_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPOOL_INDEX", "127.0.0.1:1")
    for argv, said in (
        (["cluster", "status"], "127.0.0.1:1 does not answer"),
        (["--index", "127.0.0.1:2", "cluster", "status"], "127.0.0.1:2 does not answer"),
        (["cluster", "status", "--state-dir", str(tmp_path)], f"no cluster runs in {tmp_path}"),
    ):
        assert run_command(argv) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvpool clu", {"cluster"}),
        ("kvpool cache ex", {"export"}),
        ("kvpool policy ", {"set", "show"}),
        ("kvpool cluster up --device ", {"cpu", "cuda"}),
        ("kvpool top --onc", {"--once"}),
    ],
)
@pytest.mark.slow
def test_bash_completes_commands_options_and_values(line: str, offered: set[str]) -> None:
    environment = os.environ | {
        "_KVPOOL_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "kvpool_cli"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_completion_script(shell: str) -> None:
    environment = os.environ | {"_KVPOOL_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [sys.executable, "-m", "kvpool_cli"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "_KVPOOL_COMPLETE" in done.stdout
    binary = shutil.which(shell)
    if binary is not None:
        flag = "--no-execute" if shell == "fish" else "-n"
        checked = subprocess.run([binary, flag], input=done.stdout, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
