"""Entry point of the `kvpool` command."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from kvpool import __version__
from kvpool.cli.output import EXIT_FAILED, EXIT_USAGE, CommandFailed, fail
from kvpool.cli.state import DEFAULT_STATE_DIR
from kvpool.core.errors import KvPoolError, StartupFailed

SUPPORTED_MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True, slots=True)
class _Command:
    """module: below kvpool.cli; its `declare(parser)` is called, and it is imported, only when the command is used."""

    module: str
    summary: str


COMMANDS = {
    "up": _Command("up", "start a cluster on this machine: Redis, index, pagestores, agents"),
    "down": _Command("down", "drain and end the cluster that `kvpool up` started"),
    "status": _Command("status", "nodes, their arenas and disks, keyspaces"),
    "logs": _Command("logs", "show logs of the cluster's processes"),
    "flush": _Command("flush", "wait until every page is durable"),
    "drain": _Command("drain", "move a pagestore's pages to others, then end its lease"),
    "clear": _Command("clear", "drop the pages of a keyspace, or all"),
    "match": _Command("match", "how much of a token sequence the cluster holds, and where"),
    "policy": _Command("policy", "what pagestores do with a keyspace: disk writes, staging, replicas, quota"),
    "replay": _Command("replay", "hit rate of a trace of requests, by eviction policy and capacity"),
    "route": _Command("route", "which hosts would serve a token sequence best, by what they hold of it"),
    "bench": _Command("bench", "measure pages, matches, the GPU path, or any OpenAI-compatible server"),
}


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """All commands; only those named in `argv` have their options."""
    parser = argparse.ArgumentParser(
        prog="kvpool",
        description="Share the KV cache of common prompt prefixes between LLM inference engines.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvpool {__version__}")
    parser.add_argument(
        "--state-dir",
        type=Path,
        help=f"where `up` keeps state, logs and data (default {DEFAULT_STATE_DIR}; env KVPOOL_STATE_DIR)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name, help=command.summary, description=command.summary.capitalize() + ".", allow_abbrev=False
        )
        if name in argv:
            import_module(f"kvpool.cli.{command.module}").declare(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 could not start as asked."""
    if sys.platform != "linux" or platform.machine() not in SUPPORTED_MACHINES:
        return fail(
            "runs on Linux x86_64 and aarch64, and this is "
            f"{sys.platform} {platform.machine()}; use a Linux machine or container",
            code=EXIT_USAGE,
        )
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = build_parser(argv).parse_args(argv)
    arguments.argv = argv
    arguments.state_dir_given = arguments.state_dir is not None
    if arguments.state_dir is None:
        arguments.state_dir = Path(os.environ.get("KVPOOL_STATE_DIR") or DEFAULT_STATE_DIR)
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except StartupFailed as error:
        return fail(error, code=EXIT_USAGE)
    except (CommandFailed, KvPoolError) as error:
        return fail(error)
    except KeyboardInterrupt:
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output left, as `kvpool logs | head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
