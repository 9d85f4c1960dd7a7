"""`kvpool cache evict`: give up the chunks of a prompt, or of a keyspace, before their time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer
from rich.console import RenderableType

from kvpool.client.pagestore_control import EvictOutcome, EvictPreview, PageStoreControl
from kvpool.core.cluster import LiveNode
from kvpool.core.errors import KvPoolError
from kvpool_cli.answers import exit_code, nodes_document, nodes_table
from kvpool_cli.chains import chain_of
from kvpool_cli.common import Common
from kvpool_cli.errors import UsageFailed
from kvpool_cli.options import DryRun, Keyspace, Node, Yes
from kvpool_cli.output import confirm, print_json, show, stack
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
)

CALL_TIMEOUT_S = 120.0
OutcomeT = TypeVar("OutcomeT", EvictOutcome, EvictPreview)

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


def evict(
    common: Common,
    prompt: TokenSource,
    keyspace: Keyspace = "",
    whole_keyspace: Annotated[
        bool, typer.Option("--whole-keyspace", help="All chunks of --keyspace, instead of a FILE.")
    ] = False,
    from_token: Annotated[int, typer.Option(min=0, metavar="N", help="Leave the chunks before this token.")] = 0,
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
        previews = run(_on_batches(target, wanted, PageStoreControl.preview_evict, sum_previews))
        if common.json:
            print_json(preview_document(previews))
        else:
            show(render_preview(previews))
        return exit_code(previews)
    if not staging_only:
        what = f"all chunks of keyspace {keyspace}" if tokens is None else f"the chunks of {prompt}"
        confirm(f"Evict {what} from {node or 'every pagestore'}? Engines compute them again.", yes=yes)
    answers = run(_on_batches(target, wanted, PageStoreControl.evict, _sum))
    if common.json:
        print_json(to_document(answers))
    else:
        show(render(answers))
    return exit_code(answers)


async def _on_batches(
    target: Target,
    wanted: Wanted,
    call: Callable[..., Awaitable[OutcomeT]],
    add: Callable[[Sequence[OutcomeT]], OutcomeT],
) -> list[tuple[LiveNode, OutcomeT | KvPoolError]]:
    """Call each pagestore for as many chunks at a time as a call may name; `add` sums up what it answers."""
    batches: list[list[bytes] | None]
    async with open_index(target) as index:
        if wanted.tokens is None:
            keyspace, batches = (await keyspace_of_name(index, wanted.keyspace)).keyspace, [None]
        else:
            chain = await chain_of(index, wanted.keyspace, wanted.tokens)
            first_chunk = -(-wanted.from_token // chain.named.spec.chunk_tokens)
            keyspace, batches = chain.opened.keyspace, list(chain.batches(first_chunk))
        nodes = await live_pagestores(index, wanted.node)
    options = {"staging_only": wanted.staging_only, "with_pinned": wanted.with_pinned, "timeout_s": CALL_TIMEOUT_S}

    async def one(control: PageStoreControl) -> OutcomeT:
        return add([await call(control, keyspace, batch, **options) for batch in batches])

    return await on_pagestores(target, nodes, one)


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

    def counts(done: EvictOutcome) -> dict[str, int]:
        return {
            "evicted_pages": done.page_count,
            "pinned_pages": done.pinned_count,
            "undurable_pages": done.undurable_count,
        }

    return {"version": 1, "nodes": nodes_document(answers, counts, _sum([]))}


def render(answers: Answers) -> RenderableType:
    """A table for people, with what to do about pages that stayed."""

    def cells(done: EvictOutcome) -> tuple[int, ...]:
        return done.page_count, done.pinned_count, done.undurable_count

    parts: list[RenderableType | str] = [nodes_table(answers, ["evicted", "pinned", "not durable"], cells)]
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

    def counts(would: EvictPreview) -> dict[str, int]:
        return {
            "would_evict_chunks": would.chunk_count,
            "would_evict_pages": would.outcome.page_count,
            "would_free_staging_bytes": would.staging_bytes,
            "would_free_disk_bytes": would.disk_bytes,
            "would_keep_pinned_pages": would.outcome.pinned_count,
            "would_keep_undurable_pages": would.outcome.undurable_count,
        }

    return {"version": 1, "dry_run": True, "nodes": nodes_document(previews, counts, sum_previews([]))}


def render_preview(previews: Previews) -> RenderableType:
    """A table for people. Copies of a chunk count on each node that has one."""

    def cells(would: EvictPreview) -> tuple[object, ...]:
        freed = size(would.staging_bytes), size(would.disk_bytes)
        return (
            would.chunk_count,
            would.outcome.page_count,
            *freed,
            would.outcome.pinned_count,
            would.outcome.undurable_count,
        )

    would = [answer for _, answer in previews if isinstance(answer, EvictPreview)]
    concerned = [one for one in would if one.outcome.page_count]
    every = sum_previews(would)
    return stack(
        nodes_table(previews, ["chunks", "pages", "memory", "disk", "pinned", "not durable"], cells),
        f"would evict {every.outcome.page_count} pages ({size(every.staging_bytes)} of memory, "
        f"{size(every.disk_bytes)} of disk) on {len(concerned)} of {len(previews)} pagestores; nothing was changed",
    )
