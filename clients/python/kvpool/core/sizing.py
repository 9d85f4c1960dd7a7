"""What the KV of a keyspace takes: of a chunk, of a token, and how many tokens a node's tiers hold.

Exact for a chunk. What a tier holds is what it holds of this keyspace alone; the disk's shares are those of the
pagestore's default backend, which a test compares.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import page_bytes
from kvpool.core.payload import ShardPayload

INDEX_CHUNK_BYTES = 40
"""Redis memory of a chunk with one location, its event included: 36 to 38 were measured (bench/index_memory.py)."""

DEFAULT_SEGMENT_BYTES = 64 << 20
"""Of a segment of the arena that is made when it is needed."""

_BLOCK_BYTES = 4096
_PREPARED_PARTS = 16  # enough for the sizes of pages and the tenants that usual nodes have
_PREPARED_AT_MOST_BYTES = 1 << 30
_TRAILER_BYTES = 256
_DISK_FIXED_BYTES = 24 << 20
_SMALLEST_CHARGE_BYTES = 25_600


def prepared_segment_bytes(arena_bytes: int, segment_bytes: int = DEFAULT_SEGMENT_BYTES) -> int:
    """Size of a segment that is made at the start: few large ones are mapped and registered sooner than many."""
    chosen_bytes = max(segment_bytes, min(_PREPARED_AT_MOST_BYTES, arena_bytes // _PREPARED_PARTS))
    return chosen_bytes // _BLOCK_BYTES * _BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class KeyspaceSize:
    """Sizes of one keyspace."""

    spec: KeyspaceSpec

    @property
    def grid(self) -> ShardGrid:
        """How a chunk is cut into pages."""
        return ShardGrid.of(self.spec)

    @property
    def token_bytes(self) -> float:
        """Payload bytes of one token, of all layers and heads, scales of the codec included."""
        return sum(size.payload_bytes for size in self._shards) / self.spec.chunk_tokens

    @property
    def chunk_staging_bytes(self) -> int:
        """Arena bytes of a chunk's slots."""
        return sum(size.slot_bytes for size in self._shards)

    @property
    def chunk_disk_bytes(self) -> int:
        """What a chunk counts towards the budget of a disk tier."""
        return sum(_disk_bytes(page_bytes(size.payload_bytes)) for size in self._shards)

    @property
    def largest_page_bytes(self) -> int:
        """Slot of the largest page."""
        return max(size.slot_bytes for size in self._shards)

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """TP degrees whose ranks have whole shards; beyond the KV heads, ranks share them."""
        finest = self.grid.splits[-1]
        return tuple(count for count in range(1, finest + 1) if finest % count == 0)

    def staging_tokens(self, arena_bytes: int, segment_bytes: int) -> int:
        """Tokens that an arena holds: each segment is cut into slots of one size, and what is left of it is lost.

        0 if a page does not fit a segment.
        """
        if self.largest_page_bytes > segment_bytes:
            return 0
        slots = Counter(size.slot_bytes for size in self._shards)
        segments_per_chunk = sum(count / (segment_bytes // slot_bytes) for slot_bytes, count in slots.items())
        return int(arena_bytes // segment_bytes / segments_per_chunk) * self.spec.chunk_tokens

    def disk_tokens(self, disk_bytes: int) -> int:
        """Tokens that a disk tier holds: a 64th is for records, a 32nd of the rest for pages being deleted."""
        blocks = max(0, disk_bytes - _DISK_FIXED_BYTES) * 63 // 64 // _BLOCK_BYTES
        return (blocks - blocks // 32) * _BLOCK_BYTES // self.chunk_disk_bytes * self.spec.chunk_tokens

    def index_bytes(self, tokens: int, copies: int = 1) -> int:
        """Redis memory for so many tokens: more copies are more locations of the same chunk, 5 bytes each."""
        return tokens // self.spec.chunk_tokens * (INDEX_CHUNK_BYTES + 5 * (copies - 1))

    @property
    def _shards(self) -> list[ShardPayload]:
        grid = self.grid
        return [ShardPayload.of(self.spec, grid, shard) for shard in shards_in(grid.all_shards)]


def _disk_bytes(size_bytes: int) -> int:
    blocks = -(-(size_bytes + _TRAILER_BYTES) // _BLOCK_BYTES)
    return max(blocks * _BLOCK_BYTES, _SMALLEST_CHARGE_BYTES)
