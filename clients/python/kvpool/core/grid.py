"""The grid of shards: how the KV of a chunk is cut into pages. A pure function of the keyspace, never of TP or PP.

Layers are cut into layer groups. KV heads are cut in several ways at once, the splits: into 1, 2, 4 and 8 parts, say.
A rank writes one page for each layer group and part of the coarsest split that it owns whole: at equal TP a page is all
that the rank has of a layer group, which in a block-major cache is one long run a block. A reader of another TP degree
reads the same pages in part, or several of them: `readable` says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.keyspace import KeyspaceSpec

MAX_SHARDS = 64
"""A chunk's shards, of all splits together, fit a u64 bitmap."""
MAX_SPLIT = 16
"""Parts of the finest split: the largest TP degree whose ranks have pages of their own."""
SMALLEST_COLUMN_BYTES = 64 << 10
"""A part of the heads over all layers is not cut smaller than this, or a small model would have pages of a few KiB."""
USUAL_PAGE_BYTES = 8 << 20
"""Layers are grouped until no page of the coarsest split is larger, as far as MAX_SHARDS allows. To store a page takes
agent and pagestore some 0.1 ms each, whatever its size."""
UNDIVIDED_PAGE_BYTES = 4 << 20
"""A page of all layers is not larger than this: other models have two layer groups at least, for PP 2."""
LARGEST_PAGE_BYTES = 16 << 20
"""The coarsest splits are left out while their pages would be larger than this."""


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """Layer groups x parts of all splits; shards of a layer group follow each other, the coarsest split first.

    splits: ascending divisors of kv_heads. Layer group i begins at layer ceil(i * layers / layer_groups).
    """

    layers: int
    kv_heads: int
    layer_groups: int
    splits: tuple[int, ...]

    @classmethod
    def of(cls, spec: KeyspaceSpec) -> ShardGrid:
        """The grid of a keyspace."""
        return _grid_of(spec)

    @property
    def group_shards(self) -> int:
        """Shards of one layer group."""
        return sum(self.splits)

    @property
    def shard_count(self) -> int:
        return self.layer_groups * self.group_shards

    @property
    def valid_shards(self) -> int:
        """Bitmap of every shard that exists, of all splits: bit s = shard s. No chunk needs all of them."""
        return (1 << self.shard_count) - 1

    @property
    def all_shards(self) -> int:
        """Bitmap of the coarsest split: a whole chunk in the fewest pages."""
        return self.whole_chunk(self.splits[0])

    def whole_chunk(self, split: int) -> int:
        """Bitmap of one split over all layer groups."""
        return sum(self._parts(group, split, range(split)) for group in range(self.layer_groups))

    def shard(self, layer_group: int, split: int, part: int) -> int:
        if not (0 <= layer_group < self.layer_groups and split in self.splits and 0 <= part < split):
            raise InvalidRequest(f"shard ({layer_group}, {split}, {part}) is outside of the {self.describe()}")
        return layer_group * self.group_shards + self._offset(split) + part

    def layer_group_of(self, shard: int) -> int:
        return self._check(shard) // self.group_shards

    def layers_of(self, shard: int) -> range:
        """Model layers of a shard."""
        return self.layers_of_group(self.layer_group_of(shard))

    def layers_of_group(self, layer_group: int) -> range:
        """Model layers of a layer group."""
        return range(self._first_layer(layer_group), self._first_layer(layer_group + 1))

    def heads_of(self, shard: int) -> range:
        """KV heads of a shard."""
        _, split, part = self._place(shard)
        heads = self.kv_heads // split
        return range(part * heads, part * heads + heads)

    def bitmap_for(self, layers: range, heads: range) -> int:
        """Bitmap of the shards that a rank with these layers x heads writes: of the coarsest split that fits.

        raises: PartitionRefused naming the grid if they are no union of shards of one split or outside of the model.
        """
        groups = self._groups_of(layers)
        for split in self.splits:
            parts = self._parts_in(heads, split)
            if parts is not None and groups is not None:
                return sum(self._parts(group, split, parts) for group in groups)
        name, wanted = ("layers", layers) if groups is None else ("KV heads", heads)
        raise PartitionRefused(
            f"{name} [{wanted.start}, {wanted.stop}) are no union of shards of the {self.describe()}"
        )

    def readable(self, present: int, wanted: int) -> int:
        """Shards to read, of those present, so that every layer and head of the wanted shards is read once; 0 if some
        cannot be. For each layer group they are the wanted ones themselves if they are there, else the fewest that
        do, of whatever splits; a reader takes from each only the heads that it wants."""
        return _readable(self, present & self.touching(wanted), wanted)

    def covers(self, present: int, wanted: int) -> bool:
        """Whether all layers and heads of the wanted shards can be read from those present."""
        return present & wanted == wanted or self.readable(present, wanted) != 0

    def touching(self, wanted: int) -> int:
        """Bitmap of the shards of any split that have a layer and head of the wanted ones."""
        return _touching(self, wanted)

    def check_bitmap(self, bitmap: int) -> int:
        """The bitmap itself; 0 means all shards. raises: InvalidRequest if it names shards that do not exist."""
        if bitmap < 0 or bitmap & ~self.valid_shards:
            raise InvalidRequest(f"shard bitmap {bitmap:#x} names shards outside of the {self.describe()}")
        return bitmap or self.all_shards

    def describe(self) -> str:
        """For messages: the grid and its borders."""
        layer_starts = ", ".join(str(self._first_layer(group)) for group in range(self.layer_groups + 1))
        return (
            f"grid of {self.layer_groups} layer groups (layer borders {layer_starts}) x {self.kv_heads} KV heads in "
            f"{', '.join(str(split) for split in self.splits)} parts"
        )

    def _offset(self, split: int) -> int:
        return sum(coarser for coarser in self.splits if coarser < split)

    def _place(self, shard: int) -> tuple[int, int, int]:
        """Layer group, split and part of a shard."""
        group, part = divmod(self._check(shard), self.group_shards)
        for split in self.splits:
            if part < split:
                return group, split, part
            part -= split
        raise AssertionError("a shard lies in some split")

    def _parts(self, group: int, split: int, parts: range) -> int:
        first = group * self.group_shards + self._offset(split) + parts.start
        return ((1 << len(parts)) - 1) << first

    def _parts_in(self, heads: range, split: int) -> range | None:
        """Parts of a split that make up these heads exactly."""
        part_heads = self.kv_heads // split
        if heads.step != 1 or not len(heads) or heads.start < 0 or heads.stop > self.kv_heads:
            return None
        if heads.start % part_heads or heads.stop % part_heads:
            return None
        return range(heads.start // part_heads, heads.stop // part_heads)

    def _groups_of(self, layers: range) -> range | None:
        starts = [self._first_layer(group) for group in range(self.layer_groups + 1)]
        if layers.step != 1 or not len(layers) or layers.start not in starts or layers.stop not in starts:
            return None
        return range(starts.index(layers.start), starts.index(layers.stop))

    def _first_layer(self, group: int) -> int:
        return -(-group * self.layers // self.layer_groups)

    def _check(self, shard: int) -> int:
        if not 0 <= shard < self.shard_count:
            raise InvalidRequest(f"shard {shard} is outside of the {self.describe()}")
        return shard


@lru_cache(maxsize=1024)
def _grid_of(spec: KeyspaceSpec) -> ShardGrid:
    layers, kv_heads, head_bytes = spec.group.layers, spec.group.kv_heads, spec.head_bytes
    splits = [split for split in range(1, min(kv_heads, MAX_SPLIT) + 1) if kv_heads % split == 0]
    while len(splits) > 1 and kv_heads // splits[-1] * layers * head_bytes < SMALLEST_COLUMN_BYTES:
        splits.pop()
    while True:
        layer_groups, part_heads = 1, kv_heads // splits[0]
        while (
            -(-layers // layer_groups) * part_heads * head_bytes
            > (USUAL_PAGE_BYTES if layer_groups > 1 else UNDIVIDED_PAGE_BYTES)
            and layer_groups * 2 <= layers
            and layer_groups * 2 * sum(splits) <= MAX_SHARDS
        ):
            layer_groups *= 2
        if len(splits) == 1 or -(-layers // layer_groups) * part_heads * head_bytes <= LARGEST_PAGE_BYTES:
            return ShardGrid(layers=layers, kv_heads=kv_heads, layer_groups=layer_groups, splits=tuple(splits))
        splits.pop(0)


@lru_cache(maxsize=4096)
def _touching(grid: ShardGrid, wanted: int) -> int:
    found = 0
    for shard in shards_in(wanted):
        heads = grid.heads_of(shard)
        group = grid.layer_group_of(shard)
        for split in grid.splits:
            part_heads = grid.kv_heads // split
            first, last = heads.start // part_heads, (heads.stop - 1) // part_heads
            for part in range(first, last + 1):
                found |= 1 << grid.shard(group, split, part)
    return found


@lru_cache(maxsize=65536)
def _readable(grid: ShardGrid, present: int, wanted: int) -> int:
    """present: of shards that touch the wanted ones."""
    chosen = 0
    in_group = (1 << grid.group_shards) - 1
    for group in range(grid.layer_groups):
        shift = group * grid.group_shards
        here, needed = present >> shift & in_group, wanted >> shift & in_group
        if not needed:
            continue
        found = needed if here & needed == needed else _fewest(grid, here, needed)
        if not found:
            return 0
        chosen |= found << shift
    return chosen


def _fewest(grid: ShardGrid, here: int, needed: int) -> int:
    """The fewest of some shards, all in layer group 0, that have all heads of the needed ones; 0 if they have not."""
    wanted = sorted({head for shard in shards_in(needed) for head in grid.heads_of(shard)})
    borders = [0, *(at for at in range(1, len(wanted)) if wanted[at] != wanted[at - 1] + 1), len(wanted)]
    chosen = 0
    for first, last in pairwise(borders):
        found = _chain(grid, here, range(wanted[first], wanted[last - 1] + 1))
        if not found:
            return 0
        chosen |= found
    return chosen


def _chain(grid: ShardGrid, here: int, heads: range) -> int:
    """The fewest shards, cut to these heads, of which each begins where the one before ends; of equally many the finer
    ones, which have less that is not needed."""
    best = {heads.start: (0, 0)}  # by the head that comes next: number of shards, bitmap
    parts = [(max(heads.start, grid.heads_of(shard).start), shard) for shard in shards_in(here)]
    for start, shard in sorted(parts):
        stop = min(heads.stop, grid.heads_of(shard).stop)
        if start in best and start < stop:
            count, bitmap = best[start][0] + 1, best[start][1] | 1 << shard
            if stop not in best or count <= best[stop][0]:
                best[stop] = count, bitmap
    return best.get(heads.stop, (0, 0))[1]


def shards_in(bitmap: int) -> Iterator[int]:
    """Shard numbers in a bitmap, ascending."""
    while bitmap:
        lowest = bitmap & -bitmap
        yield lowest.bit_length() - 1
        bitmap ^= lowest
