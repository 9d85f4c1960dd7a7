"""A store in this process's memory, lost with it: for one replica, for tests, and where no Redis can be had."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.clock import Clock
from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import LeaseLost
from kvpool.core.location_digest import FIELD_BYTES, bucket_of, fingerprint, range_of
from kvpool_index.adapters.memory_events import MemoryEventLog
from kvpool_index.adapters.memory_nodes import MemoryKeyspaceRegistry, MemoryNodeDirectory
from kvpool_index.adapters.memory_policies import MemoryPolicyRegistry
from kvpool_index.core.entries import EVERY_SHARD, Operation, apply_operation, held_by, ordinals_in
from kvpool_index.core.events import ChunkState
from kvpool_index.core.groups import ChunkOperation, GroupRead, NamedChunk, NodeEntry, group_reads
from kvpool_index.ports import StreamFence

_STEP_GROUPS: Final = 256  # of a walk over all groups


@dataclass(slots=True)
class _Group:
    """Sixteen consecutive chunks of a chain. An empty group stays until its tombstone's time is over."""

    version: int = 0
    fences: dict[int, int] = field(default_factory=dict)  # ordinal -> number of the latest announce stream seen
    values: dict[bytes, bytes] = field(default_factory=dict)
    empty_since_s: float = 0.0


class MemoryLocationStore:
    """LocationStore over dicts. An empty group remembers its fences and version for `tombstone_s`."""

    def __init__(self, clock: Clock, nodes: MemoryNodeDirectory, *, tombstone_s: float) -> None:
        self._clock = clock
        self._nodes = nodes
        self._tombstone_s = tombstone_s
        self._groups: dict[bytes, dict[bytes, _Group]] = {}
        self._empty: dict[tuple[bytes, bytes], float] = {}  # in the order in which they became empty
        self._digests: dict[tuple[int, int], int] = {}  # by ordinal and range

    async def read(self, keyspace: bytes, groups: Sequence[GroupRead]) -> list[bytes | None]:
        known = self._groups.get(keyspace, {})
        found: list[bytes | None] = []
        for read in groups:
            group = known.get(read.head)
            if group is None:
                found.extend([None] * len(read.fields))
            else:
                found.extend(map(group.values.get, read.fields))
        return found

    async def read_chain(self, query: ChainQuery) -> list[bytes | None]:
        return await self.read(query.keyspace, group_reads(query))

    async def read_chains(self, queries: Sequence[ChainQuery]) -> list[list[bytes | None]]:
        return [await self.read_chain(query) for query in queries]

    async def apply(self, fence: StreamFence, operations: Sequence[ChunkOperation]) -> list[ChunkState]:
        self._nodes.check_fence(fence)
        states: list[ChunkState] = []
        for each in operations:
            group = self._group(each.keyspace, each.group_head)
            if fence.number < group.fences.get(fence.ordinal, 0):
                raise LeaseLost("a later announce stream of this node has taken over")
            group.fences[fence.ordinal] = fence.number
            states.append(self._change(group, each)[0])
        return states

    async def remove(self, operations: Sequence[ChunkOperation]) -> list[ChunkState | None]:
        states: list[ChunkState | None] = []
        for each in operations:
            state, changed = self._change(self._group(each.keyspace, each.group_head), each)
            states.append(state if changed else None)
        return states

    async def drop(self, keyspace: bytes, ordinal: int | None) -> AsyncIterator[list[ChunkState]]:
        heads = list(self._groups.get(keyspace, {}))
        for start in range(0, len(heads), _STEP_GROUPS):
            changed: list[ChunkState] = []
            for head in heads[start : start + _STEP_GROUPS]:
                changed += self._drop_group(keyspace, head, ordinal)
            yield changed

    async def digests(self, ordinal: int, ranges: Sequence[int]) -> list[int]:
        return [self._digests.get((ordinal, number), 0) for number in ranges]

    async def correct_digests(self, ordinal: int, digests: Mapping[int, tuple[int, int]]) -> int:
        as_found = {
            number: wanted ^ found
            for number, (found, wanted) in digests.items()
            if self._digests.get((ordinal, number), 0) == found
        }
        for number, difference in as_found.items():
            self._fold(ordinal, number, difference)
        return len(as_found)

    async def entries(self, ordinal: int, first_bucket: int, last_bucket: int) -> AsyncIterator[list[NodeEntry]]:
        places = [
            (keyspace, head)
            for keyspace, groups in self._groups.items()
            for head in groups
            if first_bucket <= bucket_of(head) <= last_bucket
        ]
        for start in range(0, len(places), _STEP_GROUPS):
            yield [
                NodeEntry(keyspace, head, chunk)
                for keyspace, head in places[start : start + _STEP_GROUPS]
                for chunk, value in self._values(keyspace, head).items()
                if held_by(value, ordinal)
            ]

    async def chunks(self) -> AsyncIterator[list[NamedChunk]]:
        places = [(keyspace, head) for keyspace, groups in self._groups.items() for head in groups]
        for keyspace, head in places:
            yield [
                NamedChunk(NodeEntry(keyspace, head, chunk), ordinals_in(value))
                for chunk, value in self._values(keyspace, head).items()
            ]

    def _values(self, keyspace: bytes, head: bytes) -> dict[bytes, bytes]:
        group = self._groups.get(keyspace, {}).get(head)
        return group.values if group is not None else {}

    def _drop_group(self, keyspace: bytes, head: bytes, ordinal: int | None) -> list[ChunkState]:
        group = self._groups.get(keyspace, {}).get(head)
        changed: list[ChunkState] = []
        for chunk, value in list(group.values.items()) if group is not None else ():
            ordinals = [ordinal] if ordinal is not None else ordinals_in(value)
            states = [self._remove_all(keyspace, head, chunk, each) for each in ordinals]
            changed += [state for state in states if state is not None][-1:]
        return changed

    def _remove_all(self, keyspace: bytes, head: bytes, chunk: bytes, ordinal: int) -> ChunkState | None:
        operation = Operation(ordinal=ordinal, full_shards=0, removed=EVERY_SHARD)
        each = ChunkOperation(keyspace=keyspace, group_head=head, chunk_hash=chunk, operation=operation)
        state, changed = self._change(self._group(keyspace, head), each)
        return state if changed else None

    def _group(self, keyspace: bytes, head: bytes) -> _Group:
        self._forget_tombstones()
        group = self._groups.setdefault(keyspace, {}).setdefault(head, _Group())
        if not group.values:
            self._note_empty(keyspace, head)
        return group

    def _change(self, group: _Group, each: ChunkOperation) -> tuple[ChunkState, bool]:
        chunk = each.chunk_hash[:FIELD_BYTES]
        before = group.values.get(chunk, b"")
        after = apply_operation(before, each.operation)
        if after != before:
            self._fold_change(each, before, after)
            group.version = max(group.version + 1, self._clock.wall_us())
            if after:
                group.values[chunk] = after
                self._empty.pop((each.keyspace, each.group_head), None)
            else:
                del group.values[chunk]
                if not group.values:
                    self._note_empty(each.keyspace, each.group_head)
        state = ChunkState(
            keyspace=each.keyspace,
            group_head=each.group_head,
            chunk_hash=each.chunk_hash,
            value=after,
            version=group.version,
        )
        return state, after != before

    def _fold_change(self, each: ChunkOperation, before: bytes, after: bytes) -> None:
        ordinal, field = each.operation.ordinal, each.chunk_hash[:FIELD_BYTES]
        held = [held_by(value, ordinal) for value in (before, after)]
        if held[0] != held[1]:
            prints = [fingerprint(each.keyspace + each.group_head + field, one) for one in held]
            self._fold(ordinal, range_of(each.group_head), prints[0] ^ prints[1])

    def _fold(self, ordinal: int, number: int, difference: int) -> None:
        digest = self._digests.pop((ordinal, number), 0) ^ difference
        if digest:
            self._digests[ordinal, number] = digest

    def _note_empty(self, keyspace: bytes, head: bytes) -> None:
        self._empty.pop((keyspace, head), None)
        self._empty[keyspace, head] = self._clock.monotonic_s()

    def _forget_tombstones(self) -> None:
        horizon_s = self._clock.monotonic_s() - self._tombstone_s
        while self._empty:
            (keyspace, head), since_s = next(iter(self._empty.items()))
            if since_s > horizon_s:
                return
            del self._empty[keyspace, head]
            del self._groups[keyspace][head]


class MemoryIndexStore:
    """IndexStore in memory."""

    kind = "memory"
    redis = None

    def __init__(
        self,
        clock: Clock,
        *,
        chunk_stream_count: int = 4,
        stream_entries: int = 512,
        tombstone_s: float = 60.0,
    ) -> None:
        self.events = MemoryEventLog(stream_count=chunk_stream_count + 1, max_entries=stream_entries)
        self.nodes = MemoryNodeDirectory(clock, self.events)
        self.keyspaces = MemoryKeyspaceRegistry()
        self.policies = MemoryPolicyRegistry(clock)
        self.locations = MemoryLocationStore(clock, self.nodes, tombstone_s=tombstone_s)

    async def check_layout(self) -> None:
        """Nobody else has written it."""

    async def ping(self) -> float:
        return 0.0

    async def run(self) -> None:
        return None

    async def close(self) -> None:
        return None
