"""The page of the command line is what the commands say of themselves, and examples are commands that there are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool_cli.main import app
from tools import generate_cli_docs

REPOSITORY = Path(__file__).parents[3]
ROOT: Any = app


def test_the_page_is_current() -> None:
    current = generate_cli_docs.PAGE.read_text()
    assert current == generate_cli_docs.page_text(current), "run python -m tools.generate_cli_docs"


def shown() -> Iterator[str]:
    """Each command of a fenced block in any document, without its comment; `a | b` are two commands."""
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))):
        for block in re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r" \|\|? | && |;|\$\(", line.split(" #")[0]):
                    if part.strip().startswith("kvpool "):
                        yield part.strip().rstrip("&)").strip()


@pytest.mark.parametrize("text", sorted(set(shown())))
def test_a_command_that_documents_show_is_understood(text: str) -> None:
    command, words = ROOT, shlex.split(text)[1:]
    if "COMMAND" in words or "[OPTIONS]" in text:
        return
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands") or not words or words[0].startswith("--"), f"{text}: no such command"
    known = {flag for parameter in command.params for flag in getattr(parameter, "opts", ())} | {"--help", "-h"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


def test_documents_show_commands() -> None:
    assert len(set(shown())) > 30
