"""Where chunks of a match would come from, as one agent sees it, and what each source was measured to bring."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvpool.core.cluster import ChainMatch, RemoteSource
from kvpool.core.grid import ShardGrid
from kvpool.core.match_sources import remote_sources, shards_to_read
from kvpool.core.outcome import Tier


class LoadSource(IntEnum):
    """Where KV came from; the numbers of kvpool.v1 Source and EngineSource."""

    STAGING = 1
    DISK = 2
    REMOTE = 3
    GPU = 4  # caches of other engine ranks of the host: no page


@dataclass(slots=True)
class CopiedBytes:
    """What all loads of an agent have copied so far: they share its link. loads: begun so far."""

    total: int = 0
    loads: int = 0


@dataclass(slots=True)
class _Sums:
    size_bytes: float = 0.0
    duration_s: float = 0.0


class Bandwidths:
    """Bytes per second, one figure per source: sums of bytes and of time that fade as more bytes are moved.

    A sample counts by its bytes, so that one large load outvotes any number of tiny ones that came before.
    """

    def __init__(self, half_life_bytes: int = 256 << 20) -> None:
        """half_life_bytes: after so many more bytes a sample counts half."""
        self._half_life_bytes = half_life_bytes
        self._sums = {source: _Sums() for source in LoadSource}

    def record(self, source: LoadSource, size_bytes: int, duration_s: float) -> None:
        """Add a sample; nonsense (no bytes, no time) is ignored."""
        if size_bytes <= 0 or duration_s <= 0:
            return
        sums, fade = self._sums[source], 0.5 ** (size_bytes / self._half_life_bytes)
        sums.size_bytes = sums.size_bytes * fade + size_bytes
        sums.duration_s = sums.duration_s * fade + duration_s

    def bytes_per_s(self, source: LoadSource) -> float:
        """0.0 if nothing was measured yet."""
        sums = self._sums[source]
        return sums.size_bytes / sums.duration_s if sums.duration_s else 0.0

    def estimate_ms(self, source: LoadSource, size_bytes: int) -> float:
        """Milliseconds to load size_bytes; 0.0 if nothing was measured yet."""
        known = self.bytes_per_s(source)
        return size_bytes / known * 1e3 if known else 0.0


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


_ON_GPU = SourceRun(chunk_count=0, source=LoadSource.GPU, readable=0, remote=())
_CACHED, _NOWHERE = -1, -2  # in place of the number of a run


def with_cached(runs: Sequence[SourceRun], cached: npt.NDArray[np.bool_]) -> list[SourceRun]:
    """Return the runs of a prefix of which some chunks are in GPU caches of the host: these come from there.

    cached: [C], of all chunks asked for. A chunk that neither has ends the prefix.
    """
    if not cached.any():
        return list(runs)
    numbers = np.full(cached.size, _NOWHERE)
    pooled = np.repeat(np.arange(len(runs)), [run.chunk_count for run in runs])[: cached.size]
    numbers[: pooled.size] = pooled
    numbers[cached] = _CACHED
    chosen: list[SourceRun] = []
    for number, same in itertools.groupby(numbers.tolist()):
        if number == _NOWHERE:
            break
        run = _ON_GPU if number == _CACHED else runs[number]
        chosen.append(replace(run, chunk_count=len(list(same))))
    return chosen


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
