"""Where the chunks of a match would come from, as one agent sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvpool.core.cluster import ChainMatch, Location, MatchRun, RemoteSource
from kvpool.core.grid import ShardGrid
from kvpool.core.outcome import Tier
from kvpool_gpuagent.core.bandwidth import LoadSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRun:
    """Consecutive chunks that would come from one kind of source.

    readable: bitmap of the shards to read of each chunk; they may be of other splits than the wanted ones.
    remote: other nodes that have some of these shards, best first.
    """

    chunk_count: int
    source: LoadSource
    readable: int
    remote: tuple[RemoteSource, ...]


def source_runs(match: ChainMatch, grid: ShardGrid, wanted: int, local_node_id: bytes) -> Iterator[SourceRun]:
    """Choose the shards to read of each run of a match, and classify the run by the slowest source that they need.

    Shards of the local node are preferred, whatever their split: those in staging, then those on disk too.
    """
    for run in match.runs:
        source, readable = _choice(run, grid, wanted, local_node_id)
        yield SourceRun(
            chunk_count=run.chunk_count,
            source=source,
            readable=readable,
            remote=_remote(run, match, readable, local_node_id),
        )


def _choice(run: MatchRun, grid: ShardGrid, wanted: int, local_node_id: bytes) -> tuple[LoadSource, int]:
    local = [location for location in run.locations if location.node_id == local_node_id]
    staged = _union(local, Tier.STAGING)
    stored = staged | _union(local, Tier.DISK)
    served = _union(run.locations, Tier.STAGING, Tier.DISK)
    # A page that only an engine's cache holds is a hint; it is read where no pagestore has its layers and heads.
    anywhere = served | _union(run.locations, Tier.GPU)
    for source, present in (
        (LoadSource.STAGING, staged),
        (LoadSource.DISK, stored),
        (LoadSource.REMOTE, served),
        (LoadSource.REMOTE, anywhere),
    ):
        readable = grid.readable(present, wanted)
        if readable:
            return source, readable
    return LoadSource.REMOTE, wanted  # a match names covered chunks only; this one's reader finds out


def _union(locations: Iterable[Location], *tiers: Tier) -> int:
    shards = 0
    for location in locations:
        if location.tier in tiers:
            shards |= location.shards
    return shards


def _remote(run: MatchRun, match: ChainMatch, readable: int, local_node_id: bytes) -> tuple[RemoteSource, ...]:
    sources: dict[bytes, RemoteSource] = {}
    for location in run.locations:
        node = match.nodes.get(location.node_id)
        # gpu locations are hints that only a peer rank can use; a node without a bulk endpoint serves nobody.
        if location.node_id == local_node_id or location.tier is Tier.GPU or node is None or not node.bulk_endpoint:
            continue
        if not location.shards & readable:
            continue
        sources.setdefault(
            location.node_id,
            RemoteSource(node_id=location.node_id, incarnation=location.incarnation, bulk_endpoint=node.bulk_endpoint),
        )
    return tuple(sources.values())
