"""Where the chunks of a match would come from, as one agent sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.core.cluster import ChainMatch, Location, MatchRun, RemoteSource
from kvpool.core.outcome import Tier
from kvpool_gpuagent.core.bandwidth import LoadSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRun:
    """Consecutive chunks that would come from one kind of source; `remote` names other nodes to ask, best first."""

    chunk_count: int
    source: LoadSource
    remote: tuple[RemoteSource, ...]


def source_runs(match: ChainMatch, shards: int, local_node_id: bytes) -> Iterator[SourceRun]:
    """Classify each run of a match by the slowest source it needs."""
    for run in match.runs:
        yield SourceRun(
            chunk_count=run.chunk_count,
            source=_slowest(run, shards, local_node_id),
            remote=_remote(run, match, local_node_id),
        )


def _slowest(run: MatchRun, shards: int, local_node_id: bytes) -> LoadSource:
    staged = _union(location for location in run.locations if _is_local(location, local_node_id, Tier.STAGING))
    if staged & shards == shards:
        return LoadSource.STAGING
    on_disk = _union(location for location in run.locations if _is_local(location, local_node_id, Tier.DISK))
    if (staged | on_disk) & shards == shards:
        return LoadSource.DISK
    return LoadSource.REMOTE


def _is_local(location: Location, local_node_id: bytes, tier: Tier) -> bool:
    return location.node_id == local_node_id and location.tier is tier


def _union(locations: Iterator[Location]) -> int:
    shards = 0
    for location in locations:
        shards |= location.shards
    return shards


def _remote(run: MatchRun, match: ChainMatch, local_node_id: bytes) -> tuple[RemoteSource, ...]:
    sources: dict[bytes, RemoteSource] = {}
    for location in run.locations:
        node = match.nodes.get(location.node_id)
        # gpu locations are hints that only a peer rank can use; a node without a bulk endpoint serves nobody.
        if location.node_id == local_node_id or location.tier is Tier.GPU or node is None or not node.bulk_endpoint:
            continue
        sources.setdefault(
            location.node_id,
            RemoteSource(node_id=location.node_id, incarnation=location.incarnation, bulk_endpoint=node.bulk_endpoint),
        )
    return tuple(sources.values())
