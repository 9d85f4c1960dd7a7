"""Removal of the locations of nodes that are gone for good.

Each start of a pagestore is another incarnation with an ordinal of its own, so that every restart leaves an entry of
each chunk behind, until a match meets it, which mostly never happens. A walk over all chunks finds the others. It also
learns which keyspaces have chunks: those that have none and are not used are forgotten after it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import Overloaded, StoreUnavailable
from kvpool_index.core.entries import ChunkOperation, NodeEntry, group_reads, ordinals_in, removal_of
from kvpool_index.engine.keyspaces import KeyspaceService
from kvpool_index.engine.nodes import NodeService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import LocationStore

_log = logging.getLogger(__name__)

_QUEUE_MAX: Final = 4096  # sightings that wait to be cleaned up; further ones will be seen again
_BATCH: Final = 256
_PAUSE_S: Final = 1.0
_SHARE: Final = 0.05  # of the time may be spent on it; matches have the rest
_LONGEST_PAUSE_S: Final = 1.0


class DeadLocations:
    """Removes what matches meet, soon, and what nothing meets by a walk over all chunks from time to time.

    Each replica does both; what one has removed the others pass.
    """

    def __init__(
        self,
        store: LocationStore,
        nodes: NodeService,
        keyspaces: KeyspaceService,
        metrics: IndexMetrics,
        *,
        interval_s: float,
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._keyspaces = keyspaces
        self._metrics = metrics
        self._interval_s = interval_s
        self._queue: asyncio.Queue[ChunkOperation] = asyncio.Queue(_QUEUE_MAX)

    def note(self, query: ChainQuery, values: Sequence[bytes | None], dead: set[int]) -> None:
        """Queue the removal of locations of nodes that are gone for good; a lease that only ran out is left alone."""
        gone = {ordinal for ordinal in dead if not self._nodes.table.knows_ordinal(ordinal)}
        if not gone:
            return
        values_left = iter(values)
        for read in group_reads(query):
            for field, value in zip(read.fields, values_left, strict=False):
                for ordinal in gone.intersection(ordinals_in(value)):
                    if not self._queue.full():
                        self._queue.put_nowait(removal_of(NodeEntry(query.keyspace, read.head, field), ordinal))

    async def run_removals(self) -> None:
        """Remove what was noted, in bounded batches with pauses, until cancelled."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            with suppress(StoreUnavailable, Overloaded):  # what is not removed now, some match will see again
                await self._remove(batch)
            await asyncio.sleep(_PAUSE_S)

    async def run_sweeps(self) -> None:
        """Sweep every interval_s, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.sweep()
            except (StoreUnavailable, Overloaded) as error:
                _log.info("the sweep for locations of dead nodes is postponed: %s", error)

    async def sweep(self) -> int:
        """Look at every chunk once; the number of entries removed. Raises StoreUnavailable and Overloaded."""
        removed_count = 0
        keyspaces: set[bytes] = set()
        began_s = time.perf_counter()
        async for chunks in self._store.chunks():
            keyspaces.update(each.entry.keyspace for each in chunks)
            removed_count += await self._remove(
                [
                    removal_of(each.entry, ordinal)
                    for each in chunks
                    for ordinal in each.ordinals
                    if not self._nodes.table.knows_ordinal(ordinal)
                ]
            )
            taken_s = time.perf_counter() - began_s
            await asyncio.sleep(min(_LONGEST_PAUSE_S, taken_s / _SHARE - taken_s))
            began_s = time.perf_counter()
        await self._keyspaces.forget_idle(keyspaces)
        return removed_count

    async def _remove(self, removals: Sequence[ChunkOperation]) -> int:
        """Remove those whose node is gone for good; the number of entries that were there."""
        if not removals:
            return 0
        await self._nodes.refresh()  # the table must be younger than the sighting: an unknown ordinal may be new
        dead = [each for each in removals if not self._nodes.table.knows_ordinal(each.operation.ordinal)]
        states = await self._store.remove(dead) if dead else []
        removed_count = sum(state is not None for state in states)
        self._metrics.dead_removed.inc(removed_count)
        return removed_count
