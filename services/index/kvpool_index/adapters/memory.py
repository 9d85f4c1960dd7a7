"""A store in this process's memory, lost with it: for one replica, for tests, and where no Redis can be had."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvpool.core.clock import Clock
from kvpool.core.cluster import ChainQuery
from kvpool.core.errors import LeaseLost
from kvpool.core.location_digest import (
    FIELD_BYTES,
    PART_COUNT,
    PartSpan,
    SplitGroup,
    bucket_of,
    fingerprint,
    part_of,
    range_of,
)
from kvpool_index.adapters.memory_nodes import (
    MemoryEventLog,
    MemoryKeyspaceRegistry,
    MemoryNodeDirectory,
    MemoryPolicyRegistry,
)
from kvpool_index.core.entries import (
    HASH_BYTES,
    SPLIT_CHUNKS,
    ChunkOperation,
    GroupRead,
    NamedChunk,
    NodeEntry,
    apply_operation,
    group_reads,
    held_by,
    ordinals_in,
    removal_of,
)
from kvpool_index.core.events import ChunkState
from kvpool_index.ports import TOMBSTONE_S, StreamFence

KeyT = TypeVar("KeyT")

_STEP_CHUNKS: Final = 2048  # of a walk over groups
_STEP_SPLIT: Final = 8  # split groups whose digests are named at once


@dataclass(slots=True)
class _Part:
    """Chunks of a group: those of one part, or all of a group that is not split, whose digests are not kept."""

    values: dict[bytes, bytes] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)  # by ordinal


@dataclass(slots=True)
class _Group:
    """Sixteen consecutive chunks of all chains with one head.

    An empty group stays until its tombstone's time is over, and a split one stays split until then.
    """

    version: int = 0
    fences: dict[int, int] = field(default_factory=dict)  # ordinal -> number of the latest announce stream seen
    parts: list[_Part] = field(default_factory=lambda: [_Part()])  # one, or PART_COUNT
    chunk_count: int = 0

    @property
    def is_split(self) -> bool:
        return len(self.parts) > 1

    def part(self, chunk: bytes) -> _Part:
        """Where a chunk is."""
        return self.parts[part_of(chunk) if self.is_split else 0]

    def split(self, place: bytes) -> None:
        """place: keyspace and head of the group."""
        (whole,) = self.parts
        self.parts = [_Part() for _ in range(PART_COUNT)]
        for chunk, value in whole.values.items():
            part = self.part(chunk)
            part.values[chunk] = value
            for ordinal in ordinals_in(value):
                fold(part.digests, ordinal, fingerprint(place + chunk, held_by(value, ordinal)))


def fold(digests: dict[KeyT, int], key: KeyT, difference: int) -> None:
    """Change a digest; those that are 0 are not kept."""
    digest = digests.pop(key, 0) ^ difference
    if digest:
        digests[key] = digest


class MemoryLocationStore:
    """LocationStore over dicts. An empty group remembers its fences and version for TOMBSTONE_S."""

    def __init__(self, clock: Clock, nodes: MemoryNodeDirectory) -> None:
        self._clock = clock
        self._nodes = nodes
        self._groups: dict[bytes, dict[bytes, _Group]] = {}
        self._empty: dict[tuple[bytes, bytes], float] = {}  # in the order in which they became empty
        self._digests: dict[tuple[int, int], int] = {}  # by ordinal and range
        self._split: set[bytes] = set()  # keyspace and head of each group that is split

    async def read(self, keyspace: bytes, groups: Sequence[GroupRead]) -> list[bytes | None]:
        known = self._groups.get(keyspace, {})
        found: list[bytes | None] = []
        for read in groups:
            group = known.get(read.head)
            if group is None:
                found.extend([None] * len(read.fields))
            else:
                found.extend(group.part(chunk).values.get(chunk) for chunk in read.fields)
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
        for values in self._steps((keyspace, head) for head in heads):
            changed: list[ChunkState] = []
            for entry, value in values:
                ordinals = [ordinal] if ordinal is not None else ordinals_in(value)
                states = [self._remove_all(entry, each) for each in ordinals]
                changed += [state for state in states if state is not None][-1:]
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
            fold(self._digests, (ordinal, number), difference)
        return len(as_found)

    async def split_groups(self, ordinal: int, number: int, after: bytes) -> tuple[list[SplitGroup], bytes]:
        found: list[SplitGroup] = []
        split = sorted(
            place
            for place in self._split
            if place > after
            and range_of(place) == number
            and self._groups[place[:HASH_BYTES]][place[HASH_BYTES:]].chunk_count
        )
        for place in split[:_STEP_SPLIT]:
            keyspace, head = place[:HASH_BYTES], place[HASH_BYTES:]
            digests = [part.digests.get(ordinal, 0) for part in self._groups[keyspace][head].parts]
            found.append(SplitGroup(keyspace, head, digests))
        return found, split[_STEP_SPLIT - 1] if len(split) > _STEP_SPLIT else b""

    async def part_digest(self, ordinal: int, span: PartSpan) -> int | None:
        group = self._groups.get(span.keyspace, {}).get(span.group_head)
        return group.parts[span.part].digests.get(ordinal, 0) if group is not None and group.is_split else None

    async def correct_part_digest(self, ordinal: int, span: PartSpan, found: int, wanted: int) -> bool:
        if await self.part_digest(ordinal, span) != found:
            return False
        part = self._groups[span.keyspace][span.group_head].parts[span.part]
        fold(part.digests, ordinal, found ^ wanted)
        fold(self._digests, (ordinal, range_of(span.group_head)), found ^ wanted)
        return True

    async def entries(self, ordinal: int, first_bucket: int, last_bucket: int) -> AsyncIterator[list[NodeEntry]]:
        places = [
            (keyspace, head)
            for keyspace, groups in self._groups.items()
            for head in groups
            if first_bucket <= bucket_of(head) <= last_bucket
        ]
        split = self._split
        for values in self._steps(place for place in places if place[0] + place[1] not in split):
            yield [entry for entry, value in values if held_by(value, ordinal)]

    async def part_entries(self, ordinal: int, span: PartSpan) -> AsyncIterator[list[NodeEntry]]:
        for values in self._steps([(span.keyspace, span.group_head)], only=span.part):
            yield [entry for entry, value in values if held_by(value, ordinal)]

    async def group_heads(self, keyspace: bytes) -> AsyncIterator[list[bytes]]:
        yield [head for head, group in self._groups.get(keyspace, {}).items() if group.chunk_count]

    async def chunks(self) -> AsyncIterator[list[NamedChunk]]:
        places = [(keyspace, head) for keyspace, groups in self._groups.items() for head in groups]
        for values in self._steps(places):
            yield [NamedChunk(entry, ordinals_in(value)) for entry, value in values]

    def _steps(
        self, places: Iterable[tuple[bytes, bytes]], only: int | None = None
    ) -> Iterator[list[tuple[NodeEntry, bytes]]]:
        """What groups have when their turn comes, about _STEP_CHUNKS at a time. only: of this part of each."""
        step: list[tuple[NodeEntry, bytes]] = []
        for keyspace, head in places:
            group = self._groups.get(keyspace, {}).get(head)
            for part in list(group.parts) if group is not None else ():
                step += [
                    (NodeEntry(keyspace, head, chunk), value)
                    for chunk, value in part.values.items()
                    if only is None or part_of(chunk) == only
                ]
                if len(step) >= _STEP_CHUNKS:
                    yield step
                    step = []
        yield step

    def _remove_all(self, entry: NodeEntry, ordinal: int) -> ChunkState | None:
        state, changed = self._change(self._group(entry.keyspace, entry.group_head), removal_of(entry, ordinal))
        return state if changed else None

    def _group(self, keyspace: bytes, head: bytes) -> _Group:
        self._forget_tombstones()
        groups = self._groups.setdefault(keyspace, {})
        group = groups.get(head)
        if group is None:
            group = groups[head] = _Group()
        if not group.chunk_count:
            self._note_empty(keyspace, head)
        return group

    def _change(self, group: _Group, each: ChunkOperation) -> tuple[ChunkState, bool]:
        chunk = each.chunk_hash[:FIELD_BYTES]
        part = group.part(chunk)
        before = part.values.get(chunk, b"")
        after = apply_operation(before, each.operation)
        if after != before:
            self._fold_change(group, each, before, after)
            group.version = max(group.version + 1, self._clock.wall_us())
            group.chunk_count += bool(after) - bool(before)
            if after:
                part.values[chunk] = after
                self._empty.pop((each.keyspace, each.group_head), None)
            else:
                del part.values[chunk]
                if not group.chunk_count:
                    self._note_empty(each.keyspace, each.group_head)
            if group.chunk_count > SPLIT_CHUNKS and not group.is_split:
                group.split(each.keyspace + each.group_head)
                self._split.add(each.keyspace + each.group_head)
        return ChunkState(each.keyspace, each.group_head, each.chunk_hash, after, group.version), after != before

    def _fold_change(self, group: _Group, each: ChunkOperation, before: bytes, after: bytes) -> None:
        ordinal, chunk = each.operation.ordinal, each.chunk_hash[:FIELD_BYTES]
        was, held = held_by(before, ordinal), held_by(after, ordinal)
        if was != held:
            place = each.keyspace + each.group_head + chunk
            difference = fingerprint(place, was) ^ fingerprint(place, held)
            fold(self._digests, (ordinal, range_of(each.group_head)), difference)
            if group.is_split:
                fold(group.part(chunk).digests, ordinal, difference)

    def _note_empty(self, keyspace: bytes, head: bytes) -> None:
        self._empty.pop((keyspace, head), None)
        self._empty[keyspace, head] = self._clock.monotonic_s()

    def _forget_tombstones(self) -> None:
        horizon_s = self._clock.monotonic_s() - TOMBSTONE_S
        while self._empty:
            (keyspace, head), since_s = next(iter(self._empty.items()))
            if since_s > horizon_s:
                return
            del self._empty[keyspace, head]
            del self._groups[keyspace][head]
            self._split.discard(keyspace + head)


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
    ) -> None:
        self.events = MemoryEventLog(stream_count=chunk_stream_count + 1, max_entries=stream_entries)
        self.nodes = MemoryNodeDirectory(clock, self.events)
        self.keyspaces = MemoryKeyspaceRegistry(clock)
        self.policies = MemoryPolicyRegistry(clock)
        self.locations = MemoryLocationStore(clock, self.nodes)

    async def check_layout(self) -> None:
        """Do nothing: other releases cannot write to this memory."""

    async def ping(self) -> float:
        return 0.0

    async def run(self) -> None:
        return None

    async def close(self) -> None:
        return None
