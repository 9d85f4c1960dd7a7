"""Removing what nodes that are gone for good left behind, also where no match will ever meet it.

Each start of a pagestore is another incarnation with an ordinal of its own, so that without this every restart would
leave an entry of each chunk behind, until the chunk is asked for, which mostly never happens. As it looks at every
chunk, it also learns which keyspaces have any: those that have none and are not used are forgotten after it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

from kvpool.core.errors import Overloaded, StoreUnavailable
from kvpool_index.core.entries import EVERY_SHARD, Operation
from kvpool_index.core.groups import ChunkOperation, NamedChunk
from kvpool_index.engine_keyspaces import KeyspaceService
from kvpool_index.engine_nodes import NodeService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import LocationStore

_log = logging.getLogger(__name__)

_SHARE: Final = 0.05  # of the time may be spent on it; matches have the rest
_LONGEST_PAUSE_S: Final = 1.0


class SweepService:
    """Walks over all chunks of the store from time to time. Each replica does; what one has removed the next passes."""

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

    async def run(self) -> None:
        """Sweep every interval_s, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.sweep()
            except (StoreUnavailable, Overloaded) as error:
                _log.info("looking for what dead nodes left is put off: %s", error)

    async def sweep(self) -> int:
        """Look at every chunk once; the number of entries removed. Raises StoreUnavailable and Overloaded."""
        removed_count = 0
        keyspaces: set[bytes] = set()
        began_s = time.perf_counter()
        async for chunks in self._store.chunks():
            keyspaces.update(each.entry.keyspace for each in chunks)
            removals = await self._removals(chunks)
            states = await self._store.remove(removals) if removals else []
            removed_count += sum(state is not None for state in states)
            taken_s = time.perf_counter() - began_s
            await asyncio.sleep(min(_LONGEST_PAUSE_S, taken_s / _SHARE - taken_s))
            began_s = time.perf_counter()
        self._metrics.dead_removed.inc(removed_count)
        await self._keyspaces.forget_idle(keyspaces)
        return removed_count

    async def _removals(self, chunks: Sequence[NamedChunk]) -> list[ChunkOperation]:
        strange = {ordinal for each in chunks for ordinal in each.ordinals} - self._known(chunks)
        if not strange:
            return []
        # Only after a look at the nodes that is younger than the sighting: an ordinal may be unknown because it is new.
        await self._nodes.refresh()
        gone = strange - self._known(chunks)
        return [
            ChunkOperation(
                keyspace=each.entry.keyspace,
                group_head=each.entry.group_head,
                chunk_hash=each.entry.field,
                operation=Operation(ordinal=ordinal, full_shards=0, removed=EVERY_SHARD),
            )
            for each in chunks
            for ordinal in each.ordinals
            if ordinal in gone
        ]

    def _known(self, chunks: Sequence[NamedChunk]) -> set[int]:
        table = self._nodes.table
        return {ordinal for each in chunks for ordinal in each.ordinals if table.knows_ordinal(ordinal)}
