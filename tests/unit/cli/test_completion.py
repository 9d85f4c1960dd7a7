"""Completion scripts, tried in the shells themselves where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvpool_cli.completion import SHELLS, bash_script, walk
from kvpool_cli.main import COMMANDS, build_parser, main
from tests.fixtures.patience import PATIENCE_S

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script() -> str:
    return bash_script(list(walk(build_parser(list(COMMANDS)))))


def completed(script: str, tmp_path: Path, *words: str) -> list[str]:
    """What bash offers with the cursor at the end of these words."""
    assert BASH is not None
    quoted = " ".join(f"'{word}'" for word in ("kvpool", *words))
    asked = f"{script}\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words)}\n_kvpool\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    done = subprocess.run(
        [BASH, "--norc", "--noprofile", "-u"],
        input=asked,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("",), sorted([*COMMANDS, "-h", "--help", "--version", "--state-dir"])),
        (("ex",), ["export"]),
        (("policy", ""), ["set", "show", "-h", "--help"]),
        (("policy", "set", "--wr"), ["--write-policy"]),
        (("top", "--sort", "st"), ["state", "staging"]),
        (("up", "--device", ""), ["cpu", "cuda"]),
        (("--state-dir", "x", "top", "--on"), ["--once"]),
        (("completion", ""), [*SHELLS, "-h", "--help"]),
        (("pin", "tok"), ["tokens.json"]),
        (("pin", ""), ["tokens.json", "my tokens.json"]),
        (("import", "my"), ["my tokens.json"]),
        (("pin", "--li"), ["--list"]),
        (("export", "--tls-ca-file", "my"), ["my tokens.json"]),
        (("evict", "--node", "tok"), ["tokens.json"]),
        (("top", "--json", "--on"), ["--once"]),
        (("nonsense", "--x"), []),
    ],
)
def test_bash_offers_what_may_follow(words: tuple[str, ...], offered: list[str], script: str, tmp_path: Path) -> None:
    (tmp_path / "tokens.json").touch()
    (tmp_path / "my tokens.json").touch()
    assert sorted(completed(script, tmp_path, *words)) == sorted(offered)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script_that_names_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    binary = shutil.which(shell)
    if binary is not None:
        flag = "--no-execute" if shell == "fish" else "-n"
        done = subprocess.run(
            [binary, flag], input=text, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr
