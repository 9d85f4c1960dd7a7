"""The grid of shards: how the KV of a chunk is cut into pages. A pure function of the keyspace, never of TP or PP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.keyspace import KeyspaceSpec

MAX_SHARDS = 64
"""A chunk's shards fit a u64 bitmap."""
MAX_HEAD_GROUPS = 16
SMALLEST_COLUMN_BYTES = 64 << 10
"""A head group over all layers is not cut smaller than this, or a small model would have pages of a few KiB."""
LARGEST_PAGE_BYTES = 2 << 20
"""Layers are grouped until no page is larger, as far as MAX_SHARDS allows."""


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """Layer groups x KV-head groups; shard = layer_group * head_groups + head_group.

    Head groups are equal; layer group i begins at layer ceil(i * layers / layer_groups).
    """

    layers: int
    kv_heads: int
    layer_groups: int
    head_groups: int

    @classmethod
    def of(cls, spec: KeyspaceSpec) -> ShardGrid:
        """The grid of a keyspace."""
        return _grid_of(spec)

    @property
    def shard_count(self) -> int:
        return self.layer_groups * self.head_groups

    @property
    def all_shards(self) -> int:
        """Bitmap of every shard: bit s = shard s."""
        return (1 << self.shard_count) - 1

    def shard(self, layer_group: int, head_group: int) -> int:
        if not (0 <= layer_group < self.layer_groups and 0 <= head_group < self.head_groups):
            raise InvalidRequest(f"shard ({layer_group}, {head_group}) is outside of {self.describe()}")
        return layer_group * self.head_groups + head_group

    def layers_of(self, shard: int) -> range:
        """Model layers of a shard."""
        group = self._check(shard) // self.head_groups
        return range(self._first_layer(group), self._first_layer(group + 1))

    def heads_of(self, shard: int) -> range:
        """KV heads of a shard."""
        group_heads = self.kv_heads // self.head_groups
        first = self._check(shard) % self.head_groups * group_heads
        return range(first, first + group_heads)

    def bitmap_for(self, layers: range, heads: range) -> int:
        """Bitmap of the shards that make up a rank's layers x heads exactly.

        raises: PartitionRefused naming the grid if they are no union of shards or outside of the model.
        """
        layer_starts = [self._first_layer(group) for group in range(self.layer_groups + 1)]
        group_heads = self.kv_heads // self.head_groups
        head_starts = list(range(0, self.kv_heads + 1, group_heads))
        for name, wanted, starts in (("layers", layers, layer_starts), ("KV heads", heads, head_starts)):
            if wanted.step != 1 or not len(wanted) or wanted.start not in starts or wanted.stop not in starts:
                raise PartitionRefused(
                    f"{name} [{wanted.start}, {wanted.stop}) are no union of shards of the {self.describe()}"
                )
        bitmap = 0
        for layer_group in range(layer_starts.index(layers.start), layer_starts.index(layers.stop)):
            for head_group in range(heads.start // group_heads, heads.stop // group_heads):
                bitmap |= 1 << self.shard(layer_group, head_group)
        return bitmap

    def check_bitmap(self, bitmap: int) -> int:
        """The bitmap itself; 0 means all shards. raises: InvalidRequest if it names shards that do not exist."""
        if bitmap < 0 or bitmap & ~self.all_shards:
            raise InvalidRequest(f"shard bitmap {bitmap:#x} names shards outside of the {self.describe()}")
        return bitmap or self.all_shards

    def describe(self) -> str:
        """For messages: the grid and its borders."""
        layer_starts = ", ".join(str(self._first_layer(group)) for group in range(self.layer_groups + 1))
        return (
            f"grid of {self.layer_groups} layer groups x {self.head_groups} head groups (layer borders {layer_starts}; "
            f"every {self.kv_heads // self.head_groups} of {self.kv_heads} KV heads)"
        )

    def _first_layer(self, group: int) -> int:
        return -(-group * self.layers // self.layer_groups)

    def _check(self, shard: int) -> int:
        if not 0 <= shard < self.shard_count:
            raise InvalidRequest(f"shard {shard} is outside of the {self.describe()}")
        return shard


@lru_cache(maxsize=1024)
def _grid_of(spec: KeyspaceSpec) -> ShardGrid:
    layers, kv_heads, head_bytes = spec.group.layers, spec.group.kv_heads, spec.head_bytes
    divisors = [count for count in range(1, min(kv_heads, MAX_HEAD_GROUPS) + 1) if kv_heads % count == 0]
    while len(divisors) > 1 and kv_heads // divisors[-1] * layers * head_bytes < SMALLEST_COLUMN_BYTES:
        divisors.pop()
    head_groups = divisors[-1]
    group_heads = kv_heads // head_groups
    layer_groups = 1
    while (
        -(-layers // layer_groups) * group_heads * head_bytes > LARGEST_PAGE_BYTES
        and layer_groups * 2 <= layers
        and layer_groups * 2 * head_groups <= MAX_SHARDS
    ):
        layer_groups *= 2
    return ShardGrid(layers=layers, kv_heads=kv_heads, layer_groups=layer_groups, head_groups=head_groups)


def shards_in(bitmap: int) -> Iterator[int]:
    """Shard numbers in a bitmap, ascending."""
    while bitmap:
        lowest = bitmap & -bitmap
        yield lowest.bit_length() - 1
        bitmap ^= lowest
