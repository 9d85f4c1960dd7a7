"""`kvpool evict`: give up the chunks of a prompt, or of a keyspace, before their time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.client.pagestore_control import EvictOutcome, EvictPreview, PageStoreControl
from kvpool.core.cluster import LiveNode
from kvpool.core.errors import KvPoolError, NotServed
from kvpool_cli.chains import add_tokens, chain_of, read_tokens
from kvpool_cli.output import EXIT_FAILED, EXIT_OK, CommandFailed, confirm, print_json, show, size, table
from kvpool_cli.targets import (
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

CALL_TIMEOUT_S = 120.0

Answers = Sequence[tuple[LiveNode, EvictOutcome | KvPoolError]]
Previews = Sequence[tuple[LiveNode, EvictPreview | KvPoolError]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to evict, and where. batches: of chunk hashes; None is the whole keyspace."""

    keyspace: bytes
    batches: Sequence[list[bytes] | None]
    nodes: Sequence[LiveNode]
    staging_only: bool
    with_pinned: bool


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
    parser.add_argument("--dry-run", action="store_true", help="only tell what would go; nothing is changed")
    parser.add_argument("--yes", action="store_true", help="do not ask; needed without a terminal")
    parser.add_argument("--json", action="store_true", help="a document for programs")
    parser.set_defaults(run=run_evict)


def run_evict(arguments: argparse.Namespace) -> int:
    """Evict; exit code 1 unless every node that was asked did it. Asks first; without a terminal it wants --yes."""
    if bool(arguments.tokens) == arguments.whole_keyspace:
        raise CommandFailed("name a FILE of tokens, or --whole-keyspace with --keyspace; not both")
    if arguments.whole_keyspace and not arguments.keyspace:
        raise CommandFailed("--whole-keyspace needs --keyspace NAME; `kvpool status` has the names")
    tokens = read_tokens(arguments.tokens) if arguments.tokens else None
    target = find_target(arguments)
    if arguments.dry_run:
        previews = run(_preview(target, arguments, tokens))
        if arguments.json:
            print_json(preview_document(previews))
        else:
            show(render_preview(previews))
        return _exit_code(previews)
    if not arguments.staging_only:
        what = f"all chunks of keyspace {arguments.keyspace}" if tokens is None else f"the chunks of {arguments.tokens}"
        confirm(
            f"Evict {what} from {arguments.node or 'every pagestore'}? Engines compute them again.", yes=arguments.yes
        )
    answers = run(_evict(target, arguments, tokens))
    if arguments.json:
        print_json(to_document(answers))
    else:
        show(render(answers))
    return _exit_code(answers)


def _exit_code(answers: Answers | Previews) -> int:
    return EXIT_FAILED if any(isinstance(answer, KvPoolError) for _, answer in answers) else EXIT_OK


async def _asked(target: Target, arguments: argparse.Namespace, tokens: Sequence[int] | None) -> Asked:
    batches: list[list[bytes] | None]
    async with open_index(target) as index:
        if tokens is None:
            keyspace, batches = (await keyspace_of_name(index, arguments.keyspace)).keyspace, [None]
        else:
            chain = await chain_of(index, arguments.keyspace, tokens)
            chunk_tokens = chain.named.spec.chunk_tokens
            keyspace = chain.opened.keyspace
            batches = list(chain.batches(first_chunk=-(-max(0, arguments.from_token) // chunk_tokens)))
        return Asked(
            keyspace=keyspace,
            batches=batches,
            nodes=await live_pagestores(index, arguments.node),
            staging_only=arguments.staging_only,
            with_pinned=arguments.pinned,
        )


async def _evict(target: Target, arguments: argparse.Namespace, tokens: Sequence[int] | None) -> Answers:
    asked = await _asked(target, arguments, tokens)

    async def evict(control: PageStoreControl) -> EvictOutcome:
        return _sum(
            [
                await control.evict(
                    asked.keyspace,
                    batch,
                    staging_only=asked.staging_only,
                    with_pinned=asked.with_pinned,
                    timeout_s=CALL_TIMEOUT_S,
                )
                for batch in asked.batches
            ]
        )

    return await on_pagestores(target, asked.nodes, evict)


async def _preview(target: Target, arguments: argparse.Namespace, tokens: Sequence[int] | None) -> Previews:
    asked = await _asked(target, arguments, tokens)

    async def preview(control: PageStoreControl) -> EvictPreview:
        return sum_previews(
            [
                await control.preview_evict(
                    asked.keyspace,
                    batch,
                    staging_only=asked.staging_only,
                    with_pinned=asked.with_pinned,
                    timeout_s=CALL_TIMEOUT_S,
                )
                for batch in asked.batches
            ]
        )

    return await on_pagestores(target, asked.nodes, preview)


def _sum(outcomes: Sequence[EvictOutcome]) -> EvictOutcome:
    return EvictOutcome(
        page_count=sum(one.page_count for one in outcomes),
        pinned_count=sum(one.pinned_count for one in outcomes),
        undurable_count=sum(one.undurable_count for one in outcomes),
    )


def sum_previews(previews: Sequence[EvictPreview]) -> EvictPreview:
    """One preview of several parts."""
    return EvictPreview(
        outcome=_sum([one.outcome for one in previews]),
        chunk_count=sum(one.chunk_count for one in previews),
        staging_bytes=sum(one.staging_bytes for one in previews),
        disk_bytes=sum(one.disk_bytes for one in previews),
    )


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


def preview_document(previews: Previews) -> dict[str, Any]:
    """The document of `--dry-run --json`: no key of it is one of an eviction that was done."""
    nodes = []
    for node, answer in previews:
        would = answer if isinstance(answer, EvictPreview) else None
        nodes.append(
            {
                "node_id": node.info.node_id.hex(),
                "host_id": node.info.host_id,
                "would_evict_chunks": would.chunk_count if would else 0,
                "would_evict_pages": would.outcome.page_count if would else 0,
                "would_free_staging_bytes": would.staging_bytes if would else 0,
                "would_free_disk_bytes": would.disk_bytes if would else 0,
                "would_keep_pinned_pages": would.outcome.pinned_count if would else 0,
                "would_keep_undurable_pages": would.outcome.undurable_count if would else 0,
                "error": _why_not(answer) if isinstance(answer, KvPoolError) else "",
            }
        )
    return {"version": 1, "dry_run": True, "nodes": nodes}


def render_preview(previews: Previews) -> str:
    """A table for people. Copies of a chunk count on each node that has one."""
    headers = ["pagestore", "host", "chunks", "pages", "memory", "disk", "pinned", "not durable", "error"]
    rows = []
    for node, answer in previews:
        if isinstance(answer, EvictPreview):
            outcome = answer.outcome
            freed = size(answer.staging_bytes), size(answer.disk_bytes)
            stays = outcome.pinned_count, outcome.undurable_count, ""
            cells: tuple[object, ...] = (answer.chunk_count, outcome.page_count, *freed, *stays)
        else:
            cells = (*["-"] * 6, _why_not(answer))
        rows.append([node.info.node_id.hex()[:8], node.info.host_id, *cells])
    would = [answer for _, answer in previews if isinstance(answer, EvictPreview)]
    concerned = [one for one in would if one.outcome.page_count]
    memory, disk = size(sum(one.staging_bytes for one in would)), size(sum(one.disk_bytes for one in would))
    return (
        f"{table(headers, rows, right=[2, 3, 4, 5, 6, 7])}\n"
        f"would evict {sum(one.outcome.page_count for one in would)} pages "
        f"({memory} of memory, {disk} of disk) on {len(concerned)} of {len(previews)} pagestores; nothing was changed"
    )


def _why_not(error: KvPoolError) -> str:
    if isinstance(error, NotServed):  # gRPC's own words say nothing to an operator
        return "this pagestore is of an earlier release and cannot tell; upgrade it first"
    return said(error)
