"""`kvpool clear`: drop the pages of a keyspace, or all."""

from __future__ import annotations

import argparse

from kvpool.client.pagestore_control import EvictPreview, PageStoreControl
from kvpool.core.errors import KvPoolError
from kvpool_cli.evict import Previews, preview_document, render_preview, sum_previews
from kvpool_cli.output import EXIT_FAILED, EXIT_OK, confirm, print_json, show, table
from kvpool_cli.targets import (
    Target,
    add_target,
    describe,
    find_target,
    keyspace_of_name,
    live_pagestores,
    on_every_pagestore,
    on_pagestores,
    open_index,
    run,
    said,
)

CLEAR_TIMEOUT_S = 60.0


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool clear`."""
    add_target(parser)
    parser.add_argument("--keyspace", default="", metavar="NAME", help="only this one (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be dropped; nothing is changed")
    parser.add_argument("--yes", action="store_true", help="do not ask; needed without a terminal")
    parser.add_argument("--json", action="store_true", help="a document for programs")
    parser.set_defaults(run=run_clear)


def run_clear(arguments: argparse.Namespace) -> int:
    """Clear every pagestore; exit code 1 unless all did it. Asks first; without a terminal it wants --yes."""
    target = find_target(arguments)
    if arguments.dry_run:
        previews = run(_preview(target, arguments.keyspace))
        if arguments.json:
            print_json(preview_document(previews))
        else:
            show(render_preview(previews))
        return EXIT_FAILED if any(isinstance(answer, KvPoolError) for _, answer in previews) else EXIT_OK
    what = f"all pages of keyspace {arguments.keyspace}" if arguments.keyspace else "all pages of all keyspaces"
    confirm(f"Drop {what} from every pagestore? Engines compute them again.", yes=arguments.yes)

    async def clear(control: PageStoreControl, keyspace: bytes) -> int:
        return await control.clear(keyspace, timeout_s=CLEAR_TIMEOUT_S)

    answers = run(on_every_pagestore(target, arguments.keyspace, clear))
    if arguments.json:
        nodes = [
            describe(node, answer) | {"pages": 0 if isinstance(answer, KvPoolError) else answer}
            for node, answer in answers
        ]
        print_json({"version": 1, "nodes": nodes})
        return EXIT_FAILED if any(node["error"] for node in nodes) else EXIT_OK
    rows = [
        [
            node.info.node_id.hex()[:8],
            node.info.host_id,
            *(["-", said(page_count)] if isinstance(page_count, KvPoolError) else [page_count, ""]),
        ]
        for node, page_count in answers
    ]
    show(table(["pagestore", "host", "pages", "error"], rows, right=[2]))
    return EXIT_FAILED if any(isinstance(answer, KvPoolError) for _, answer in answers) else EXIT_OK


async def _preview(target: Target, keyspace_name: str) -> Previews:
    async with open_index(target) as index:
        named = [await keyspace_of_name(index, keyspace_name)] if keyspace_name else await index.list_keyspaces()
        nodes = await live_pagestores(index)

    async def preview(control: PageStoreControl) -> EvictPreview:
        return sum_previews(
            [
                await control.preview_evict(one.keyspace, None, with_pinned=True, timeout_s=CLEAR_TIMEOUT_S)
                for one in named
            ]
        )

    return await on_pagestores(target, nodes, preview)
