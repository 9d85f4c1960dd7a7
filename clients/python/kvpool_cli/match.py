"""`kvpool cache match`: how much of a token sequence the cluster holds, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from kvpool.core.chunks import chunk_runs
from kvpool.core.cluster import Location, MatchRun, NodeInfo
from kvpool.core.coverage import Coverage
from kvpool.core.outcome import Tier
from kvpool_cli.chains import matches, possibly_empty_chain_of
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_OK
from kvpool_cli.options import Keyspace
from kvpool_cli.output import print_json, show, stack, table
from kvpool_cli.prompts import TokenSource
from kvpool_cli.targets import Target, find_target, open_index, run

TierAndNodes = tuple[Tier, tuple[NodeInfo, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """Consecutive chunks with equal locations."""

    first_chunk: int
    chunk_count: int
    tier: Tier
    nodes: tuple[NodeInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a cluster has of a token sequence."""

    keyspace: str
    token_count: int
    chunk_tokens: int
    chunk_count: int  # full ones
    runs: tuple[FoundRun, ...]

    @property
    def matched_chunks(self) -> int:
        """Of the longest prefix."""
        return sum(run.chunk_count for run in self.runs)

    def chunks_of(self, tier: Tier) -> int:
        """Chunks whose best complete tier is this one."""
        return sum(run.chunk_count for run in self.runs if run.tier is tier)


def match(common: Common, prompt: TokenSource, keyspace: Keyspace = "") -> int:
    """Show how much of a prompt the cluster holds, and where."""
    tokens = prompt.one()
    found = run(look_up(find_target(common), keyspace, tokens))
    if common.json:
        print_json(to_document(found))
    else:
        show(render(found))
    return EXIT_OK


async def look_up(target: Target, keyspace_name: str, tokens: Sequence[int]) -> Found:
    """Match the tokens' chunks. Raises CommandFailed for a keyspace that there is not."""
    async with open_index(target) as index:
        chain = await possibly_empty_chain_of(index, keyspace_name, tokens)
        whole = Coverage.of(chain.opened.grid, 0)
        of_pages = [
            (found.chunk_count, _tier_and_nodes(found, answer.nodes, whole))
            async for answer in matches(index, chain)
            for found in answer.runs
        ]
    runs, first_chunk = list[FoundRun](), 0
    for count, (tier, nodes) in chunk_runs(of_pages, chain.pages, lambda one, later: max(later, one, key=_tier)):
        runs.append(FoundRun(first_chunk=first_chunk, chunk_count=count, tier=tier, nodes=nodes))
        first_chunk += count
    return Found(
        keyspace=chain.named.name,
        token_count=len(tokens),
        chunk_tokens=chain.named.spec.chunk_tokens,
        chunk_count=chain.chunk_count,
        runs=tuple(runs),
    )


def _tier_and_nodes(found: MatchRun, nodes: dict[bytes, NodeInfo], whole: Coverage) -> TierAndNodes:
    tier = best_tier(found.locations, whole)
    ids = dict.fromkeys(location.node_id for location in found.locations if location.tier <= tier)
    return tier, tuple(nodes[node_id] for node_id in ids if node_id in nodes)


def _tier(found: TierAndNodes) -> Tier:
    return found[0]


def best_tier(locations: Sequence[Location], whole: Coverage) -> Tier:
    """The fastest tier such that every layer and head is there or in a faster one, in pages of whichever split."""
    covered = 0
    for tier in Tier:
        for location in locations:
            if location.tier is tier:
                covered |= location.shards
        if whole.is_met_by(covered):
            return tier
    return Tier.DISK


def to_document(found: Found) -> dict[str, Any]:
    """The document of `--json`."""
    return {
        "version": 1,
        "keyspace": found.keyspace,
        "tokens": found.token_count,
        "chunk_tokens": found.chunk_tokens,
        "chunks": found.chunk_count,
        "matched_chunks": found.matched_chunks,
        "matched_tokens": found.matched_chunks * found.chunk_tokens,
        "runs": [
            {
                "first_chunk": run.first_chunk,
                "chunks": run.chunk_count,
                "tokens": run.chunk_count * found.chunk_tokens,
                "tier": run.tier.name.lower(),
                "nodes": [node.node_id.hex() for node in run.nodes],
            }
            for run in found.runs
        ],
        "tokens_by_tier": {tier.name.lower(): found.chunks_of(tier) * found.chunk_tokens for tier in Tier},
    }


def render(found: Found) -> RenderableType:
    """Tables for people."""
    rows = [
        [
            f"{run.first_chunk} to {run.first_chunk + run.chunk_count - 1}",
            run.chunk_count,
            run.chunk_count * found.chunk_tokens,
            run.tier.name.lower(),
            ", ".join(f"{node.node_id.hex()[:8]} ({node.host_id})" for node in run.nodes),
        ]
        for run in found.runs
    ]
    missing = found.chunk_count - found.matched_chunks
    rest = found.token_count - found.chunk_count * found.chunk_tokens
    totals = [[tier.name.lower(), found.chunks_of(tier), found.chunks_of(tier) * found.chunk_tokens] for tier in Tier]
    totals += [["not held", missing, missing * found.chunk_tokens], ["no full chunk", "-", rest]]
    held_tokens = found.matched_chunks * found.chunk_tokens
    held = f"{found.matched_chunks} of {found.chunk_count} chunks ({held_tokens} of {found.token_count} tokens)"
    parts: list[RenderableType | str] = [f"keyspace {found.keyspace}: {held} are held", ""]
    if rows:
        parts += [table(["chunks", "count", "tokens", "tier", "nodes"], rows, right=[1, 2]), ""]
    parts.append(table(["total", "chunks", "tokens"], totals, right=[1, 2]))
    return stack(*parts)
