"""`kvpool pin` and `kvpool unpin`: keep the chunks of a prompt from being evicted, for a time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import LiveNode
from kvpool.core.errors import KvPoolError
from kvpool.core.retention import PINNED_FOREVER_US
from kvpool_cli.chains import Chain, add_tokens, chain_of, read_tokens
from kvpool_cli.output import EXIT_FAILED, EXIT_OK, CommandFailed, duration_from_text, print_json, show, table
from kvpool_cli.pin_list import list_pins, wall_time
from kvpool_cli.targets import Target, add_target, find_target, live_pagestores, on_pagestores, open_index, run, said

CALL_TIMEOUT_S = 30.0


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool pin`."""
    parser.description = (
        "Keep the chunks of a token sequence from being evicted. A pin is durable for durable pages, ends by itself, "
        "and counts against the node's max_pinned_share; it does not bring pages that nobody holds."
    )
    add_target(parser)
    add_tokens(parser, nargs="?")
    parser.add_argument("--list", action="store_true", help="show what is pinned, instead of a FILE")
    until = parser.add_mutually_exclusive_group()
    until.add_argument(
        "--for", dest="for_s", type=duration_from_text, default=86_400.0, metavar="TIME", help="such as 12h; default 1d"
    )
    until.add_argument("--forever", action="store_true", help="until `kvpool unpin`")
    parser.add_argument("--json", action="store_true", help="a document for programs")
    parser.set_defaults(run=run_pin)


def declare_unpin(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool unpin`."""
    parser.description = "End the pins of a token sequence's chunks, also those that were stored with a pin."
    add_target(parser)
    add_tokens(parser)
    parser.add_argument("--json", action="store_true", help="a document for programs")
    parser.set_defaults(run=run_pin, for_s=0.0, forever=False, list=False)


def run_pin(arguments: argparse.Namespace) -> int:
    """Pin on every pagestore; exit code 1 unless all did it and anything was there."""
    if bool(arguments.tokens) == arguments.list:
        raise CommandFailed("name a FILE of tokens to pin, or give --list; not both")
    if arguments.list:
        return list_pins(arguments)
    until_us = PINNED_FOREVER_US if arguments.forever else int((time.time() + arguments.for_s) * 1e6)
    if not arguments.for_s:
        until_us = 0
    tokens = read_tokens(arguments.tokens)
    pinned = run(_pin(find_target(arguments), arguments.keyspace, tokens, until_us))
    if arguments.json:
        print_json(to_document(pinned))
    else:
        show(render(pinned))
    return EXIT_OK if pinned.page_count and not pinned.failed else EXIT_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Per node the pages that have the pin now, or why not; until_us 0: they have none."""

    chain: Chain
    until_us: int
    answers: Sequence[tuple[LiveNode, int | KvPoolError]]

    @property
    def page_count(self) -> int:
        """Of all nodes."""
        return sum(answer for _, answer in self.answers if isinstance(answer, int))

    @property
    def failed(self) -> bool:
        """Whether any node did not do it."""
        return any(isinstance(answer, KvPoolError) for _, answer in self.answers)


async def _pin(target: Target, keyspace_name: str, tokens: Sequence[int], until_us: int) -> Pinned:
    async with open_index(target) as index:
        chain = await chain_of(index, keyspace_name, tokens)
        nodes = await live_pagestores(index)

    async def pin(control: PageStoreControl) -> int:
        keyspace = chain.opened.keyspace
        return sum(
            [await control.pin(keyspace, batch, until_us, timeout_s=CALL_TIMEOUT_S) for batch in chain.batches()]
        )

    return Pinned(chain=chain, until_us=until_us, answers=await on_pagestores(target, nodes, pin))


def to_document(pinned: Pinned) -> dict[str, Any]:
    """The document of `--json`."""
    return {
        "version": 1,
        "keyspace": pinned.chain.named.name,
        "chunks": len(pinned.chain.hashes),
        "pinned_until_us": pinned.until_us,
        "nodes": [
            {
                "node_id": node.info.node_id.hex(),
                "host_id": node.info.host_id,
                "pages": answer if isinstance(answer, int) else 0,
                "error": said(answer) if isinstance(answer, KvPoolError) else "",
            }
            for node, answer in pinned.answers
        ],
    }


def render(pinned: Pinned) -> str:
    """A table for people."""
    rows = [
        [
            node.info.node_id.hex()[:8],
            node.info.host_id,
            *(["-", said(answer)] if isinstance(answer, KvPoolError) else [answer, ""]),
        ]
        for node, answer in pinned.answers
    ]
    what = f"{len(pinned.chain.hashes)} chunks of keyspace {pinned.chain.named.name}"
    if not pinned.page_count:
        lacking = "see the errors" if pinned.failed else "let an engine store them first"
        head = f"nothing was done: no node told that it holds any of the {what}; {lacking}"
    elif not pinned.until_us:
        head = f"{what} are not pinned any more"
    elif pinned.until_us == PINNED_FOREVER_US:
        head = f"{what} are pinned until `kvpool unpin`"
    else:
        head = f"{what} are pinned until {wall_time(pinned.until_us)}"
    return f"{head}\n\n{table(['pagestore', 'host', 'pages', 'error'], rows, right=[2])}"
