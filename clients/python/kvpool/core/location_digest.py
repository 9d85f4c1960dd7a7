"""Digests by which a node and the index find out where they differ, without naming chunks.

Every chain group falls into one of BUCKET_COUNT buckets by the hash of its head, and BUCKETS_PER_RANGE consecutive
buckets make a range. The digest of a node's range is the exclusive or of one fingerprint for each chunk of which the
node holds anything, so that it can be updated by each change of one chunk.

The index keeps chunks by the first FIELD_BYTES of their hash; `adapters/redis_lua/apply_change.lua` of the index
computes the same fingerprints.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FIELD_BYTES = 8  # of a chunk hash; enough to tell the 16 chunks of a group apart
BUCKET_COUNT = 1 << 16
BUCKETS_PER_RANGE = 16
RANGE_COUNT = BUCKET_COUNT // BUCKETS_PER_RANGE
PART_COUNT = 256  # of a split group; hashes are keyed, so that none without the key can fill one part alone
PART_BATCHES = 4  # a part may be replaced by so many times the items of a batch

_BITMAP = struct.Struct("<Q")


def bucket_of(group_head: bytes) -> int:
    """The bucket of a group, 0 to 65,535."""
    return group_head[-2] << 8 | group_head[-1]


def range_of(group_head: bytes) -> int:
    """The range of a group, 0 to 4,095."""
    return (group_head[-2] << 8 | group_head[-1]) >> 4


def range_numbers(group_heads: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """The range of each group. group_heads: [N, 16]."""
    buckets = group_heads[:, -2].astype(np.uint16) << np.uint16(8) | group_heads[:, -1]
    return buckets // np.uint16(BUCKETS_PER_RANGE)


def part_of(chunk_hash: bytes) -> int:
    """The part of a split group that a chunk lies in, 0 to 255, from its hash or the hash's first bytes."""
    return chunk_hash[0]


def range_buckets(first_range: int, last_range: int) -> tuple[int, int]:
    """First and last bucket of consecutive ranges, all inclusive."""
    return first_range * BUCKETS_PER_RANGE, (last_range + 1) * BUCKETS_PER_RANGE - 1


def holding(shards: Sequence[int], full_shards: int) -> bytes:
    """What one node holds of a chunk, as the index keeps it after the node's ordinal; b"" for nothing.

    shards: bitmaps of gpu, staging and disk. full_shards: all_shards of the keyspace's grid, 0 if it is not known.
    Layout: u8 flags, then a little-endian u64 for each tier of other shards. Flag bit t (0 gpu, 1 staging, 2 disk):
    something is there; bit t + 4: it is not just the grid's coarsest split, so that a bitmap follows.
    """
    flags, bitmaps = 0, b""
    for tier, bitmap in enumerate(shards):
        if not bitmap:
            continue
        flags |= 1 << tier
        if bitmap != full_shards:
            flags |= 1 << (tier + 4)
            bitmaps += _BITMAP.pack(bitmap)
    return bytes((flags,)) + bitmaps if flags else b""


def fingerprint(place: bytes, held: bytes) -> int:
    """64 bits of one chunk; 0 if nothing is held.

    place: keyspace id, hash of the group's head, first FIELD_BYTES of the chunk's hash. held: see `holding`.
    """
    if not held:
        return 0
    return int.from_bytes(sha1(place + held, usedforsecurity=False).digest()[:8], "big")


class HeldChunk(NamedTuple):
    """What one node holds of one chunk now.

    shards: bitmaps of gpu, staging and disk. full_shards: all_shards of the keyspace's grid.
    """

    group_head: bytes  # 16 bytes
    shards: tuple[int, int, int]
    full_shards: int


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """Some chunks of one keyspace and where their groups are found: two columns, of 16 bytes for each chunk."""

    keyspace: bytes  # 16 bytes
    chunk_hashes: bytes
    group_heads: bytes

    @classmethod
    def of(cls, places: Iterable[tuple[bytes, bytes, bytes]]) -> list[ChunkPlaces]:
        """From the keyspace, hash and group head of each chunk."""
        found: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
        for keyspace, chunk_hash, head in places:
            hashes, heads = found.setdefault(keyspace, ([], []))
            hashes.append(chunk_hash)
            heads.append(head)
        return [cls(keyspace, b"".join(hashes), b"".join(heads)) for keyspace, (hashes, heads) in found.items()]


@dataclass(frozen=True, slots=True)
class PartSpan:
    """One part of a chain group: the chunks whose hash begins with the byte `part`."""

    keyspace: bytes  # 16 bytes
    group_head: bytes  # 16 bytes
    part: int


@dataclass(frozen=True, slots=True)
class SplitGroup:
    """A chain group that the index keeps in parts, and the digest of one node's chunks in each of the PART_COUNT."""

    keyspace: bytes  # 16 bytes
    group_head: bytes  # 16 bytes
    digests: list[int]
