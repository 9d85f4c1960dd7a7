"""`kvpool cache evict`: give up the chunks of a prompt, or of a keyspace, before their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from kvpool.client.pagestore_control import EvictOutcome, EvictPreview, PageStoreControl
from kvpool.core.cluster import LiveNode
from kvpool.core.errors import KvPoolError, NotServed
from kvpool_cli.chains import chain_of
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, UsageFailed
from kvpool_cli.options import DryRun, Keyspace, Node, Yes
from kvpool_cli.output import confirm, print_json, show, stack, table
from kvpool_cli.prompts import TokenSource
from kvpool_cli.quantities import size
from kvpool_cli.targets import (
    Target,
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command's options. tokens: None for the whole keyspace."""

    keyspace: str
    tokens: Sequence[int] | None
    from_token: int
    node: str
    staging_only: bool
    with_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to evict, and where. batches: of chunk hashes; None is the whole keyspace."""

    keyspace: bytes
    batches: Sequence[list[bytes] | None]
    nodes: Sequence[LiveNode]
    staging_only: bool
    with_pinned: bool


def evict(
    common: Common,
    prompt: TokenSource,
    keyspace: Keyspace = "",
    whole_keyspace: Annotated[
        bool, typer.Option("--whole-keyspace", help="All chunks of --keyspace, instead of a FILE.")
    ] = False,
    from_token: Annotated[int, typer.Option(metavar="N", help="Leave the chunks before this token.")] = 0,
    node: Node = "",
    staging_only: Annotated[
        bool, typer.Option("--staging-only", help="Free memory: only pages that are also on disk.")
    ] = False,
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned pages too.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> int:
    """Evict the chunks of a prompt, or of a keyspace, on every pagestore or on one.

    Engines compute them again. Prompts that share a prefix share its chunks: --from-token leaves those that others
    need. With --node, copies on other nodes stay, and may be copied back.
    """
    if bool(prompt) == whole_keyspace:
        raise UsageFailed("name a FILE of tokens, or --whole-keyspace with --keyspace; not both")
    if whole_keyspace and not keyspace:
        raise UsageFailed("--whole-keyspace needs --keyspace NAME; `kvpool cluster status` has the names")
    tokens = prompt.one() if prompt else None
    target = find_target(common)
    wanted = Wanted(keyspace, tokens, from_token, node, staging_only=staging_only, with_pinned=pinned)
    if dry_run:
        previews = run(_preview(target, wanted))
        if common.json:
            print_json(preview_document(previews))
        else:
            show(render_preview(previews))
        return _exit_code(previews)
    if not staging_only:
        what = f"all chunks of keyspace {keyspace}" if tokens is None else f"the chunks of {prompt}"
        confirm(f"Evict {what} from {node or 'every pagestore'}? Engines compute them again.", yes=yes)
    answers = run(_evict(target, wanted))
    if common.json:
        print_json(to_document(answers))
    else:
        show(render(answers))
    return _exit_code(answers)


def _exit_code(answers: Answers | Previews) -> int:
    return EXIT_FAILED if any(isinstance(answer, KvPoolError) for _, answer in answers) else EXIT_OK


async def _asked(target: Target, wanted: Wanted) -> Asked:
    batches: list[list[bytes] | None]
    async with open_index(target) as index:
        if wanted.tokens is None:
            keyspace, batches = (await keyspace_of_name(index, wanted.keyspace)).keyspace, [None]
        else:
            chain = await chain_of(index, wanted.keyspace, wanted.tokens)
            chunk_tokens = chain.named.spec.chunk_tokens
            keyspace = chain.opened.keyspace
            batches = list(chain.batches(first_chunk=-(-max(0, wanted.from_token) // chunk_tokens)))
        return Asked(
            keyspace=keyspace,
            batches=batches,
            nodes=await live_pagestores(index, wanted.node),
            staging_only=wanted.staging_only,
            with_pinned=wanted.with_pinned,
        )


async def _evict(target: Target, wanted: Wanted) -> Answers:
    asked = await _asked(target, wanted)

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


async def _preview(target: Target, wanted: Wanted) -> Previews:
    asked = await _asked(target, wanted)

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


def render(answers: Answers) -> RenderableType:
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
    parts: list[RenderableType | str] = [
        table(["pagestore", "host", "evicted", "pinned", "not durable", "error"], rows, right=[2, 3, 4])
    ]
    done = [answer for _, answer in answers if isinstance(answer, EvictOutcome)]
    if any(one.pinned_count for one in done):
        parts.append("pinned pages stayed; `kvpool cache unpin` them, or give --pinned")
    if any(one.undurable_count for one in done):
        parts.append(
            "pages that are in memory only stayed; `kvpool cache flush` first, or evict without --staging-only"
        )
    return stack(*parts)


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


def render_preview(previews: Previews) -> RenderableType:
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
    return stack(
        table(headers, rows, right=[2, 3, 4, 5, 6, 7]),
        f"would evict {sum(one.outcome.page_count for one in would)} pages "
        f"({memory} of memory, {disk} of disk) on {len(concerned)} of {len(previews)} pagestores; nothing was changed",
    )


def _why_not(error: KvPoolError) -> str:
    if isinstance(error, NotServed):  # gRPC's own words say nothing to an operator
        return "this pagestore is of an earlier release and cannot tell; upgrade it first"
    return said(error)
