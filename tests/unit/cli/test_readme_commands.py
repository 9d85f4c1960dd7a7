"""The commands that README.md shows are ones that the parser takes."""

import re
import shlex
from pathlib import Path

import pytest

from kvpool_cli.main import COMMANDS, build_parser

README = Path(__file__).parents[3] / "README.md"


def shown() -> list[str]:
    """Each command of a fenced block, without its comment; `a | b` are two commands."""
    blocks = re.findall(r"^```\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    kvpool = [line.removeprefix("kvpool ") for line in lines if line.startswith("kvpool ")]
    return [command.strip() for line in kvpool for command in line.split(" | ")]


@pytest.mark.parametrize("command", shown())
def test_the_parser_takes_it(command: str) -> None:
    build_parser(list(COMMANDS)).parse_args(shlex.split(command))


def test_there_are_commands() -> None:
    assert {command.split()[0] for command in shown()} >= {"up", "status", "doctor", "pin", "drain", "down"}
