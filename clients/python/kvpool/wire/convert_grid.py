"""Shard grids <-> messages."""

from __future__ import annotations

from kvpool.core.errors import InvalidRequest
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.v1 import common_pb2


def grid_to_proto(grid: ShardGrid) -> common_pb2.ShardGrid:
    """The grid as it travels."""
    return common_pb2.ShardGrid(layer_groups=grid.layer_groups, splits=grid.splits)


def grid_from_proto(message: common_pb2.ShardGrid, spec: KeyspaceSpec) -> ShardGrid:
    """The grid of `spec`. raises: InvalidRequest if the peer computed another one (a version with other grid rules)."""
    grid = ShardGrid.of(spec)
    if (message.layer_groups, tuple(message.splits)) != (grid.layer_groups, grid.splits):
        raise InvalidRequest(
            f"peer has a grid of {message.layer_groups} layer groups x {list(message.splits)} parts, here it is the "
            f"{grid.describe()}; run one version of kvpool everywhere"
        )
    return grid
