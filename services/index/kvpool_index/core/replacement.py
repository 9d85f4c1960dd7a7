"""What a node says it holds in some buckets, or a part of a group, as operations that make the store say the same."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor

from kvpool.core.cluster import ALL_SHARDS, LocationChange
from kvpool.core.errors import InvalidRequest
from kvpool.core.location_digest import (
    BUCKET_COUNT,
    BUCKETS_PER_RANGE,
    FIELD_BYTES,
    PartSpan,
    bucket_of,
    fingerprint,
    holding,
    part_of,
    range_of,
)
from kvpool_index.core.entries import EVERY_SHARD, TIERS, ChunkOperation, NodeEntry, Operation


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """Consecutive buckets, both inclusive."""

    first: int
    last: int

    def check(self, changes: Sequence[LocationChange]) -> None:
        """Raises InvalidRequest for invalid buckets, and for an item outside of them, which it names."""
        if not 0 <= self.first <= self.last < BUCKET_COUNT:
            raise InvalidRequest(
                f"buckets must be ordered and from 0 to {BUCKET_COUNT - 1}, got {self.first, self.last}"
            )
        for index, change in enumerate(changes):
            if not self.first <= bucket_of(change.group_head_hash) <= self.last:
                raise InvalidRequest(f"location {index} is of no bucket of the range", item_index=index)

    @property
    def whole_ranges(self) -> list[int] | None:
        """The digest ranges that these buckets are, or None if they are only part of one."""
        if self.first % BUCKETS_PER_RANGE or (self.last + 1) % BUCKETS_PER_RANGE:
            return None
        return list(range(self.first // BUCKETS_PER_RANGE, (self.last + 1) // BUCKETS_PER_RANGE))


def check_part(span: PartSpan, changes: Sequence[LocationChange]) -> None:
    """Raises InvalidRequest naming the item that lies in another group or part."""
    place = (span.keyspace, span.group_head, span.part)
    for index, change in enumerate(changes):
        if (change.keyspace, change.group_head_hash, part_of(change.chunk_hash)) != place:
            raise InvalidRequest(f"location {index} does not lie in the part", item_index=index)


class Replacement:
    """A node's whole truth for some buckets, or for a part of a group.

    Chunks of a group that share a field are one, as in the store.
    """

    def __init__(self, changes: Iterable[LocationChange], *, ordinal: int, full_shards: Callable[[bytes], int]) -> None:
        """full_shards: all_shards of a keyspace's grid, 0 if it is not known."""
        self._ordinal = ordinal
        self._held: dict[NodeEntry, tuple[bytes, list[int]]] = {}
        self._left_out: set[NodeEntry] = set()  # of them, those that the store does not record
        self._fingerprints: dict[NodeEntry, int] = {}  # of all, once they were asked for
        self._full_shards = full_shards
        for keyspace, chunk_hash, head, tier, added_shards, _ in changes:
            at = NodeEntry(keyspace, head, chunk_hash[:FIELD_BYTES])
            _, shards = self._held.setdefault(at, (chunk_hash, [0, 0, 0]))
            shards[TIERS.index(tier)] |= added_shards

    def operations(self) -> list[ChunkOperation]:
        """What makes the store's entries of the chunks named say just what is held."""
        found: list[ChunkOperation] = []
        known: dict[tuple[int, int, int, int], Operation] = {}  # few differ
        for at, (chunk_hash, shards) in self._held.items():
            gpu, staging, disk = shards
            kind = (self._full_shards(at.keyspace), gpu, staging, disk)
            operation = known.get(kind)
            if operation is None:
                operation = known[kind] = Operation(
                    ordinal=self._ordinal,
                    full_shards=kind[0],
                    added=(gpu, staging, disk),
                    removed=(ALL_SHARDS & ~gpu, ALL_SHARDS & ~staging, ALL_SHARDS & ~disk),
                )
            found.append(_operation(at, chunk_hash, operation))
        return found

    def leave_out(self, operations: Iterable[ChunkOperation]) -> None:
        """The store did not record what these operations add: other nodes fill the chunks' values."""
        self._left_out = {
            NodeEntry(each.keyspace, each.group_head, each.chunk_hash[:FIELD_BYTES]) for each in operations
        }

    def digests(self, ranges: Sequence[int], *, without: Collection[tuple[bytes, bytes]] = ()) -> dict[int, int]:
        """The digests of these ranges when the store holds this but for what is left out, and nothing else of the node.

        without: groups, by keyspace and head, that are not counted.
        """
        found = dict.fromkeys(ranges, 0)
        for at, print_ in self.fingerprints().items():
            number = range_of(at.group_head)
            is_counted = at not in self._left_out and not (without and (at.keyspace, at.group_head) in without)
            if is_counted and number in found:
                found[number] ^= print_
        return found

    def digest(self) -> int:
        """The same of all that is held."""
        return reduce(xor, (print_ for at, print_ in self.fingerprints().items() if at not in self._left_out), 0)

    def fingerprints(self) -> Mapping[NodeEntry, int]:
        """Those of everything that is named, computed once: while the store applies it, if asked for then."""
        if self._fingerprints:
            return self._fingerprints
        packed: dict[tuple[int, int, int, int], bytes] = {}  # few differ
        for at, (_, (gpu, staging, disk)) in self._held.items():
            keyspace, head, field = at
            kind = (self._full_shards(keyspace), gpu, staging, disk)
            held = packed.get(kind)
            if held is None:
                held = packed[kind] = holding(kind[1:], kind[0])
            self._fingerprints[at] = fingerprint(keyspace + head + field, held)
        return self._fingerprints

    def removals(self, entries: Iterable[NodeEntry]) -> list[ChunkOperation]:
        """What removes those of the node's entries that are not named."""
        operation = Operation(ordinal=self._ordinal, full_shards=0, removed=EVERY_SHARD)
        return [_operation(at, at.field, operation) for at in entries if at not in self._held]


def _operation(at: NodeEntry, chunk_hash: bytes, operation: Operation) -> ChunkOperation:
    return ChunkOperation(keyspace=at.keyspace, chunk_hash=chunk_hash, group_head=at.group_head, operation=operation)
