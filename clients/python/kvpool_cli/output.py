"""What commands print: tables for people, JSON for programs, and how a command fails."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


class CommandFailed(Exception):
    """A command cannot do what it was asked; the message, one line, says what to do next."""


class NotConfirmed(CommandFailed):
    """A destructive command was not confirmed: nothing was changed; exit code 2."""


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Columns padded to their widest cell; `right` names the columns of numbers."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(text_width(line[column]) for line in [list(headers), *cells]) for column in range(len(headers))]

    def line(values: Sequence[str]) -> str:
        padded = [
            pad(value, width, right=column in right)
            for column, (value, width) in enumerate(zip(values, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *(line(row) for row in cells)])


def printable(text: str) -> str:
    """Without what a terminal would obey: names come from nodes."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def show(text: str = "") -> None:
    """Print lines for people on stdout: what every command prints goes through here, or is JSON."""
    print("\n".join(map(printable, text.split("\n"))), flush=True)


def text_width(text: str) -> int:
    """Cells of a terminal: Chinese and Japanese characters take two, combining ones none."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def pad(text: str, cells: int, *, right: bool = False) -> str:
    """With blanks behind it, or (right) before it, as many cells wide; wider text stays as it is."""
    blanks = " " * (cells - text_width(text))
    return blanks + text if right else text + blanks


def cut(text: str, cells: int) -> str:
    """The longest beginning that is no wider."""
    if text.isascii():
        return text[:cells]
    ends = itertools.accumulate(map(_cells, text))
    return text[: sum(end <= cells for end in ends)]


def size(size_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


class NotUnderstood(argparse.ArgumentTypeError, ValueError):
    """The value of an option; argparse tells the message, where it would name this function for a bare ValueError."""


def size_from_text(text: str) -> int:
    """Bytes of "12345", "64MiB", "2GiB". Raises NotUnderstood."""
    try:
        for suffix, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)):
            if text.endswith(suffix):
                size_bytes = int(float(text.removesuffix(suffix)) * factor)
                break
        else:
            size_bytes = int(text)
    except (ValueError, OverflowError):
        size_bytes = -1
    if size_bytes < 0:
        raise NotUnderstood(f"{text!r} is no size; write bytes, or 64MiB, 1.5GiB, 2TiB")
    return size_bytes


_SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def duration_from_text(text: str) -> float:
    """Seconds of "90s", "15m", "24h", "7d" or "2w". Raises NotUnderstood."""
    try:
        duration_s = float(text[:-1]) * _SECONDS_OF.get(text[-1:], 0)
    except ValueError:
        duration_s = 0.0
    if not 0 < duration_s < 1e10:
        raise NotUnderstood(f"{text!r} is no duration; write 90s, 15m, 24h, 7d or 2w")
    return duration_s


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


def print_json(document: Mapping[str, Any]) -> None:
    """A document for programs, on stdout."""
    print(json.dumps(document, indent=2))


def say(text: str) -> None:
    """A remark beside the output proper: one line on stderr, at once."""
    sys.stderr.write(f"kvpool: {printable(text)}\n")
    sys.stderr.flush()


def fail(error: Exception | str, *, code: int = EXIT_FAILED) -> int:
    """One clear line on stderr; returns the exit code."""
    say(" ".join(str(error).split()))
    return code
