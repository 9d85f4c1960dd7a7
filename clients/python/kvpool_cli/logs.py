"""`kvpool logs`, and reading the ends of log files."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kvpool_cli.output import EXIT_OK, CommandFailed, show

_TAIL_BYTES = 1 << 20  # of one log at most: nobody reads more than that from its end
_FOLLOW_INTERVAL_S = 0.3


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool logs`."""
    parser.add_argument("process", nargs="*", help="names such as index-0 (default: all)")
    parser.add_argument("-n", "--lines", type=int, default=20, help="last lines of each (default 20)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing what is added")
    parser.set_defaults(run=run_logs)


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


def run_logs(arguments: argparse.Namespace) -> int:
    """Print the ends of log files, and follow them."""
    directory = log_dir(arguments.state_dir)
    paths = sorted(path for path in directory.glob("*.log") if not arguments.process or path.stem in arguments.process)
    if not paths:
        raise CommandFailed(f"no logs of {', '.join(arguments.process) or 'any process'} in {directory}")
    positions = {path: path.stat().st_size for path in paths}
    for path in paths:
        for line in last_lines(path, arguments.lines):
            show(f"{path.stem}: {line}")
    while arguments.follow:
        for path in paths:
            positions[path] = _print_new(path, positions[path])
        sys.stdout.flush()
        time.sleep(_FOLLOW_INTERVAL_S)
    return EXIT_OK


def _print_new(path: Path, position: int) -> int:
    with path.open("rb") as log:
        if position > log.seek(0, 2):  # it was rotated: a new one begins
            position = 0
        log.seek(position)
        added = log.read()
    whole = added[: added.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        show(f"{path.stem}: {line}")
    return position + len(whole)
