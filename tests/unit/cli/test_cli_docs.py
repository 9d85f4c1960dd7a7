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
DOCUMENTS = sorted(
    path
    for pattern in (
        "*.md",
        *(f"{folder}/**/*.md" for folder in ("docs", "k8s", "services", "clients", "bench", "tests")),
    )
    for path in REPOSITORY.glob(pattern)
)


def test_the_page_is_current() -> None:
    current = generate_cli_docs.PAGE.read_text()
    assert current == generate_cli_docs.page_text(current), "run python -m tools.generate_cli_docs"


def shown() -> Iterator[str]:
    """Each command of a fenced block in any document, without its comment; `a | b` are two commands."""
    for path in DOCUMENTS:
        for block in re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r" \|\|? | && |;|\$\(", line.split(" #")[0]):
                    if part.strip().startswith("kvpool "):
                        yield part.strip().rstrip("&)").strip()


def test_the_page_has_options_whose_names_begin_as_a_shared_one_does() -> None:
    assert "* `--index-port PORT`" in generate_cli_docs.PAGE.read_text()


def test_listings_of_the_page_show_whole_sentences() -> None:
    listings = re.findall(r"^\*\*Commands\*\*:\n\n((?:\* .+\n)+)", generate_cli_docs.PAGE.read_text(), re.MULTILINE)
    assert len(listings) == 5, "of kvpool and its groups"
    for line in "".join(listings).splitlines():
        assert line.endswith(".") and not line.endswith("..."), line


@pytest.mark.parametrize("text", sorted(set(shown())))
def test_a_command_that_documents_show_is_understood(text: str) -> None:
    command, words = ROOT, shlex.split(text)[1:]
    if "COMMAND" in words or "[OPTIONS]" in text:
        return
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands") or not words or words[0].startswith("--"), f"{text}: no such command"
    known = {flag for parameter in command.params for flag in getattr(parameter, "opts", ())} | {"--help", "-h"}
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert options <= known
    if text.startswith("kvpool cluster up "):
        assert not any(option.startswith("--tls-") for option in options), "its services take --service-*"


def named() -> Iterator[tuple[str, ...]]:
    """Words of each command that a document names within a line, or that a test gives to a container."""
    for path in DOCUMENTS:
        for text in re.findall(r"`kvpool ([a-z][^`\n\\]*)`", path.read_text()):
            yield tuple(text.split())
    for folder in ("compose", "kubernetes"):
        for path in sorted(REPOSITORY.glob(f"tests/{folder}/*.py")):
            for text in re.findall(r'"kvpool"((?:, "[^"]*")+)', path.read_text()):
                yield tuple(re.findall(r'"([^"]*)"', text))


@pytest.mark.parametrize("words", sorted(set(named())), ids=" ".join)
def test_a_command_that_is_named_exists(words: tuple[str, ...]) -> None:
    command, rest = ROOT, list(words)
    while rest and hasattr(command, "commands") and rest[0] in command.commands:
        command = command.commands[rest.pop(0)]
    assert command is not ROOT and (not hasattr(command, "commands") or not rest), words


def test_documents_show_commands() -> None:
    assert len(set(shown())) > 30
