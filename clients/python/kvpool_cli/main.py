"""Entry point of the `kvpool` command."""

from __future__ import annotations

import argparse
import io
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from kvpool import __version__
from kvpool.core.errors import KvPoolError, StartupFailed
from kvpool_cli.output import EXIT_FAILED, EXIT_USAGE, CommandFailed, NotConfirmed, fail
from kvpool_cli.state import DEFAULT_STATE_DIR

SUPPORTED_MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True, slots=True)
class Command:
    """module: below kvpool_cli; `function` of it declares the command, and it is imported, only when it is used."""

    module: str
    summary: str
    examples: tuple[str, ...]
    function: str = "declare"


COMMANDS = {
    "up": Command(
        "up",
        "start a cluster on this machine: Redis, index, pagestores, agents",
        ("kvpool up --pagestores 2", "kvpool up --detach --arena-bytes 4GiB --disk-bytes 64GiB"),
    ),
    "down": Command("down", "drain and end the cluster that `kvpool up` started", ("kvpool down",)),
    "status": Command(
        "status",
        "nodes, their arenas and disks, keyspaces; whether anything is wrong",
        ("kvpool status", "kvpool status --index index-0:7100 --check --json"),
    ),
    "top": Command(
        "top",
        "live view: tiers, bandwidth, hits, hot chains, each node",
        ("kvpool top", "kvpool top --index index-0:7100 --interval 5", "kvpool top --once --json"),
    ),
    "doctor": Command(
        "doctor.command",
        "look for what commonly goes wrong on this machine and in the cluster, with its cure",
        ("kvpool doctor", "kvpool doctor --index index-0:7100 --redis redis://redis:6379/0 --arena-bytes 64GiB"),
    ),
    "size": Command(
        "size",
        "what the KV of a model takes, and how many tokens a node holds",
        (
            "kvpool size config.json --arena-bytes 256GiB --disk-bytes 4TiB",
            "kvpool size --layers 61 --latent-dim 576",
        ),
    ),
    "logs": Command("logs", "show logs of the cluster's processes", ("kvpool logs", "kvpool logs pagestore-0 -n 50")),
    "flush": Command("flush", "wait until every page is durable", ("kvpool flush --timeout 120",)),
    "drain": Command(
        "drain",
        "move a pagestore's pages to others, then end its lease",
        ("kvpool drain host-3", "kvpool drain --cancel 5f3a"),
    ),
    "pin": Command(
        "pin",
        "keep the chunks of a token sequence from being evicted, for a time",
        (
            "kvpool pin system-prompt.json --keyspace llama --for 7d",
            "kvpool pin system-prompt.json --forever",
            "kvpool pin --list",
        ),
    ),
    "unpin": Command(
        "pin", "end the pins of a token sequence's chunks", ("kvpool unpin system-prompt.json",), "declare_unpin"
    ),
    "evict": Command(
        "evict",
        "give up chunks before their time: of a token sequence, or of a keyspace",
        (
            "kvpool evict tokens.json --keyspace llama --from-token 2048",
            "kvpool evict --keyspace llama --whole-keyspace --staging-only --node host-3",
        ),
    ),
    "clear": Command(
        "clear",
        "drop the pages of a keyspace, or all",
        ("kvpool clear --dry-run", "kvpool clear --keyspace llama --yes"),
    ),
    "export": Command(
        "export",
        "write the pages of prefixes, or of a keyspace, to one portable verified file",
        ("kvpool export llama.kvpx --keyspace llama", "kvpool export prompts.kvpx system-*.json --keyspace llama"),
    ),
    "import": Command(
        "import_pages",
        "store the pages of an exported file, once all of it is verified",
        (
            "kvpool import llama.kvpx",
            "kvpool import llama.kvpx --copies 2 --digest 9f86d0...",
            "kvpool import --verify-only llama.kvpx",
        ),
    ),
    "match": Command(
        "match",
        "how much of a token sequence the cluster holds, and where",
        ("kvpool match tokens.json --keyspace llama", "echo 1 2 3 | kvpool match -"),
    ),
    "route": Command(
        "route",
        "which hosts would serve a token sequence best, by what they hold of it",
        ("kvpool route tokens.json --keyspace llama --json",),
    ),
    "policy": Command(
        "policy",
        "what pagestores do with a keyspace: disk writes, staging, replicas, quota",
        ("kvpool policy set llama --write-policy write-through --replicas 2 --quota 10GiB", "kvpool policy show"),
    ),
    "completion": Command(
        "completion",
        "print a script that completes commands and options in bash, zsh or fish",
        ('eval "$(kvpool completion bash)"', "kvpool completion fish > ~/.config/fish/completions/kvpool.fish"),
    ),
}


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """All commands; only those named in `argv` have their options."""
    parser = argparse.ArgumentParser(
        prog="kvpool",
        description="Share the KV cache of common prompt prefixes between LLM inference engines.",
        epilog="`kvpool COMMAND --help` has its options and examples. Exit codes: 0 done, 1 failed or something is "
        "wrong, 2 not understood or could not start.",
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
            name,
            help=command.summary,
            description=command.summary.capitalize() + ".",
            formatter_class=HelpWithExamples,
            allow_abbrev=False,
        )
        if name in argv:
            getattr(import_module(f"kvpool_cli.{command.module}"), command.function)(sub)
            sub.epilog = "\n".join(["examples:", *(f"  {example}" for example in command.examples)])
    return parser


class HelpWithExamples(argparse.HelpFormatter):
    """Fills paragraphs as usual, but leaves the examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 could not start as asked."""
    if sys.platform != "linux" or platform.machine() not in SUPPORTED_MACHINES:
        return fail(
            "runs on Linux x86_64 and aarch64, and this is "
            f"{sys.platform} {platform.machine()}; use a Linux machine or container",
            code=EXIT_USAGE,
        )
    argv = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names come from elsewhere: any of them can be shown everywhere
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = build_parser(argv).parse_args(argv)
    except KeyboardInterrupt:  # modules of commands take their time
        return EXIT_FAILED
    arguments.argv = argv
    if arguments.state_dir is None:
        arguments.state_dir = Path(os.environ.get("KVPOOL_STATE_DIR") or DEFAULT_STATE_DIR)
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except (StartupFailed, NotConfirmed) as error:
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
