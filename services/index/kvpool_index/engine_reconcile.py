"""Owner-driven reconciliation: telling a node the digests of what is known of it, and taking its word for a range."""

import logging
from collections.abc import AsyncIterator, Sequence
from functools import reduce
from operator import xor
from typing import Final

from kvpool.core.cluster import LocationChange
from kvpool.core.errors import InvalidRequest
from kvpool.core.location_digest import RANGE_COUNT, PartSpan, SplitGroup
from kvpool_index.core.groups import NodeEntry
from kvpool_index.core.replacement import BucketSpan, Replacement, check_part
from kvpool_index.engine_announce import AnnounceService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import LocationStore, NodeDirectory, StreamFence

_log = logging.getLogger(__name__)

_GROUPS_AT_ONCE: Final = 128  # split ones in one answer, of 2 KiB each; the last step of the store may add some


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

    async def split_groups(
        self, node_id: bytes, incarnation: int, number: int, continuation: bytes
    ) -> tuple[list[SplitGroup], bytes, int]:
        """Split groups of a range with the node's digests, how to go on, and the announce sequence as of `digests`.

        Raises InvalidRequest, LeaseLost, StaleIncarnation.
        """
        if not 0 <= number < RANGE_COUNT:
            raise InvalidRequest(f"range must be 0 to {RANGE_COUNT - 1}, got {number}")
        ordinal = await self._directory.ordinal(node_id, incarnation)
        applied = self._announcements.applied_sequence(node_id)
        found: list[SplitGroup] = []
        while len(found) < _GROUPS_AT_ONCE:
            some, continuation = await self._store.split_groups(ordinal, number, continuation)
            found += some
            if not continuation:
                break
        return found, continuation, applied

    async def replace(self, fence: StreamFence, span: BucketSpan, changes: Sequence[LocationChange]) -> None:
        """Make the store say of these buckets just what the node says. Raises as AnnounceService.apply.

        What the node does not name is looked for, in these buckets, only if the digests say that there is something;
        and not in groups that are split, of which the node names the parts that differ: see `replace_part`.
        """
        span.check(changes)
        truth = await self._apply(fence, changes)
        self._metrics.replaced_ranges.inc()
        ranges = span.whole_ranges
        if ranges is not None and not await self._differing(fence.ordinal, truth, ranges):
            return
        await self._remove_surplus(fence, truth, self._store.entries(fence.ordinal, span.first, span.last))
        await self._correct(fence, truth, ranges or [])

    async def replace_part(self, fence: StreamFence, span: PartSpan, changes: Sequence[LocationChange]) -> None:
        """The same for one part of a group."""
        check_part(span, changes)
        truth = await self._apply(fence, changes)
        self._metrics.replaced_parts.inc()
        wanted, found = truth.digest(), await self._store.part_digest(fence.ordinal, span)
        if found == wanted:
            return
        await self._remove_surplus(fence, truth, self._store.part_entries(fence.ordinal, span))
        before = await self._store.part_digest(fence.ordinal, span)
        if before is None or before == wanted:
            return
        # As in _correct.
        await self._apply_truth(fence, truth)
        if await self._store.part_digest(fence.ordinal, span) != before:
            return
        if await self._store.correct_part_digest(fence.ordinal, span, before, truth.digest()):
            _log.warning("the digest of a part of a group did not agree with its chunks and is corrected")
            self._metrics.corrected_digests.inc()

    async def _apply(self, fence: StreamFence, changes: Sequence[LocationChange]) -> Replacement:
        grids = await self._announcements.grids(changes)
        truth = Replacement(changes, ordinal=fence.ordinal, full_shards=grids.__getitem__)
        await self._apply_truth(fence, truth)
        return truth

    async def _apply_truth(self, fence: StreamFence, truth: Replacement) -> None:
        truth.leave_out(await self._announcements.apply_operations(fence, truth.operations()))

    async def _remove_surplus(
        self, fence: StreamFence, truth: Replacement, known: AsyncIterator[list[NodeEntry]]
    ) -> None:
        async for entries in known:
            removals = truth.removals(entries)
            if removals:
                await self._announcements.apply_operations(fence, removals)
                self._metrics.surplus_removed.inc(len(removals))

    async def _correct(self, fence: StreamFence, truth: Replacement, ranges: Sequence[int]) -> None:
        """Correct digests that do not agree with the chunks: the store lost some of these alone (it evicts keys, say).

        A digest may also differ because a reader's report, or a drop, has removed what the node just told. Then it is
        right, and to correct it would hide the loss from all comparisons to come. So everything is told again, after
        which a digest that is as before has not been changed by anybody, and is set only if it still is that.
        """
        before = await self._differing(fence.ordinal, truth, ranges)
        if not before:
            return
        await self._apply_truth(fence, truth)
        after = await self._differing(fence.ordinal, truth, list(before))
        wrong = {number: change for number, change in after.items() if before[number] == change}
        corrected = await self._store.correct_digests(fence.ordinal, wrong)
        if corrected:
            _log.warning("the digests of %d ranges did not agree with their chunks and are corrected", corrected)
            self._metrics.corrected_digests.inc(corrected)

    async def _differing(self, ordinal: int, truth: Replacement, ranges: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Ranges whose digests are not what they should be: what they are, and what they should be.

        Of groups that are split the node need not have named all: what their parts say is taken for right.
        """
        found = dict(zip(ranges, await self._store.digests(ordinal, ranges), strict=True))
        wanted = truth.digests(ranges)
        if found == wanted:
            return {}
        in_parts: dict[int, int] = {}
        split: set[tuple[bytes, bytes]] = set()
        for number in [each for each in ranges if found[each] != wanted[each]]:
            in_parts[number] = 0
            async for group in self._split_groups(ordinal, number):
                if (group.keyspace, group.group_head) not in split:
                    split.add((group.keyspace, group.group_head))
                    in_parts[number] ^= reduce(xor, group.digests)
        wanted = truth.digests(list(in_parts), without=split)
        return {
            number: (found[number], wanted[number] ^ digest)
            for number, digest in in_parts.items()
            if found[number] != wanted[number] ^ digest
        }

    async def _split_groups(self, ordinal: int, number: int) -> AsyncIterator[SplitGroup]:
        after = b""
        while True:
            groups, after = await self._store.split_groups(ordinal, number, after)
            for group in groups:
                yield group
            if not after:
                return
