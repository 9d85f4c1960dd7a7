"""Changes of locations: announce streams, stale reports, drops of keyspaces."""

import time
from collections.abc import Sequence
from typing import Protocol

from kvpool.core.cluster import LocationChange, StaleLocation
from kvpool.core.errors import InvalidRequest
from kvpool.core.fault_points import reach
from kvpool.core.location_digest import PartSpan
from kvpool_index.core.entries import Operation, is_left_out
from kvpool_index.core.events import ChunkState, pack_entries, stream_of
from kvpool_index.core.groups import ChunkOperation, one_tier, operations_of
from kvpool_index.core.replacement import BucketSpan
from kvpool_index.engine_keyspaces import KeyspaceService
from kvpool_index.engine_nodes import NodeService
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import EventLog, LocationStore, StreamFence


class Replacing(Protocol):
    """What takes a node's word for all that it holds somewhere: ReconcileService."""

    async def replace(self, fence: StreamFence, span: BucketSpan, changes: Sequence[LocationChange]) -> None: ...

    async def replace_part(self, fence: StreamFence, span: PartSpan, changes: Sequence[LocationChange]) -> None: ...


class AnnounceStream:
    """One announce stream of a node, open on this replica."""

    def __init__(self, service: "AnnounceService", replacing: Replacing, fence: StreamFence) -> None:
        self._service = service
        self._replacing = replacing
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
        await self._replacing.replace(self._fence, span, changes)
        return self._applied(sequence)

    async def replace_part(self, sequence: int, span: PartSpan, changes: Sequence[LocationChange]) -> int:
        """The same for all that the node holds in one part of a group."""
        self._check(sequence)
        await self._replacing.replace_part(self._fence, span, changes)
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

    def open(self, fence: StreamFence, replacing: Replacing) -> AnnounceStream:
        """Start a stream, which fences the node's earlier ones."""
        self._sequences.pop(fence.node_id, None)
        return AnnounceStream(self, replacing, fence)

    def note_applied(self, node_id: bytes, sequence: int) -> None:
        """A batch of a stream is in the store."""
        self._sequences[node_id] = sequence

    def applied_sequence(self, node_id: bytes) -> int:
        """Of the node's latest stream here; 0 if it has none."""
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
        """all_shards of the grids of the keyspaces named; 0 for one that the store does not know."""
        return {keyspace: await self._grid(keyspace) for keyspace in {change.keyspace for change in changes}}

    async def report_stale(self, tenant: str, stale: Sequence[StaleLocation]) -> list[bool]:
        """Remove locations that did not hold what they promised; per item, whether it was there.

        A location of an incarnation that is not the live one needs no removal: no match names it. Nor does one of a
        keyspace that the tenant has not (the store may have been wiped since).
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
