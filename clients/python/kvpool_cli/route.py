"""`kvpool cache route`: which hosts would serve a token sequence best, by what an engine there would find of it."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import RenderableType

from kvpool.core.cluster import ChainQuery, RouteAnswer
from kvpool_cli.chains import possibly_empty_chain_of
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_OK, CommandFailed
from kvpool_cli.options import Keyspace
from kvpool_cli.output import print_json, show, stack, table
from kvpool_cli.prompts import TokenSource
from kvpool_cli.targets import Target, find_target, open_index, run


def route(
    common: Common,
    prompt: TokenSource,
    keyspace: Keyspace = "",
    all_hosts: Annotated[bool, typer.Option("--all", help="Also hosts that hold nothing of the prefix.")] = False,
) -> int:
    """Rank hosts by what an engine there would find of a prompt, best first."""
    tokens = prompt.one()
    answer = run(look_up(find_target(common), keyspace, tokens, with_unmatched=all_hosts))
    if common.json:
        print_json(to_document(answer))
    else:
        show(render(answer))
    return EXIT_OK


async def look_up(target: Target, keyspace_name: str, tokens: list[int], *, with_unmatched: bool) -> RouteAnswer:
    """Ask for a route, by as much of the tokens as one question may name. Raises CommandFailed for no such keyspace."""
    async with open_index(target) as index:
        chain = await possibly_empty_chain_of(index, keyspace_name, tokens)
        if chain.pages > 1:
            raise CommandFailed(
                f"chunks of keyspace {chain.named.name} have {chain.pages} pages: name the keyspace of the model's "
                f"layers with full attention, which decide a route"
            )
        limit = (await index.get_info()).max_match_chunks
        query = ChainQuery(keyspace=chain.opened.keyspace, chunk_hashes=b"".join(chain.hashes[:limit]))
        return await index.route(query, with_unmatched=with_unmatched)


def to_document(answer: RouteAnswer) -> dict[str, Any]:
    """The document of `--json`."""
    return {
        "version": 1,
        "matched_chunks": answer.matched_chunks,
        "candidates": [
            {
                "host": each.host_id,
                "matched_chunks": each.matched_chunks,
                "score": each.score,
                "arena_fill": each.arena_fill,
                "nodes": [
                    {
                        "node": node.node.node_id.hex(),
                        "kind": node.node.kind.name.lower(),
                        "endpoint": node.node.endpoint,
                        "gpu_chunks": node.gpu_chunks,
                        "staging_chunks": node.staging_chunks,
                        "disk_chunks": node.disk_chunks,
                    }
                    for node in each.nodes
                ],
            }
            for each in answer.candidates
        ],
    }


def render(answer: RouteAnswer) -> RenderableType:
    """A table for people."""
    head = f"the cluster holds {answer.matched_chunks} chunks of the prefix"
    if not answer.candidates:
        return stack(f"{head}; no host holds any of it")
    rows = [
        [
            each.host_id,
            f"{each.score:.1f}",
            each.matched_chunks,
            *(sum(getattr(node, f"{tier}_chunks") for node in each.nodes) for tier in ("gpu", "staging", "disk")),
            f"{each.arena_fill:.0%}",
        ]
        for each in answer.candidates
    ]
    columns = ["host", "score", "whole prefix", "gpu", "staging", "disk", "arena used"]
    return stack(head, "", table(columns, rows, right=list(range(1, len(columns)))))
