"""Where the chunks of a match would come from, as one agent sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.core.cluster import ChainMatch, RemoteSource
from kvpool.core.grid import ShardGrid
from kvpool.core.match_sources import remote_sources, shards_to_read
from kvpool.core.outcome import Tier
from kvpool_gpuagent.core.bandwidth import LoadSource

_SOURCE_OF_TIER = {Tier.STAGING: LoadSource.STAGING, Tier.DISK: LoadSource.DISK, None: LoadSource.REMOTE}


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
    """Choose the shards to read of each run of a match, and classify the run by the slowest source that they need."""
    for run in match.runs:
        readable, tier = shards_to_read(run, grid, wanted, local_node_id)
        readable = readable or wanted  # a match names covered chunks only; this one's reader finds out
        yield SourceRun(
            chunk_count=run.chunk_count,
            source=_SOURCE_OF_TIER[tier],
            readable=readable,
            remote=remote_sources(run, match, readable, local_node_id),
        )
