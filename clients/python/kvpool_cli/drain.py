"""`kvpool node drain NODE`: move a pagestore's pages to others and end its lease."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvpool.client.pagestore_control import DrainProgress
from kvpool.core.cluster import LiveNode, NodeInfo
from kvpool.core.errors import KvPoolError
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, CommandFailed
from kvpool_cli.options import duration_option
from kvpool_cli.output import print_json, say, show
from kvpool_cli.quantities import size
from kvpool_cli.targets import (
    Target,
    describe,
    find_target,
    live_pagestores,
    open_index,
    open_pagestore,
    run,
)

_SHOWN_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """How a drain, or the end of one, went. progress: the last report; error: why it did not go to its end."""

    node: LiveNode
    was_cancelled: bool
    progress: DrainProgress | None
    error: KvPoolError | None = None

    @property
    def is_done(self) -> bool:
        """Whether the pagestore did all of what was asked."""
        progress = self.progress
        return self.error is None and progress is not None and progress.done and not progress.remaining_chunk_count


def drain(
    common: Common,
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="Node id (its beginning), host id or endpoint; see cluster status.")
    ],
    cancel: Annotated[
        bool, typer.Option("--cancel", help="End a drain that has not ended: take new pages again.")
    ] = False,
    timeout: Annotated[float | None, duration_option("--timeout", "Give up then (default: never).")] = None,
) -> int:
    """Move a pagestore's pages to others, then end its lease.

    Exit code 1 unless every page has another live copy. Ending the command pauses the drain.
    """
    drained = run(_drain(find_target(common), node, cancel, timeout))
    if common.json:
        print_json(to_document(drained))
        return EXIT_OK if drained.is_done else EXIT_FAILED
    if drained.error is not None:
        raise drained.error
    if drained.progress is None or not drained.progress.done:
        raise CommandFailed("the pagestore ended the drain without saying why; call again to go on")
    if drained.was_cancelled:
        show(f"{drained.node.info.node_id.hex()[:8]} takes new pages again")
        return EXIT_OK
    show(_line(drained.node.info, drained.progress))
    show("every page has another live copy and the lease has ended; the process serves reads until it is stopped")
    return EXIT_OK if drained.is_done else EXIT_FAILED


async def _drain(target: Target, name: str, cancel: bool, timeout_s: float | None) -> Drained:
    if not name:
        raise CommandFailed("name the pagestore to drain; `kvpool cluster status` has them all")
    async with open_index(target) as index:
        node = (await live_pagestores(index, name))[0]
    shown_s = float("-inf")
    progress: DrainProgress | None = None
    error: KvPoolError | None = None
    try:
        async with (
            open_pagestore(target, node.info.endpoint) as pagestore,
            aclosing(pagestore.drain(cancel=cancel, timeout_s=timeout_s)) as reports,
        ):
            async for progress in reports:
                now_s = asyncio.get_running_loop().time()
                if not cancel and not progress.done and now_s - shown_s >= _SHOWN_EVERY_S:
                    shown_s = now_s
                    say(_line(node.info, progress))
    except KvPoolError as failure:
        error = failure
    return Drained(node=node, was_cancelled=cancel, progress=progress, error=error)


def to_document(drained: Drained) -> dict[str, Any]:
    """The document of `--json`."""
    progress = drained.progress
    counts = {
        "cancelled": drained.was_cancelled,
        "done": drained.is_done,
        "moved_pages": progress.moved_page_count if progress else 0,
        "moved_bytes": progress.moved_bytes if progress else 0,
        "kept_pages": progress.kept_page_count if progress else 0,
        "remaining_chunks": progress.remaining_chunk_count if progress else 0,
    }
    return {"version": 1, "nodes": [describe(drained.node, drained.error) | counts]}


def _line(node: NodeInfo, progress: DrainProgress) -> str:
    return (
        f"{node.node_id.hex()[:8]}: {progress.moved_page_count} pages ({size(progress.moved_bytes)}) moved, "
        f"{progress.kept_page_count} had another copy, {progress.remaining_chunk_count} chunks left"
    )
