"""`kvpool cluster logs`, and reading the ends of log files."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_OK, CommandFailed
from kvpool_cli.output import show

_TAIL_BYTES = 1 << 20  # of one log at most: more than a person reads
_FOLLOW_INTERVAL_S = 0.3


def log_dir(state_dir: Path) -> Path:
    """Where the logs of a cluster lie."""
    return state_dir / "logs"


def last_lines(path: Path, count: int, *, start: int = 0) -> list[str]:
    """The last `count` lines of what follows byte `start`; none if there is no such file."""
    try:
        with path.open("rb") as log:
            size_bytes = log.seek(0, 2)
            first = max(start if start <= size_bytes else 0, size_bytes - _TAIL_BYTES)
            log.seek(first)
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.strip().splitlines()[-count:] if count > 0 else []


def logs(
    common: Common,
    process: Annotated[
        list[str] | None, typer.Argument(metavar="PROCESS", help="Names such as index-0 (default: all).")
    ] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, metavar="N", help="Last lines of each.")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing what is added.")] = False,
) -> int:
    """Show the ends of the logs of the cluster's processes. With --json, a document for each line."""
    directory = log_dir(common.state_dir)
    paths = sorted(path for path in directory.glob("*.log") if not process or path.stem in process)
    if not paths:
        there = ", ".join(sorted(path.stem for path in directory.glob("*.log"))) or "none; --state-dir names another"
        raise CommandFailed(
            f"no logs of {', '.join(process or ()) or 'any process'} in {directory}; there are: {there}"
        )
    positions = {path: path.stat().st_size for path in paths}
    for path in paths:
        for text in last_lines(path, lines):
            _print_line(common, path.stem, text)
    while follow:
        for path in paths:
            positions[path] = _print_new(common, path, positions[path])
        sys.stdout.flush()
        time.sleep(_FOLLOW_INTERVAL_S)
    return EXIT_OK


def _print_new(common: Common, path: Path, position: int) -> int:
    with path.open("rb") as log:
        if position > log.seek(0, 2):  # it was rotated: a new one begins
            position = 0
        log.seek(position)
        added = log.read()
    whole = added[: added.rfind(b"\n") + 1]
    for text in whole.decode(errors="replace").splitlines():
        _print_line(common, path.stem, text)
    return position + len(whole)


def _print_line(common: Common, process: str, text: str) -> None:
    if common.json:
        sys.stdout.write(json.dumps({"process": process, "line": text}) + "\n")
    else:
        show(f"{process}: {text}")
