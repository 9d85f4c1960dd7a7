"""The options of `python -m bench serve`, and what is made of them."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bench.serve.api import Api
from bench.serve.arrivals import Arrival, intended_starts_s
from bench.serve.content import IdVocabulary, Vocabulary, WordVocabulary
from bench.serve.drive import LoadPlan
from bench.serve.inputs import BlockTrace, ShareGpt
from bench.serve.record import LIMITED
from bench.serve.workload import Conversation, SharedPrefixes, Span, span_from_text
from kvpool_cli.errors import CommandFailed

WORKLOADS = ("shared-prefix", "sharegpt", "block-trace")
IDS, TEXT = "ids", "text"
_USERS = 8  # of a closed loop, unless given
_OPEN_LIMIT = 10_000  # of an open loop, unless given: so much memory a server that stalls may cost
_OUTPUT_TOKENS = Span(64, 64)


class Source(Protocol):
    """Where conversations come from."""

    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        """Raises CommandFailed."""
        ...


def declare(parser: argparse.ArgumentParser) -> None:
    """All options."""
    parser.description = (
        "Put load on an OpenAI-compatible server and measure what its users would see. Open loop: --rate, or the times "
        "of a block trace; latencies count from when a request was meant to start. Closed loop: --concurrency."
    )
    target = parser.add_argument_group("server")
    target.add_argument("--base-url", required=True, metavar="URL", help="as http://127.0.0.1:8000")
    target.add_argument("--model", default="", help="default: the first that the server lists")
    target.add_argument("--api", type=Api, choices=list(Api), default=Api.COMPLETIONS)
    target.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable that holds the key, if any",
    )
    target.add_argument(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help='fields for each request: {"ignore_eos": true}',
    )
    target.add_argument("--timeout-s", type=_positive, default=600.0, metavar="S", help="for one request")
    target.add_argument(
        "--metrics",
        action="append",
        default=[],
        metavar="URL",
        help="Prometheus endpoint of a kvpool agent; may be repeated. The server's own is tried without asking",
    )
    _declare_load(parser.add_argument_group("load"))
    _declare_workload(parser.add_argument_group("what is asked"))
    output = parser.add_argument_group("output")
    output.add_argument("--name", default="", help="of this run in reports")
    output.add_argument(
        "--goodput", type=_limits, default={}, metavar="LIMITS", help="as ttft=500ms,tpot=50ms; also itl, e2e"
    )
    output.add_argument("--json", metavar="FILE", help="write the result; - is stdout")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots")
    output.add_argument("--log", type=Path, metavar="FILE", help="write one JSON line for each request")


def declare_report(parser: argparse.ArgumentParser) -> None:
    """Options of `serve-report`."""
    parser.description = "Show results of `python -m bench serve --json` side by side; ratios are beside the first one."
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT")
    parser.add_argument("--names", default="", metavar="NAME,...", help="of the results, instead of their own")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots")


def _declare_load(load: argparse._ArgumentGroup) -> None:
    load.add_argument(
        "--rate", type=_positive, metavar="PER_S", help="conversations a second, whatever the server does"
    )
    load.add_argument("--arrival", type=Arrival, choices=list(Arrival), default=Arrival.POISSON, help="for --rate")
    load.add_argument("--speed", type=_positive, metavar="FACTOR", help="of a block trace's own times; default 1")
    load.add_argument(
        "--concurrency",
        type=_count,
        metavar="N",
        help=f"conversations at once: users of a closed loop ({_USERS}), or the most of an open one ({_OPEN_LIMIT})",
    )
    load.add_argument("--requests", type=_count, default=0, metavar="N", help="stop after so many")
    load.add_argument("--duration-s", type=_positive, default=0.0, metavar="S", help="start nothing after that")
    load.add_argument(
        "--warmup", type=_count_or_none, default=4, metavar="N", help="requests before the load, not counted"
    )
    load.add_argument("--discard-s", type=_amount, default=0.0, metavar="S", help="leave out what starts before")
    load.add_argument("--seed", type=int, default=0, help="of prompts, lengths, choices and arrivals")


def _declare_workload(asked: argparse._ArgumentGroup) -> None:
    asked.add_argument("--workload", choices=WORKLOADS, default=WORKLOADS[0])
    asked.add_argument("--input", type=Path, metavar="FILE", help="of sharegpt and block-trace")
    asked.add_argument(
        "--prompt", choices=(IDS, TEXT), help="token ids, which need no tokenizer, or text; default ids, for chat text"
    )
    asked.add_argument(
        "--token-ids", type=_ids, default=(1000, 30000), metavar="LOW:HIGH", help="ids to use, HIGH excluded"
    )
    asked.add_argument("--prefixes", type=_count, default=10, metavar="N", help="shared-prefix: how many")
    asked.add_argument("--zipf", type=_amount, default=1.0, metavar="S", help="skew of their popularity; 0: all alike")
    asked.add_argument("--prefix-tokens", type=_span, default=Span(1024, 1024), metavar="N|A:B")
    asked.add_argument("--suffix-tokens", type=_span, default=Span(128, 128), metavar="N|A:B", help="own to each")
    asked.add_argument("--output-tokens", type=_span, metavar="N|A:B", help="asked for; sharegpt: as recorded")
    asked.add_argument("--turns", type=_count, metavar="N", help="of a conversation; default 1, sharegpt: all")
    asked.add_argument("--turn-tokens", type=_span, default=Span(64, 64), metavar="N|A:B", help="of each later turn")
    asked.add_argument("--think-time-s", type=_span, default=Span(0, 0), metavar="S|A:B", help="before each later turn")
    asked.add_argument(
        "--max-prompt-tokens",
        type=_count_or_none,
        default=0,
        metavar="N",
        help="end a conversation before it is longer",
    )
    asked.add_argument("--block-tokens", type=_count, default=512, metavar="N", help="block-trace: tokens of a block")
    asked.add_argument(
        "--scale-tokens", type=_positive, default=1.0, metavar="F", help="block-trace: lengths times this"
    )


# What is made of them


def vocabulary_of(arguments: argparse.Namespace) -> Vocabulary:
    """Raises CommandFailed."""
    if prompt_of(arguments) == TEXT:
        return WordVocabulary(arguments.seed)
    if arguments.api is Api.CHAT:
        raise CommandFailed("--api chat takes text: leave out --prompt ids")
    return IdVocabulary(arguments.seed, *arguments.token_ids)


def prompt_of(arguments: argparse.Namespace) -> str:
    """IDS or TEXT."""
    return str(arguments.prompt or (TEXT if arguments.api is Api.CHAT else IDS))


def source_of(arguments: argparse.Namespace) -> Source:
    """Raises CommandFailed."""
    if arguments.workload == "shared-prefix":
        if arguments.input:
            raise CommandFailed("--input is for --workload sharegpt or block-trace")
        if not (arguments.requests or arguments.duration_s):
            raise CommandFailed("synthetic conversations have no end: say --requests or --duration-s")
        return SharedPrefixes(
            prefix_count=arguments.prefixes,
            prefix_tokens=arguments.prefix_tokens,
            suffix_tokens=arguments.suffix_tokens,
            output_tokens=arguments.output_tokens or _OUTPUT_TOKENS,
            turn_count=arguments.turns or 1,
            turn_tokens=arguments.turn_tokens,
            zipf=arguments.zipf,
            seed=arguments.seed,
        )
    if not arguments.input:
        raise CommandFailed(f"--workload {arguments.workload} reads a file: say --input")
    if arguments.workload == "sharegpt":
        return ShareGpt(arguments.input, arguments.turns, arguments.output_tokens, arguments.seed)
    return BlockTrace(arguments.input, arguments.block_tokens, arguments.scale_tokens)


def plan_of(arguments: argparse.Namespace, model: str) -> LoadPlan:
    """Raises CommandFailed."""
    traced = arguments.workload == "block-trace"
    if arguments.speed and (arguments.rate or not traced):
        raise CommandFailed("--speed is for the times of --workload block-trace, without --rate")
    if arguments.discard_s and arguments.duration_s and arguments.discard_s >= arguments.duration_s:
        raise CommandFailed("--discard-s leaves nothing of --duration-s")
    recorded = traced and not arguments.rate and (arguments.speed or not arguments.concurrency)
    open_loop = bool(arguments.rate or recorded)
    starts = partial(intended_starts_s, arguments.arrival, arguments.rate, arguments.seed) if arguments.rate else None
    return LoadPlan(
        starts_s=starts,
        at_recorded_times=(arguments.speed or 1.0) if recorded else 0.0,
        conversation_limit=arguments.concurrency or (_OPEN_LIMIT if open_loop else _USERS),
        request_limit=arguments.requests,
        duration_s=arguments.duration_s,
        think_s=arguments.think_time_s,
        prompt_tokens_max=arguments.max_prompt_tokens,
        api=arguments.api,
        model=model,
        extra_body=arguments.extra_body,
        seed=arguments.seed,
    )


# Types of options; argparse names the option and says the message


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be > 0, got {text}")
    return value


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be >= 0, got {text}")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text}")
    return value


def _count_or_none(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be >= 0, got {text}")
    return value


def _span(text: str) -> Span:
    try:
        return span_from_text(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"want N or LOW:HIGH, got {text}") from error


def _ids(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not 0 <= int(low) < int(high) <= 1 << 31:
        raise argparse.ArgumentTypeError(f"want LOW:HIGH with 0 <= LOW < HIGH, got {text}")
    return int(low), int(high)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("want a JSON object")
    return value


def _limits(text: str) -> dict[str, float]:
    limits = {}
    for part in text.split(","):
        found = re.fullmatch(r"(\w+)=(\d+(?:\.\d+)?)(ms|s)", part.strip())
        if not found or found[1] not in LIMITED:
            raise argparse.ArgumentTypeError(f"want {'|'.join(LIMITED)}=NUMBERms or s, got {part}")
        limits[found[1]] = float(found[2]) / (1000 if found[3] == "ms" else 1)
    return limits
