"""Cutting a chain into the groups its chunks are stored in, and announcements into operations."""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpool.core.cluster import CHAIN_GROUP_CHUNKS, ChainQuery, LocationChange
from kvpool.core.errors import InvalidRequest
from kvpool.core.location_digest import FIELD_BYTES
from kvpool_index.core.entries import TIERS, Operation, TierMasks

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
        raise InvalidRequest(f"chunk_hashes has {len(hashes)} bytes, which is no multiple of {HASH_BYTES}")
    if start < 0:
        raise InvalidRequest(f"first_chunk_index must be >= 0, got {start}")
    within = start % CHAIN_GROUP_CHUNKS
    if not hashes:
        return
    if within:
        if len(query.group_head_hash) != HASH_BYTES:
            raise InvalidRequest(
                f"group_head_hash must be the {HASH_BYTES}-byte hash of chunk {start - within}, because "
                f"first_chunk_index {start} is no multiple of {CHAIN_GROUP_CHUNKS}"
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
    for change in changes:
        operation = Operation(
            ordinal=ordinal,
            full_shards=full_shards(change.keyspace),
            added=one_tier(change.tier, change.added_shards),
            removed=one_tier(change.tier, change.removed_shards),
        )
        key = (change.keyspace, change.group_head_hash, change.chunk_hash)
        earlier = found.get(key)
        found[key] = ChunkOperation(
            keyspace=change.keyspace,
            chunk_hash=change.chunk_hash,
            group_head=change.group_head_hash,
            operation=operation if earlier is None else earlier.operation.then(operation),
        )
    return list(found.values())


def one_tier(tier: int, shards: int) -> TierMasks:
    """Masks with the shards in one tier and nothing in the others."""
    at = TIERS.index(tier)
    return shards if at == 0 else 0, shards if at == 1 else 0, shards if at == 2 else 0
