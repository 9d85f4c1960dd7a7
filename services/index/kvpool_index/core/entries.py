"""How the store holds chunks: packed values in chain groups, and the operations that change them.

A value says which node (by ordinal) has which shards of a chunk in which tier. It is a run of entries ordered by
ordinal, so that equal locations are equal bytes:

    u32 ordinal | u8 flags | u64 bitmap for each tier whose partial flag is set, in the order gpu, staging, disk

Flag bit t (0 gpu, 1 staging, 2 disk): the node has shards in that tier. Flag bit t + 4: they are not just those of the
grid's coarsest split (ShardGrid.all_shards), so a bitmap follows. Little endian. An absent value and an empty one mean
the same: no node has the chunk.

`adapters/redis_lua/apply_change.lua` does to a value in Redis what `apply_operation` does here.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from kvpool.core.cluster import ALL_SHARDS, CHAIN_GROUP_CHUNKS, ChainQuery, LocationChange
from kvpool.core.errors import InvalidRequest
from kvpool.core.location_digest import FIELD_BYTES, holding
from kvpool.core.outcome import Tier

TIERS: Final = (Tier.GPU, Tier.STAGING, Tier.DISK)
MAX_ENTRIES: Final = 64
"""Nodes that one value names at most. A further one is not recorded, and its digests do not count the chunk: as many
copies are enough for readers. Its node announces it again from time to time (see Reconciler), and is
recorded if another one has gone meanwhile."""

_HEAD: Final = struct.Struct("<IB")
_ORDINAL: Final = struct.Struct("<I")
_BITMAP: Final = struct.Struct("<Q")
_OPERATION: Final = struct.Struct("<IIQ6Q")
_TIER_FLAGS: Final = (1 << len(TIERS)) - 1
_WHOLE: Final = 0b1  # the flags of tier t, shifted down by t
_PART: Final = 0b1_0001

TierMasks = tuple[int, int, int]
"""One shard bitmap for each of TIERS."""

# Nearly all chunks are at a few places, and change alike: what was worked out for one holds for the next.
_remembered = lru_cache(maxsize=1024)

NO_SHARDS: Final[TierMasks] = (0, 0, 0)
EVERY_SHARD: Final[TierMasks] = (ALL_SHARDS, ALL_SHARDS, ALL_SHARDS)


@dataclass(frozen=True, slots=True)
class Entry:
    """What one node has of a chunk."""

    ordinal: int
    shards: TierMasks


class Operation(NamedTuple):
    """A change of one node's entry of one chunk: shards that appeared, then shards that went, in each tier.

    full_shards: the grid's all_shards, or 0 when the grid is not known. Then bitmaps are written out. A tier that is
    recorded as whole then stays so, or loses that record with any change of the tier, as its shards are not known; the
    node's next reconciliation brings them back.
    """

    ordinal: int
    full_shards: int
    added: TierMasks = NO_SHARDS
    removed: TierMasks = NO_SHARDS

    def then(self, later: "Operation") -> "Operation":
        """One operation that does both, this one first; they are of the same node and chunk."""
        pairs = range(len(TIERS))
        return Operation(
            ordinal=self.ordinal,
            full_shards=later.full_shards or self.full_shards,
            added=_masks([self.added[t] | later.added[t] for t in pairs]),
            removed=_masks([(self.removed[t] & ~later.added[t]) | later.removed[t] for t in pairs]),
        )

    def pack(self, fence: int) -> bytes:
        """The script's argument: u32 ordinal, u32 fence, u64 full, then u64 added and u64 removed for each tier."""
        added, removed = self.added, self.removed
        return _OPERATION.pack(
            self.ordinal, fence, self.full_shards, added[0], removed[0], added[1], removed[1], added[2], removed[2]
        )


@_remembered
def decode_value(value: bytes | None, full_shards: int) -> tuple[Entry, ...]:
    """The entries of a value, by ascending ordinal. full_shards: the grid's all_shards."""
    return tuple(Entry(ordinal, _decoded(held, full_shards)) for ordinal, held in _split(value))


def ordinals_in(value: bytes | None) -> list[int]:
    """The ordinals of a value's entries, ascending."""
    return [ordinal for ordinal, _ in _split(value)]


def is_malformed(value: bytes) -> bool:
    """Whether no index wrote this value: its last entry is cut off."""
    return sum(_ORDINAL.size + len(held) for _, held in _split(value)) != len(value)


def encode_entry(entry: Entry, full_shards: int) -> bytes:
    """The bytes of one entry; b"" when it has no shard."""
    held = holding(entry.shards, full_shards)
    return _ORDINAL.pack(entry.ordinal) + held if held else b""


@_remembered
def held_by(value: bytes | None, ordinal: int) -> bytes:
    """The bytes of one node's entry after its ordinal, of which digests are made; b"" if there is none."""
    return next((held for other, held in _split(value) if other == ordinal), b"")


def is_left_out(value: bytes, operation: Operation) -> bool:
    """Whether the operation adds shards of a node that the value after it does not name, because it is full."""
    is_long = len(value) >= MAX_ENTRIES * _HEAD.size  # most are not
    return is_long and any(operation.added) and not held_by(value, operation.ordinal)


@_remembered
def apply_operation(value: bytes | None, operation: Operation) -> bytes:
    """The value after the operation; b"" when nothing is left. Other nodes' entries keep their bytes."""
    held = dict(_split(value))
    before = held.get(operation.ordinal)
    if before is None and len(held) >= MAX_ENTRIES:
        return value or b""
    held[operation.ordinal] = _changed(before or b"\0", operation)
    return b"".join(_ORDINAL.pack(ordinal) + held[ordinal] for ordinal in sorted(held) if held[ordinal])


def _changed(held: bytes, operation: Operation) -> bytes:
    """What a node holds, packed as `holding` does, after the operation."""
    before = _decoded(held, operation.full_shards)
    after = [
        (shards | added) & ~removed & ALL_SHARDS
        for shards, added, removed in zip(before, operation.added, operation.removed, strict=True)
    ]
    changed = holding(after, operation.full_shards)
    if operation.full_shards:
        return changed
    kept = sum(
        1 << tier
        for tier in range(len(TIERS))
        if held[0] >> tier & _PART == _WHOLE and not operation.added[tier] and not operation.removed[tier]
    )
    return bytes((changed[0] | kept if changed else kept,)) + changed[1:] if changed or kept else b""


def _split(value: bytes | None) -> list[tuple[int, bytes]]:
    """Each entry's ordinal, and the bytes that follow it. What is cut off at the end is left out: no index wrote it."""
    found: list[tuple[int, bytes]] = []
    offset = 0
    while value and offset + _HEAD.size <= len(value):
        ordinal, flags = _HEAD.unpack_from(value, offset)
        start, offset = offset + _ORDINAL.size, offset + _HEAD.size
        offset += _BITMAP.size * (flags & flags >> 4 & _TIER_FLAGS).bit_count()
        if offset <= len(value):
            found.append((ordinal, value[start:offset]))
    return found


def _decoded(held: bytes, full_shards: int) -> TierMasks:
    """Bitmaps by tier of packed bytes of `holding`."""
    flags, offset = held[0], 1
    shards = [0, 0, 0]
    for tier in range(len(TIERS)):
        kind = flags >> tier & _PART
        if kind == _WHOLE:
            shards[tier] = full_shards
        elif kind == _PART:
            (shards[tier],) = _BITMAP.unpack_from(held, offset)
            offset += _BITMAP.size
    return _masks(shards)


def _masks(shards: Sequence[int]) -> TierMasks:
    gpu, staging, disk = shards
    return gpu, staging, disk


HASH_BYTES: Final = 16
SPLIT_CHUNKS: Final = 1024
"""A group of more chunks is split into parts. `adapters/redis_lua/apply_change.lua` has the same figure."""

# Takes the fields out of n hashes, several times as fast as slices would.
_FIELDS: Final = [
    struct.Struct(f"{FIELD_BYTES}s{HASH_BYTES - FIELD_BYTES}x" * count) for count in range(CHAIN_GROUP_CHUNKS + 1)
]


@dataclass(frozen=True, slots=True)
class GroupRead:
    """Chunks to read of one group: its head's hash, and the field (first 8 bytes of the hash) of each chunk."""

    head: bytes
    fields: Sequence[bytes]


class NodeEntry(NamedTuple):
    """A chunk of which some node holds something; the field is the first 8 bytes of its hash."""

    keyspace: bytes  # 16 bytes
    group_head: bytes  # 16 bytes
    field: bytes


@dataclass(frozen=True, slots=True)
class NamedChunk:
    """A chunk and the ordinals of all nodes that its value names."""

    entry: NodeEntry
    ordinals: Sequence[int]


class ChunkOperation(NamedTuple):
    """An operation and the chunk it is for."""

    keyspace: bytes
    chunk_hash: bytes  # 16 bytes
    group_head: bytes
    operation: Operation


def check_query(query: ChainQuery) -> None:
    """Raise InvalidRequest for hashes of a wrong length, and a first chunk within a group whose head is not named."""
    hashes, start = query.chunk_hashes, query.first_chunk_index
    if len(hashes) % HASH_BYTES:
        raise InvalidRequest(f"chunk_hashes has {len(hashes)} bytes, which is not a multiple of {HASH_BYTES}")
    if start < 0:
        raise InvalidRequest(f"first_chunk_index must be >= 0, got {start}")
    within = start % CHAIN_GROUP_CHUNKS
    if not hashes:
        return
    if within:
        if len(query.group_head_hash) != HASH_BYTES:
            raise InvalidRequest(
                f"group_head_hash must be the {HASH_BYTES}-byte hash of chunk {start - within}, because "
                f"first_chunk_index {start} is not a multiple of {CHAIN_GROUP_CHUNKS}"
            )
    elif query.group_head_hash and query.group_head_hash != hashes[:HASH_BYTES]:
        raise InvalidRequest(
            f"group_head_hash must be empty or the first hash, because first_chunk_index {start} is a multiple "
            f"of {CHAIN_GROUP_CHUNKS}"
        )


def whole_groups(query: ChainQuery) -> tuple[int, int]:
    """The chunks of a checked query, counted from its first one, that fill their groups: where they begin and end."""
    count = query.chunk_count
    start = min(count, -query.first_chunk_index % CHAIN_GROUP_CHUNKS)
    return start, count - (count - start) % CHAIN_GROUP_CHUNKS


def group_reads(query: ChainQuery) -> list[GroupRead]:
    """The reads that answer a query, in chain order. Raises InvalidRequest as check_query does."""
    check_query(query)
    return part_reads(query, 0, query.chunk_count)


def part_reads(query: ChainQuery, start: int, count: int) -> list[GroupRead]:
    """The reads of the chunks from `start` up to `count` of a checked query; start 0, or where a group begins."""
    hashes, within = query.chunk_hashes, query.first_chunk_index % CHAIN_GROUP_CHUNKS
    reads: list[GroupRead] = []
    at = start
    if within and not start and count:
        at = min(count, CHAIN_GROUP_CHUNKS - within)
        reads.append(GroupRead(query.group_head_hash, _FIELDS[at].unpack_from(hashes)))
    for first in range(at, count, CHAIN_GROUP_CHUNKS):
        offset = first * HASH_BYTES
        fields = _FIELDS[min(count - first, CHAIN_GROUP_CHUNKS)].unpack_from(hashes, offset)
        reads.append(GroupRead(hashes[offset : offset + HASH_BYTES], fields))
    return reads


def group_read(query: ChainQuery, number: int) -> GroupRead:
    """One of the reads of `group_reads`."""
    first = max(0, number * CHAIN_GROUP_CHUNKS - query.first_chunk_index % CHAIN_GROUP_CHUNKS)
    end = (number + 1) * CHAIN_GROUP_CHUNKS - query.first_chunk_index % CHAIN_GROUP_CHUNKS
    (read,) = part_reads(query, first, min(end, query.chunk_count))
    return read


def operations_of(
    changes: Iterable[LocationChange], *, ordinal: int, full_shards: Callable[[bytes], int]
) -> list[ChunkOperation]:
    """One operation for each chunk that a node's batch touches, in the order of first mention.

    Changes of one chunk are folded in their order; chunks are independent of each other, so that their order is free.
    full_shards: all_shards of a keyspace's grid, 0 if it is not known.
    """
    found: dict[tuple[bytes, bytes, bytes], ChunkOperation] = {}
    alike: dict[tuple[bytes, int, int, int], Operation] = {}  # most of a batch are
    for keyspace, chunk_hash, group_head, tier, added_shards, removed_shards in changes:
        kind = (keyspace, tier, added_shards, removed_shards)
        operation = alike.get(kind)
        if operation is None:
            added, removed = one_tier(tier, added_shards), one_tier(tier, removed_shards)
            operation = alike[kind] = Operation(ordinal, full_shards(keyspace), added, removed)
        key = (keyspace, group_head, chunk_hash)
        earlier = found.get(key)
        if earlier is not None:
            operation = earlier.operation.then(operation)
        found[key] = ChunkOperation(keyspace, chunk_hash, group_head, operation)
    return list(found.values())


def removal_of(entry: NodeEntry, ordinal: int) -> ChunkOperation:
    """The operation that removes all that the node of an ordinal holds of a chunk."""
    return ChunkOperation(
        keyspace=entry.keyspace,
        group_head=entry.group_head,
        chunk_hash=entry.field,
        operation=Operation(ordinal=ordinal, full_shards=0, removed=EVERY_SHARD),
    )


def one_tier(tier: int, shards: int) -> TierMasks:
    """Masks with the shards in one tier and nothing in the others."""
    at = TIERS.index(tier)
    return shards if at == 0 else 0, shards if at == 1 else 0, shards if at == 2 else 0
