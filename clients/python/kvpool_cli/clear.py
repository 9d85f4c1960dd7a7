"""`kvpool cache clear`: drop the pages of a keyspace, or all."""

from __future__ import annotations

from kvpool.client.pagestore_control import EvictPreview, PageStoreControl
from kvpool.core.errors import KvPoolError
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK
from kvpool_cli.evict import Previews, preview_document, render_preview, sum_previews
from kvpool_cli.options import DryRun, OneKeyspace, Yes
from kvpool_cli.output import confirm, print_json, show, table
from kvpool_cli.targets import (
    Target,
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


def clear(common: Common, keyspace: OneKeyspace = "", dry_run: DryRun = False, yes: Yes = False) -> int:
    """Drop the pages of a keyspace, or of all. Engines compute them again."""
    target = find_target(common)
    if dry_run:
        previews = run(_preview(target, keyspace))
        if common.json:
            print_json(preview_document(previews))
        else:
            show(render_preview(previews))
        return EXIT_FAILED if any(isinstance(answer, KvPoolError) for _, answer in previews) else EXIT_OK
    what = f"all pages of keyspace {keyspace}" if keyspace else "all pages of all keyspaces"
    confirm(f"Drop {what} from every pagestore? Engines compute them again.", yes=yes)

    async def drop(control: PageStoreControl, keyspace_id: bytes) -> int:
        return await control.clear(keyspace_id, timeout_s=CLEAR_TIMEOUT_S)

    answers = run(on_every_pagestore(target, keyspace, drop))
    if common.json:
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
