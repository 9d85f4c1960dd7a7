"""`kvpool drain NODE`: move a pagestore's pages to others and end its lease."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import aclosing

from kvpool.cli.output import EXIT_FAILED, EXIT_OK, CommandFailed, size
from kvpool.cli.targets import Target, add_target, find_target, live_pagestores, open_index, open_pagestore, run
from kvpool.client.pagestore_control import DrainProgress
from kvpool.core.cluster import NodeInfo

_SHOWN_EVERY_S = 1.0


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool drain`."""
    add_target(parser)
    parser.add_argument(
        "node",
        metavar="NODE",
        help="its node id (the beginning is enough), host id or endpoint, as `kvpool status` has",
    )
    parser.add_argument("--cancel", action="store_true", help="end a drain that has not ended: take new pages again")
    parser.add_argument("--timeout", type=float, default=0.0, metavar="SECONDS", help="give up then (default: never)")
    parser.set_defaults(run=run_drain)


def run_drain(arguments: argparse.Namespace) -> int:
    """Drain one pagestore; exit code 1 unless every page has another live copy. Ending the command pauses the drain."""
    return run(_drain(find_target(arguments), arguments.node, arguments.cancel, arguments.timeout or None))


async def _drain(target: Target, name: str, cancel: bool, timeout_s: float | None) -> int:
    if not name:
        raise CommandFailed("name the pagestore to drain; `kvpool status` has them all")
    async with open_index(target) as index:
        node = (await live_pagestores(index, name))[0].info
    shown_s = float("-inf")
    progress: DrainProgress | None = None
    async with open_pagestore(target, node.endpoint) as pagestore:
        async with aclosing(pagestore.drain(cancel=cancel, timeout_s=timeout_s)) as told:
            async for progress in told:
                now_s = asyncio.get_running_loop().time()
                if not cancel and not progress.done and now_s - shown_s >= _SHOWN_EVERY_S:
                    shown_s = now_s
                    print(_line(node, progress), file=sys.stderr, flush=True)
    if progress is None or not progress.done:
        raise CommandFailed("the pagestore ended the drain without saying why; call again to go on")
    if cancel:
        print(f"{node.node_id.hex()[:8]} takes new pages again")
        return EXIT_OK
    print(_line(node, progress))
    print("every page has another live copy and the lease has ended; the process serves reads until it is stopped")
    return EXIT_OK if not progress.remaining_chunk_count else EXIT_FAILED


def _line(node: NodeInfo, progress: DrainProgress) -> str:
    return (
        f"{node.node_id.hex()[:8]}: {progress.moved_page_count} pages ({size(progress.moved_bytes)}) moved, "
        f"{progress.kept_page_count} had another copy, {progress.remaining_chunk_count} chunks left"
    )
