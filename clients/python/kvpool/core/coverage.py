"""What a request wants of each chunk, and whether what there is of a chunk has it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvpool.core.grid import ShardGrid


@dataclass(frozen=True, slots=True, eq=False)
class Coverage:
    """Shards that are wanted of each chunk of a keyspace. Shards of other splits serve as well.

    Make it with `of`, which keeps what was asked for before: questions repeat, and these sums take microseconds.
    """

    grid: ShardGrid
    wanted: int
    touching: int
    """Shards of any split that have a layer and head of the wanted ones; others are of no use."""
    all_shards: int
    valid_shards: int

    @staticmethod
    def of(grid: ShardGrid, shards: int) -> Coverage:
        """shards: the wanted ones; 0 means grid.all_shards. raises: InvalidRequest for shards that do not exist."""
        return _coverage(grid, shards)

    def is_met_by(self, present: int) -> bool:
        """Whether all layers and heads of the wanted shards can be read from these."""
        wanted = self.wanted
        return present & wanted == wanted or self.grid.covers(present, wanted)


@lru_cache(maxsize=4096)
def _coverage(grid: ShardGrid, shards: int) -> Coverage:
    wanted = grid.check_bitmap(shards)
    return Coverage(grid, wanted, grid.touching(wanted), grid.all_shards, grid.valid_shards)
