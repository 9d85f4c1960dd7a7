"""Changes of locations: announce streams, stale reports, drops of keyspaces, and reconciliation with a node."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from functools import reduce
from operator import xor
from typing import Final

from kvpool.core.cluster import LocationChange, StaleLocation
from kvpool.core.errors import InvalidRequest
from kvpool.core.fault_points import reach
from kvpool.core.location_digest import RANGE_COUNT, PartSpan, SplitGroup
from kvpool_index.core.entries import ChunkOperation, NodeEntry, Operation, is_left_out, one_tier, operations_of
from kvpool_index.core.events import ChunkState, pack_entries, stream_of
from kvpool_index.core.replacement import BucketSpan, Replacement, check_part
from kvpool_index.engine.keyspaces import KeyspaceService
from kvpool_index.engine.nodes import NodeService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import EventLog, LocationStore, NodeDirectory, StreamFence


class AnnounceStream:
    """One announce stream of a node, open on this replica."""

    def __init__(self, service: "AnnounceService", reconciliation: "ReconcileService", fence: StreamFence) -> None:
        self._service = service
        self._reconciliation = reconciliation
        self._fence = fence
        self._sequence = 0

    async def apply(self, sequence: int, changes: Sequence[LocationChange]) -> int:
        """Apply one batch; returns the sequence up to which the store has everything.

        Raises InvalidRequest for a sequence that does not grow; StaleIncarnation and LeaseLost when the node must
        register again. After any error the stream is over: what was not acknowledged is to be sent on a new one.
        """
        self._check(sequence)
        await self._service.apply(self._fence, changes)
        return self._applied(sequence)

    async def replace(self, sequence: int, span: BucketSpan, changes: Sequence[LocationChange]) -> int:
        """The same for all that the node holds in some buckets. Raises also InvalidRequest for what lies elsewhere."""
        self._check(sequence)
        await self._reconciliation.replace(self._fence, span, changes)
        return self._applied(sequence)

    async def replace_part(self, sequence: int, span: PartSpan, changes: Sequence[LocationChange]) -> int:
        """The same for all that the node holds in one part of a group."""
        self._check(sequence)
        await self._reconciliation.replace_part(self._fence, span, changes)
        return self._applied(sequence)

    def _check(self, sequence: int) -> None:
        if sequence <= self._sequence:
            raise InvalidRequest(f"sequence must grow, got {sequence} after {self._sequence}")

    def _applied(self, sequence: int) -> int:
        self._sequence = sequence
        self._service.note_applied(self._fence.node_id, sequence)
        return sequence


class AnnounceService:
    """Changes what the store knows of locations, and logs the new values."""

    def __init__(
        self,
        store: LocationStore,
        events: EventLog,
        nodes: NodeService,
        keyspaces: KeyspaceService,
        metrics: IndexMetrics,
    ) -> None:
        self._store = store
        self._events = events
        self._nodes = nodes
        self._keyspaces = keyspaces
        self._metrics = metrics
        self._sequences: dict[bytes, int] = {}  # by node, what its latest stream here had applied

    def open(self, fence: StreamFence, reconciliation: "ReconcileService") -> AnnounceStream:
        """Start a stream, which fences the node's earlier ones."""
        self._sequences.pop(fence.node_id, None)
        return AnnounceStream(self, reconciliation, fence)

    def note_applied(self, node_id: bytes, sequence: int) -> None:
        """A batch of a stream is in the store."""
        self._sequences[node_id] = sequence

    def applied_sequence(self, node_id: bytes) -> int:
        """Return the latest sequence applied by the node's latest stream here; 0 if it has none."""
        return self._sequences.get(node_id, 0)

    async def apply(self, fence: StreamFence, changes: Sequence[LocationChange]) -> None:
        """Apply changes of a stream and log them: both are in the store when this returns."""
        grids = await self.grids(changes)
        operations = operations_of(changes, ordinal=fence.ordinal, full_shards=grids.__getitem__)
        await self.apply_operations(fence, operations)
        self._metrics.announce_batches.inc()
        self._metrics.announce_changes.inc(len(changes))

    async def apply_operations(self, fence: StreamFence, operations: Sequence[ChunkOperation]) -> list[ChunkOperation]:
        """Apply operations of a stream and log them; those whose node is not recorded: the chunk has enough nodes."""
        started_at_s = time.perf_counter()
        reach("index.announce.begin")
        states = await self._store.apply(fence, operations)
        reach("index.announce.applied")
        # Unchanged states are logged too: this may be a batch sent again because its events could not be written.
        await self._log(states)
        reach("index.announce.logged")
        self._metrics.store_duration.labels("apply").observe(time.perf_counter() - started_at_s)
        pairs = zip(operations, states, strict=True)
        left_out = [each for each, state in pairs if is_left_out(state.value, each.operation)]
        self._metrics.left_out.inc(len(left_out))
        return left_out

    async def grids(self, changes: Sequence[LocationChange]) -> dict[bytes, int]:
        """Return all_shards of the grid of each keyspace named; 0 for one that the store does not know."""
        return {keyspace: await self._grid(keyspace) for keyspace in {change.keyspace for change in changes}}

    async def report_stale(self, tenant: str, stale: Sequence[StaleLocation]) -> list[bool]:
        """Remove locations that did not hold what they promised; per item, whether it was there.

        A location of an incarnation that is not the live one needs no removal: no match names it. Nor does one of a
        keyspace that the tenant does not have (the store may have been wiped since).
        """
        operations: list[ChunkOperation] = []
        positions: list[int] = []
        for position, item in enumerate(stale):
            operation = await self._stale_operation(tenant, item)
            if operation is not None:
                operations.append(operation)
                positions.append(position)
        answers = [False] * len(stale)
        states = await self._store.remove(operations) if operations else []
        for position, state in zip(positions, states, strict=True):
            answers[position] = state is not None
        await self._log([state for state in states if state is not None])
        for removed, result in ((True, "removed"), (False, "absent")):
            self._metrics.stale_reports.labels(result).inc(answers.count(removed))
        return answers

    async def drop(self, tenant: str, keyspace: bytes, node_id: bytes) -> int:
        """Remove a keyspace's locations, of one node or (empty id) of all. Returns the chunks that lost one."""
        await self._keyspaces.get(tenant, keyspace)
        ordinal: int | None = None
        if node_id:
            record = await self._nodes.record(node_id)
            if record is None:
                return 0
            ordinal = record.ordinal
        chunk_count = 0
        async for states in self._store.drop(keyspace, ordinal):
            await self._log(states)
            chunk_count += len(states)
        return chunk_count

    async def _grid(self, keyspace: bytes) -> int:
        """all_shards of the grid; 0 for a keyspace that the store does not know (yet, or any more)."""
        known = await self._keyspaces.find(keyspace)
        return known.all_shards if known is not None else 0

    async def _stale_operation(self, tenant: str, item: StaleLocation) -> ChunkOperation | None:
        keyspace = await self._keyspaces.find(item.keyspace)
        if keyspace is None or keyspace.tenant != tenant:
            return None  # of this item alone: the others of its batch are to be removed all the same
        record = await self._nodes.record(item.location.node_id)
        if record is None or record.info.incarnation != item.location.incarnation:
            return None
        return ChunkOperation(
            keyspace=item.keyspace,
            chunk_hash=item.chunk_hash,
            group_head=item.group_head_hash,
            operation=Operation(
                ordinal=record.ordinal,
                full_shards=keyspace.all_shards,
                removed=one_tier(item.location.tier, item.location.shards),
            ),
        )

    async def _log(self, states: Sequence[ChunkState]) -> None:
        by_stream: dict[int, list[ChunkState]] = {}
        chunk_streams = self._events.stream_count - 1
        for state in states:
            by_stream.setdefault(stream_of(state.group_head, chunk_streams), []).append(state)
        entries = [(stream, payload) for stream, found in by_stream.items() for payload in pack_entries(found)]
        if entries:
            await self._events.append(entries)


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
        # What the digests should be is computed while the store works.
        await asyncio.gather(self._apply_truth(fence, truth), _compute_fingerprints(truth))
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

        A digest may also differ because a reader's report, or a drop, has removed what the node just sent. Then it is
        right, and to correct it would hide the loss from all comparisons to come. So everything is applied again, after
        which a digest that is as before has not been changed by others, and is set only if it is still the same.
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


async def _compute_fingerprints(truth: Replacement) -> None:
    truth.fingerprints()
