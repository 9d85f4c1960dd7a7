"""`kvpool evict`: give up the chunks of a prompt, or of a keyspace, before their time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from kvpool.cli.chains import add_tokens, chain_of, read_tokens
from kvpool.cli.output import EXIT_FAILED, EXIT_OK, CommandFailed, ask, print_json, table
from kvpool.cli.targets import (
    Target,
    add_target,
    find_target,
    keyspace_of_name,
    live_pagestores,
    on_pagestores,
    open_index,
    run,
    said,
)
from kvpool.client.pagestore_control import EvictOutcome, PageStoreControl
from kvpool.core.cluster import LiveNode
from kvpool.core.errors import KvPoolError

CALL_TIMEOUT_S = 120.0

Answers = Sequence[tuple[LiveNode, EvictOutcome | KvPoolError]]


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool evict`."""
    parser.description = (
        "Give up chunks on every pagestore, or on one. Engines compute them again. Prompts that begin alike share "
        "their first chunks: --from-token leaves those that others need. Of chunks with copies on several nodes "
        "(replicas), those on the other nodes stay when --node names one, and may be copied back."
    )
    add_target(parser)
    add_tokens(parser, nargs="?")
    parser.add_argument("--whole-keyspace", action="store_true", help="all chunks of --keyspace, instead of a FILE")
    parser.add_argument("--from-token", type=int, default=0, metavar="N", help="leave the chunks before this token")
    parser.add_argument("--node", default="", metavar="NODE", help="only this one: node id, host id or endpoint")
    parser.add_argument("--staging-only", action="store_true", help="free memory: only pages that are also on disk")
    parser.add_argument("--pinned", action="store_true", help="pinned pages too")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="a document for programs")
    parser.set_defaults(run=run_evict)


def run_evict(arguments: argparse.Namespace) -> int:
    """Evict; exit code 1 unless every node that was asked did it. A person at a terminal is asked first."""
    if bool(arguments.tokens) == arguments.whole_keyspace:
        raise CommandFailed("name a FILE of tokens, or --whole-keyspace with --keyspace; not both")
    if arguments.whole_keyspace and not arguments.keyspace:
        raise CommandFailed("--whole-keyspace needs --keyspace NAME; `kvpool status` has the names")
    tokens = read_tokens(arguments.tokens) if arguments.tokens else None
    if not arguments.staging_only:
        what = f"all chunks of keyspace {arguments.keyspace}" if tokens is None else f"the chunks of {arguments.tokens}"
        ask(f"Evict {what} from {arguments.node or 'every pagestore'}? Engines compute them again.", yes=arguments.yes)
    answers = run(_evict(find_target(arguments), arguments, tokens))
    if arguments.json:
        print_json(to_document(answers))
    else:
        print(render(answers))
    return EXIT_FAILED if any(isinstance(answer, KvPoolError) for _, answer in answers) else EXIT_OK


async def _evict(target: Target, arguments: argparse.Namespace, tokens: Sequence[int] | None) -> Answers:
    batches: list[list[bytes] | None]
    async with open_index(target) as index:
        if tokens is None:
            keyspace, batches = (await keyspace_of_name(index, arguments.keyspace)).keyspace, [None]
        else:
            chain = await chain_of(index, arguments.keyspace, tokens)
            chunk_tokens = chain.named.spec.chunk_tokens
            keyspace = chain.opened.keyspace
            batches = list(chain.batches(first_chunk=-(-max(0, arguments.from_token) // chunk_tokens)))
        nodes = await live_pagestores(index, arguments.node)

    async def evict(control: PageStoreControl) -> EvictOutcome:
        outcomes = [
            await control.evict(
                keyspace,
                batch,
                staging_only=arguments.staging_only,
                with_pinned=arguments.pinned,
                timeout_s=CALL_TIMEOUT_S,
            )
            for batch in batches
        ]
        return EvictOutcome(
            page_count=sum(one.page_count for one in outcomes),
            pinned_count=sum(one.pinned_count for one in outcomes),
            undurable_count=sum(one.undurable_count for one in outcomes),
        )

    return await on_pagestores(target, nodes, evict)


def to_document(answers: Answers) -> dict[str, Any]:
    """The document of `--json`."""
    nodes = []
    for node, answer in answers:
        done = answer if isinstance(answer, EvictOutcome) else None
        nodes.append(
            {
                "node_id": node.info.node_id.hex(),
                "host_id": node.info.host_id,
                "evicted_pages": done.page_count if done else 0,
                "pinned_pages": done.pinned_count if done else 0,
                "undurable_pages": done.undurable_count if done else 0,
                "error": said(answer) if isinstance(answer, KvPoolError) else "",
            }
        )
    return {"version": 1, "nodes": nodes}


def render(answers: Answers) -> str:
    """A table for people, with what to do about pages that stayed."""
    rows = [
        [
            node.info.node_id.hex()[:8],
            node.info.host_id,
            *(
                [answer.page_count, answer.pinned_count, answer.undurable_count, ""]
                if isinstance(answer, EvictOutcome)
                else ["-", "-", "-", said(answer)]
            ),
        ]
        for node, answer in answers
    ]
    parts = [table(["pagestore", "host", "evicted", "pinned", "not durable", "error"], rows, right=[2, 3, 4])]
    done = [answer for _, answer in answers if isinstance(answer, EvictOutcome)]
    if any(one.pinned_count for one in done):
        parts.append("pinned pages stayed; `kvpool unpin` them, or give --pinned")
    if any(one.undurable_count for one in done):
        parts.append("pages that are in memory only stayed; `kvpool flush` first, or evict without --staging-only")
    return "\n".join(parts)
