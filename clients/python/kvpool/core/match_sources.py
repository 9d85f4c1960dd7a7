"""Where the chunks of a match are read from: which of their shards, and of which nodes."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.core.cluster import ChainMatch, Location, MatchRun, RemoteSource
from kvpool.core.grid import ShardGrid
from kvpool.core.outcome import Tier


def shards_to_read(run: MatchRun, grid: ShardGrid, wanted: int, local_node_id: bytes) -> tuple[int, Tier | None]:
    """Choose the shards to read of each chunk of a run, of whatever splits; 0 if some layers or heads are nowhere.

    Those of the local node are preferred: first those in staging, then those on disk too. The tier is the slowest of
    the local node's that they need, None if they need another node.
    """
    local = [location for location in run.locations if location.node_id == local_node_id]
    staged = _union(local, Tier.STAGING)
    stored = staged | _union(local, Tier.DISK)
    served = _union(run.locations, Tier.STAGING, Tier.DISK)
    # A page that only an engine's cache holds is a hint; it is read where no pagestore has its layers and heads.
    anywhere = served | _union(run.locations, Tier.GPU)
    for present, tier in ((staged, Tier.STAGING), (stored, Tier.DISK), (served, None), (anywhere, None)):
        readable = grid.readable(present, wanted)
        if readable:
            return readable, tier
    return 0, None


def remote_sources(run: MatchRun, match: ChainMatch, readable: int, local_node_id: bytes) -> tuple[RemoteSource, ...]:
    """Other nodes that have some of these shards, best first, each once."""
    sources: dict[bytes, RemoteSource] = {}
    for location in run.locations:
        node = match.nodes.get(location.node_id)
        # gpu locations are hints that only a peer rank can use; a node without a bulk endpoint serves no pages.
        if location.node_id == local_node_id or location.tier is Tier.GPU or node is None or not node.bulk_endpoint:
            continue
        if not location.shards & readable:
            continue
        sources.setdefault(
            location.node_id,
            RemoteSource(node_id=location.node_id, incarnation=location.incarnation, bulk_endpoint=node.bulk_endpoint),
        )
    return tuple(sources.values())


def _union(locations: Iterable[Location], *tiers: Tier) -> int:
    shards = 0
    for location in locations:
        if location.tier in tiers:
            shards |= location.shards
    return shards
