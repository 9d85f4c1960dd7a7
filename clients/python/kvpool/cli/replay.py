"""`kvpool replay`: what a trace of requests would hit, by eviction policy and capacity."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvpool.cli.output import EXIT_OK, CommandFailed, print_json, size_from_text
from kvpool.cli.replay_live import replay_live
from kvpool.cli.replay_trace import read_trace
from kvpool.cli.targets import add_target, find_target

_LIVE_REQUESTS = 500  # unless --limit says otherwise: each one moves real bytes
_LIVE_BLOCK_BYTES = 64 << 10
DEFAULT = "default"


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool replay`."""
    parser.add_argument(
        "trace", metavar="TRACE", help="JSON lines: timestamp, input_length, output_length, hash_ids; - is stdin"
    )
    parser.add_argument(
        "--policy",
        choices=[DEFAULT, "lru", "belady"],
        default=DEFAULT,
        help="which blocks go when the cache is full; default is the pagestore's policy, belady knows the future",
    )
    parser.add_argument(
        "--capacity", default="", metavar="N", help="blocks (5000), a share of the different blocks (5%%) or 64GiB"
    )
    parser.add_argument(
        "--block-bytes", type=size_from_text, default=0, metavar="BYTES", help="of one block: for a capacity in bytes"
    )
    parser.add_argument("--limit", type=int, default=0, metavar="REQUESTS", help="only the first requests; 0: all")
    parser.add_argument(
        "--live", action="store_true", help="with real pages at the cluster of the state directory, by its own policy"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout")
    add_target(parser)
    parser.set_defaults(run=run_replay)


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay and print."""
    if arguments.block_bytes < 0 or arguments.limit < 0:
        raise CommandFailed("--block-bytes and --limit must be >= 0")
    if arguments.live:
        return _run_live(arguments)
    if not arguments.capacity:
        raise CommandFailed("say --capacity: blocks (5000), a share of the different blocks (5%) or bytes (64GiB)")
    if importlib.util.find_spec("bench") is None:
        raise CommandFailed("a replay without a cluster is part of the source checkout: run this in it")
    command = [sys.executable, "-m", "bench.eviction_replay", arguments.trace, "--capacity", arguments.capacity]
    command += ["--limit", str(arguments.limit)]
    command += ["--block-bytes", str(arguments.block_bytes)] if arguments.block_bytes else []
    command += [] if arguments.policy == DEFAULT else ["--policy", arguments.policy]
    command += ["--json", arguments.json] if arguments.json else []
    return subprocess.run(command, check=False).returncode


def _run_live(arguments: argparse.Namespace) -> int:
    if arguments.capacity or arguments.policy != DEFAULT:
        raise CommandFailed("--live goes by the capacity and policy of the cluster; leave out --capacity and --policy")
    state = find_target(arguments).state
    if state is None:
        raise CommandFailed("--live needs an agent on this machine: leave out --index and name a --state-dir")
    trace = read_trace(arguments.trace, arguments.limit or _LIVE_REQUESTS)
    counts, block_bytes = replay_live(state, trace.requests, arguments.block_bytes or _LIVE_BLOCK_BYTES)
    document = counts.to_document(block_bytes)
    text = (
        f"prefix hit rate {document['hit_rate']:.4f} ({counts.hits} of {counts.block_references} blocks"
        f" of {counts.requests} requests), {counts.bytes_verified} bytes verified, {counts.stored_blocks} blocks stored"
    )
    write_result(document, arguments.json, text)
    if counts.wrong_blocks:
        raise CommandFailed(f"{counts.wrong_blocks} blocks came back with other bytes than were stored; keep the logs")
    return EXIT_OK


def write_result(document: dict[str, Any], json_name: str | None, text: str) -> None:
    """For people on stdout, unless the JSON goes there. Raises CommandFailed."""
    if json_name == "-":
        print_json(document)
        return
    print(text)
    if json_name:
        try:
            Path(json_name).write_text(json.dumps(document, indent=2) + "\n")
        except OSError as error:
            raise CommandFailed(f"{json_name} cannot be written: {error.strerror or error}") from error
