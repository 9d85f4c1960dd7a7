"""What commands print: tables for people, JSON for programs, and how a command fails."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpool_cli.errors import EXIT_FAILED, NotConfirmed

_DIGITS = frozenset("0123456789")
_UNLIMITED_COLUMNS = 10_000  # where there is no terminal, lines are as long as they need to be


def _console(*, stderr: bool = False) -> Console:
    """Of the current stdout or stderr. Nothing that comes from a node is taken for markup."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream,
        width=None if stream.isatty() else _UNLIMITED_COLUMNS,
        markup=False,
        emoji=False,
        highlight=False,
    )


def printable(text: str) -> str:
    """Without what a terminal would obey: names come from nodes."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def natural(name: str) -> list[tuple[int, str]]:
    """A key that puts host-2 before host-10."""
    # Digits are compared as text of equal length: names come from nodes, and int() refuses very long numbers.
    parts = re.split(r"([0-9]+)", name)
    return [(len(part.lstrip("0")), part.lstrip("0")) if part[:1] in _DIGITS else (-1, part) for part in parts]


def line(text: str, style: str = "") -> Text:
    """Text of one or several lines that is not wrapped, without control characters."""
    return Text("\n".join(map(printable, text.split("\n"))), style=style, no_wrap=True, overflow="ignore")


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> Table:
    """A table; `right` are the columns of numbers."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column, header in enumerate(headers):
        made.add_column(Text(header), justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(printable(str(cell))) for cell in row))
    return made


def stack(*parts: str | RenderableType) -> Group:
    """Parts below each other; strings are lines of text."""
    return Group(*(line(part) if isinstance(part, str) else part for part in parts))


def show(part: str | RenderableType = "") -> None:
    """Print for people on stdout: what every command prints goes through here, or is JSON."""
    _console().print(stack(part), crop=False)
    sys.stdout.flush()


def as_text(part: str | RenderableType) -> str:
    """What `show` prints where there is no terminal."""
    console = Console(file=io.StringIO(), width=_UNLIMITED_COLUMNS, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(stack(part), crop=False)
    return "\n".join(each.rstrip() for each in captured.get().splitlines())


def print_json(document: Mapping[str, Any]) -> None:
    """A document for programs, on stdout."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def say(text: str, style: str = "") -> None:
    """A remark beside the output proper: one line on stderr, at once."""
    _console(stderr=True).print(line(f"kvpool: {text}", style), crop=False)
    sys.stderr.flush()


def fail(error: Exception | str, *, code: int = EXIT_FAILED, as_json: bool = False) -> int:
    """One clear line on stderr, or a document on stdout; returns the exit code."""
    message = " ".join(str(error).split())
    if as_json:
        print_json({"version": 1, "error": message, "exit_code": code})
    else:
        say(message, "red")
    return code


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something destructive. Raises NotConfirmed unless `yes`, or a person at a terminal agrees.

    Off a terminal (cron, `kubectl exec` without -it, a pipe) only `yes` counts.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise NotConfirmed("refused without a terminal: nothing was changed; give --yes to go ahead")
    # Not by input(), which asks on stdout: a person who redirects the answer to a file must see the question.
    sys.stderr.write(f"{printable(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):  # also where the terminal has ended
        raise NotConfirmed("nothing was changed; answer y, or give --yes")
