"""Tables of the planes that two ranks' caches have in common: what a pull reads and what it writes, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, RowPlane
from kvpool.core.plane_table import PLANE_COLUMNS

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerPlanes:
    """Planes of one row size, layer by layer.

    source, destination: [P, 8] int64: address of (block 0, row 0, first common head); block, row and head stride; 0.
    """

    source: Int64s
    destination: Int64s
    heads: int
    row_bytes: int
    source_block_rows: int
    destination_block_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class CacheSide:
    """One rank's cache: addresses of its handles' first bytes, as one GPU sees them."""

    layout: EngineLayout
    addresses: Sequence[int]


def peer_planes(
    spec: KeyspaceSpec, layers: range, heads: range, source: CacheSide, destination: CacheSide
) -> tuple[PeerPlanes, PeerPlanes | None]:
    """Data planes, and scale planes if both caches have some. layers, heads: of the model, that both sides have."""
    data = _planes_of(spec, layers, heads, source, destination, "planes")
    if not source.layout.layers[0].scales:
        return data, None
    return data, _planes_of(spec, layers, heads, source, destination, "scales")


def _planes_of(
    spec: KeyspaceSpec, layers: range, heads: range, source: CacheSide, destination: CacheSide, kind: str
) -> PeerPlanes:
    sides = [_rows(spec, layers, heads, side, kind) for side in (source, destination)]
    plane: RowPlane = getattr(source.layout.layers[0], kind)[0]
    return PeerPlanes(
        source=sides[0],
        destination=sides[1],
        heads=len(heads),
        row_bytes=plane.row_bytes,
        source_block_rows=source.layout.rows_of_block(spec),
        destination_block_rows=destination.layout.rows_of_block(spec),
    )


def _rows(spec: KeyspaceSpec, layers: range, heads: range, side: CacheSide, kind: str) -> Int64s:
    layout = side.layout
    first_head = heads.start - layout.first_head
    rows: list[tuple[int, ...]] = []
    for layer in layers:
        planes: tuple[RowPlane, ...] = getattr(layout.layers[layer - layout.first_layer], kind)
        for plane in planes:
            # A stride along which there is one item counts for nothing, also not for how wide a copy may be.
            rows.append(
                (
                    side.addresses[plane.handle] + plane.offset_bytes + first_head * plane.head_stride_bytes,
                    plane.block_stride_bytes if layout.block_count > 1 else 0,
                    plane.token_stride_bytes if layout.rows_of_block(spec) > 1 else 0,
                    plane.head_stride_bytes if len(heads) > 1 else 0,
                )
            )
    table = np.zeros((len(rows), PLANE_COLUMNS), dtype=np.int64)
    table[:, :4] = rows
    return table
