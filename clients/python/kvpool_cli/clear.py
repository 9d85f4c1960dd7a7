"""`kvpool cache clear`: drop the pages of a keyspace, or all."""

from __future__ import annotations

from kvpool.client.pagestore_control import EvictPreview, PageStoreControl
from kvpool_cli.answers import exit_code, nodes_document, nodes_table
from kvpool_cli.common import Common
from kvpool_cli.evict import Previews, preview_document, render_preview, sum_previews
from kvpool_cli.options import DryRun, OneKeyspace, Yes
from kvpool_cli.output import confirm, print_json, show
from kvpool_cli.targets import (
    Target,
    find_target,
    keyspaces_of_name,
    live_pagestores,
    on_every_pagestore,
    on_pagestores,
    open_index,
    run,
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
        return exit_code(previews)
    what = f"all pages of keyspace {keyspace}" if keyspace else "all pages of all keyspaces"
    confirm(f"Drop {what} from every pagestore? Engines compute them again.", yes=yes)

    async def drop(control: PageStoreControl, keyspace_id: bytes) -> int:
        return await control.clear(keyspace_id, timeout_s=CLEAR_TIMEOUT_S)

    answers = run(on_every_pagestore(target, keyspace, drop))
    if common.json:
        print_json({"version": 1, "nodes": nodes_document(answers, lambda pages: {"pages": pages}, 0)})
    else:
        show(nodes_table(answers, ["pages"], lambda pages: [pages]))
    return exit_code(answers)


async def _preview(target: Target, keyspace_name: str) -> Previews:
    async with open_index(target) as index:
        named = await keyspaces_of_name(index, keyspace_name)
        nodes = await live_pagestores(index)

    async def preview(control: PageStoreControl) -> EvictPreview:
        return sum_previews(
            [
                await control.preview_evict(one.keyspace, None, with_pinned=True, timeout_s=CLEAR_TIMEOUT_S)
                for one in named
            ]
        )

    return await on_pagestores(target, nodes, preview)
