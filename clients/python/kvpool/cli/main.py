"""Entry point of the `kvpool` command."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from kvpool import __version__
from kvpool.cli.output import EXIT_FAILED, EXIT_USAGE, fail
from kvpool.cli.state import DEFAULT_STATE_DIR
from kvpool.cli.up import add_down, add_logs, add_up
from kvpool.core.errors import KvPoolError, StartupFailed

SUPPORTED_MACHINES = ("x86_64", "aarch64")


def build_parser() -> argparse.ArgumentParser:
    """All commands."""
    parser = argparse.ArgumentParser(
        prog="kvpool", description="Share the KV cache of common prompt prefixes between LLM inference engines."
    )
    parser.add_argument("--version", action="version", version=f"kvpool {__version__}")
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=Path(os.environ.get("KVPOOL_STATE_DIR", DEFAULT_STATE_DIR)),
        help="where `up` keeps state, logs and data (default .kvpool; env KVPOOL_STATE_DIR)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_up, add_down, add_logs):
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 could not start as asked."""
    if sys.platform != "linux" or platform.machine() not in SUPPORTED_MACHINES:
        return fail(
            f"runs on Linux x86_64 and aarch64, and this is {sys.platform} {platform.machine()}; use a Linux machine or container",
            code=EXIT_USAGE,
        )
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except StartupFailed as error:
        return fail(error, code=EXIT_USAGE)
    except KvPoolError as error:
        return fail(error)
    except KeyboardInterrupt:
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output left, as `kvpool logs | head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
