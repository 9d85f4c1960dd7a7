"""Owner-driven reconciliation: telling a node the digests of what is known of it, and taking its word for a range."""

import logging
from collections.abc import Sequence

from kvpool.core.cluster import LocationChange
from kvpool.core.errors import InvalidRequest
from kvpool.core.location_digest import RANGE_COUNT
from kvpool_index.core.replacement import BucketSpan, Replacement
from kvpool_index.engine_announce import AnnounceService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import LocationStore, NodeDirectory, StreamFence

_log = logging.getLogger(__name__)


class ReconcileService:
    """Compares and repairs what the store has of one node."""

    def __init__(
        self,
        store: LocationStore,
        announcements: AnnounceService,
        directory: NodeDirectory,
        metrics: IndexMetrics,
    ) -> None:
        self._store = store
        self._announcements = announcements
        self._directory = directory
        self._metrics = metrics

    async def digests(
        self, node_id: bytes, incarnation: int, first_range: int, range_count: int
    ) -> tuple[list[int], int]:
        """The digests of ranges, and the announce sequence that was applied here before they were read.

        Raises InvalidRequest, LeaseLost, StaleIncarnation.
        """
        count = range_count or RANGE_COUNT - first_range
        if not (first_range >= 0 and count > 0 and first_range + count <= RANGE_COUNT):
            raise InvalidRequest(f"first_range and range_count must lie in 0 to {RANGE_COUNT}")
        ordinal = await self._directory.ordinal(node_id, incarnation)  # it may have registered again elsewhere
        applied = self._announcements.applied_sequence(node_id)
        return await self._store.digests(ordinal, range(first_range, first_range + count)), applied

    async def replace(self, fence: StreamFence, span: BucketSpan, changes: Sequence[LocationChange]) -> None:
        """Make the store say of these buckets just what the node says. Raises as AnnounceService.apply.

        What the node does not name is looked for, in these buckets, only if the digests say that there is something.
        """
        span.check(changes)
        grids = await self._announcements.grids(changes)
        truth = Replacement(changes, ordinal=fence.ordinal, full_shards=grids.__getitem__)
        await self._announcements.apply_operations(fence, truth.operations())
        self._metrics.replaced_ranges.inc()
        ranges = span.whole_ranges
        if ranges is not None and not await self._differing(fence.ordinal, truth, ranges):
            return
        async for entries in self._store.entries(fence.ordinal, span.first, span.last):
            removals = truth.removals(entries)
            await self._announcements.apply_operations(fence, removals)
            self._metrics.surplus_removed.inc(len(removals))
        await self._correct(fence, truth, ranges or [])

    async def _correct(self, fence: StreamFence, truth: Replacement, ranges: Sequence[int]) -> None:
        """Correct digests that do not agree with the chunks: the store lost some of these alone (it evicts keys, say).

        A digest may also differ because a reader's report, or a drop, has removed what the node just told. Then it is
        right, and to correct it would hide the loss from all comparisons to come. So everything is told again, after
        which a digest that is as before has not been changed by anybody, and is set only if it still is that.
        """
        before = await self._differing(fence.ordinal, truth, ranges)
        if not before:
            return
        await self._announcements.apply_operations(fence, truth.operations())
        after = await self._differing(fence.ordinal, truth, list(before))
        wrong = {number: change for number, change in after.items() if before[number] == change}
        corrected = await self._store.correct_digests(fence.ordinal, wrong)
        if corrected:
            _log.warning("the digests of %d ranges did not agree with their chunks and are corrected", corrected)
            self._metrics.corrected_digests.inc(corrected)

    async def _differing(self, ordinal: int, truth: Replacement, ranges: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Ranges whose digests are not what they should be: what they are, and what they should be."""
        found = await self._store.digests(ordinal, ranges)
        wanted = truth.digests(ranges)
        return {
            number: (digest, wanted[number])
            for number, digest in zip(ranges, found, strict=True)
            if digest != wanted[number]
        }
