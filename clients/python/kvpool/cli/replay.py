"""`kvpool replay`: what a trace of requests would hit, by eviction policy and capacity."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.cli.output import EXIT_OK, CommandFailed, print_json, size_from_text
from kvpool.cli.replay_live import replay_live
from kvpool.cli.replay_trace import Trace, blocks_from_text, read_trace
from kvpool.cli.targets import add_target, find_target
from kvpool.core.eviction import DEFAULT_POLICY, PolicyName, make_policy
from kvpool.core.eviction.replay import ReplayResult, belady, replay

BELADY = "belady"
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
        choices=[DEFAULT, *PolicyName, BELADY],
        default=DEFAULT,
        help=f"which blocks go when the cache is full; default is {DEFAULT_POLICY}, belady knows the future",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A result with what it was made of."""

    policy: str
    capacity_blocks: int
    unique_blocks: int
    result: ReplayResult
    elapsed_s: float

    def to_document(self) -> dict[str, Any]:
        """The document of `--json`."""
        return {
            "hit_rate": self.result.hit_rate,
            "hits": self.result.hits,
            "requests": self.result.requests,
            "block_references": self.result.block_references,
            "unique_blocks": self.unique_blocks,
            "capacity_blocks": self.capacity_blocks,
            "policy": self.policy,
            "elapsed_s": self.elapsed_s,
            "references_per_s": self.result.block_references / max(self.elapsed_s, 1e-9),
        }


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay and print."""
    if arguments.block_bytes < 0 or arguments.limit < 0:
        raise CommandFailed("--block-bytes and --limit must be >= 0")
    if arguments.live:
        return _run_live(arguments)
    if not arguments.capacity:
        raise CommandFailed("say --capacity: blocks (5000), a share of the different blocks (5%) or bytes (64GiB)")
    trace = read_trace(arguments.trace, arguments.limit)
    unique_blocks = trace.unique_blocks
    capacity = blocks_from_text(arguments.capacity, unique_blocks, arguments.block_bytes)
    policy = str(DEFAULT_POLICY) if arguments.policy == DEFAULT else str(arguments.policy)
    replayed = replay_trace(trace, policy, capacity, unique_blocks)
    write_result(replayed.to_document(), arguments.json, render(replayed))
    return EXIT_OK


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


def replay_trace(trace: Trace, policy: str, capacity: int, unique_blocks: int) -> Replayed:
    """The policy alone, timed."""
    begin_s = time.perf_counter()
    if policy == BELADY:
        result = belady(trace.requests, capacity)
    else:
        name = PolicyName(policy)
        result = replay(trace.requests, make_policy(name), capacity, tail_first=name is not PolicyName.CHAIN)
    return Replayed(
        policy=policy,
        capacity_blocks=capacity,
        unique_blocks=unique_blocks,
        result=result,
        elapsed_s=time.perf_counter() - begin_s,
    )


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


def render(replayed: Replayed) -> str:
    """A few lines for people."""
    result = replayed.result
    return "\n".join(
        [
            f"{replayed.policy} with {replayed.capacity_blocks} of {replayed.unique_blocks} different blocks",
            f"prefix hit rate {result.hit_rate:.4f} ({result.hits} of {result.block_references} blocks)",
            f"{result.block_references / max(replayed.elapsed_s, 1e-9):,.0f} block references a second",
        ]
    )
