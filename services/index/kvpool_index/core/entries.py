"""The packed value of one chunk: which node (by ordinal) has which shards in which tier.

A value is a run of entries ordered by ordinal, so that equal locations are equal bytes:

    u32 ordinal | u8 flags | u64 bitmap for each tier whose partial flag is set, in the order gpu, staging, disk

Flag bit t (0 gpu, 1 staging, 2 disk): the node has shards in that tier. Flag bit t + 4: not all shards of the grid, so
a bitmap follows. Little endian. An absent value and an empty one mean the same: nobody has the chunk.

`adapters/redis_lua/apply_change.lua` does to a value in Redis what `apply_operation` does here.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core.cluster import ALL_SHARDS
from kvpool.core.location_digest import holding
from kvpool.core.outcome import Tier

TIERS: Final = (Tier.GPU, Tier.STAGING, Tier.DISK)
MAX_ENTRIES: Final = 64  # nodes that one value names at most; a further one is not recorded

_HEAD: Final = struct.Struct("<IB")
_ORDINAL: Final = struct.Struct("<I")
_BITMAP: Final = struct.Struct("<Q")
_OPERATION: Final = struct.Struct("<IIQ6Q")

TierMasks = tuple[int, int, int]
"""One shard bitmap for each of TIERS."""

NO_SHARDS: Final[TierMasks] = (0, 0, 0)
EVERY_SHARD: Final[TierMasks] = (ALL_SHARDS, ALL_SHARDS, ALL_SHARDS)


@dataclass(frozen=True, slots=True)
class Entry:
    """What one node has of a chunk. A bitmap of ALL_SHARDS stands for the whole grid."""

    ordinal: int
    shards: TierMasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A change of one node's entry of one chunk: shards that appeared, then shards that went, in each tier.

    full_shards: the bitmap of the whole grid, or 0 when it is not known (then entries are kept as plain bitmaps).
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


def decode_value(value: bytes | None) -> tuple[Entry, ...]:
    """The entries of a value, by ascending ordinal. Raises struct.error for bytes that are no value."""
    return tuple(entry for entry, _ in _split(value))


def encode_entry(entry: Entry, full_shards: int) -> bytes:
    """The bytes of one entry; b"" when it has no shard."""
    held = holding(entry.shards, full_shards)
    return _ORDINAL.pack(entry.ordinal) + held if held else b""


def held_by(value: bytes | None, ordinal: int) -> bytes:
    """The bytes of one node's entry after its ordinal, of which digests are made; b"" if there is none."""
    for entry, entry_bytes in _split(value):
        if entry.ordinal == ordinal:
            return entry_bytes[_ORDINAL.size :]
    return b""


def apply_operation(value: bytes | None, operation: Operation) -> bytes:
    """The value after the operation; b"" when nothing is left. Other nodes' entries keep their bytes."""
    packed: dict[int, bytes] = {}
    before = NO_SHARDS
    for entry, entry_bytes in _split(value):
        packed[entry.ordinal] = entry_bytes
        if entry.ordinal == operation.ordinal:
            before = entry.shards
    if operation.ordinal not in packed and len(packed) >= MAX_ENTRIES:
        return value or b""
    after = [
        ((_grid(shards, operation.full_shards) | added) & ~removed) & ALL_SHARDS
        for shards, added, removed in zip(before, operation.added, operation.removed, strict=True)
    ]
    packed[operation.ordinal] = encode_entry(Entry(operation.ordinal, _masks(after)), operation.full_shards)
    return b"".join(packed[ordinal] for ordinal in sorted(packed))


def _split(value: bytes | None) -> list[tuple[Entry, bytes]]:
    """Each entry with its own bytes."""
    found: list[tuple[Entry, bytes]] = []
    offset = 0
    while value and offset < len(value):
        start = offset
        ordinal, flags = _HEAD.unpack_from(value, offset)
        offset += _HEAD.size
        shards = [0, 0, 0]
        for tier in range(len(TIERS)):
            if flags >> tier & 1:
                shards[tier] = ALL_SHARDS
                if flags >> (tier + 4) & 1:
                    (shards[tier],) = _BITMAP.unpack_from(value, offset)
                    offset += _BITMAP.size
        found.append((Entry(ordinal, _masks(shards)), value[start:offset]))
    return found


def _grid(shards: int, full_shards: int) -> int:
    """ALL_SHARDS as the grid's own bitmap, where the grid is known."""
    return full_shards if shards == ALL_SHARDS and full_shards else shards


def _masks(shards: Sequence[int]) -> TierMasks:
    gpu, staging, disk = shards
    return gpu, staging, disk
