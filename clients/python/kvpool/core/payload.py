"""Where each row of a chunk lies in a page's payload. The same for every engine, TP, PP and block size.

Canonical: data [unit][layer][head][token of the unit][k, v][element], a unit being 16 tokens, then scales
[unit][layer][head][token of the unit][k, v][scale group] if the codec has them. MLA: one plane and one head. Opaque:
the same with one position, a block, in a unit, so [block][layer][head][cell]; one plane, no scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import slot_bytes

PAYLOAD_UNIT_TOKENS = 16
"""The usual block of engines: what lies together in a block-major cache lies together in a page."""

PayloadShape = tuple[int, int, int, int, int, int]
"""[units, layers, heads, positions of a unit, planes, bytes of a row]."""


@dataclass(frozen=True, slots=True)
class RowStrides:
    """Bytes from a row to the next one along each axis; rows of a plane follow each other at `position`."""

    unit: int
    layer: int
    head: int
    position: int
    plane: int

    def offset(self, *, layer: int = 0, head: int = 0, plane: int = 0) -> int:
        """Of a row of position 0; all counted from the shard's first."""
        return layer * self.layer + head * self.head + plane * self.plane


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPayload:
    """The payload of one shard's pages.

    layers, heads:   of the model, in payload order.
    planes:          2 (K, V) or 1 (MLA, opaque).
    positions:       rows of one layer, plane and head: tokens of a chunk (opaque: blocks).
    unit_positions:  positions that lie together for each layer and head; divides positions.
    row_bytes:       one row in the data part.
    scale_row_bytes: one row in the scale part; 0 without scales.
    """

    layers: range
    heads: range
    planes: int
    positions: int
    unit_positions: int
    row_bytes: int
    scale_row_bytes: int

    @classmethod
    def of(cls, spec: KeyspaceSpec, grid: ShardGrid, shard: int) -> ShardPayload:
        """raises: InvalidRequest for a shard outside of the grid."""
        return _shard_payload(spec, grid, shard)

    @property
    def shape(self) -> PayloadShape:
        """Of the data part as bytes."""
        return self.shape_of_rows(self.row_bytes)

    @property
    def scale_shape(self) -> PayloadShape:
        """Of the scale part as bytes."""
        return self.shape_of_rows(self.scale_row_bytes)

    def shape_of_rows(self, row_bytes: int) -> PayloadShape:
        """Of all rows, in payload order, if each has so many bytes."""
        units = self.positions // self.unit_positions
        return units, len(self.layers), len(self.heads), self.unit_positions, self.planes, row_bytes

    def strides_of_rows(self, row_bytes: int) -> RowStrides:
        """Between rows of so many bytes in payload order."""
        position = self.planes * row_bytes
        head = self.unit_positions * position
        layer = len(self.heads) * head
        return RowStrides(len(self.layers) * layer, layer, head, position, row_bytes)

    @property
    def row_count(self) -> int:
        """Rows of the data part, and of the scale part if there is one."""
        return self.positions * len(self.layers) * len(self.heads) * self.planes

    @property
    def data_bytes(self) -> int:
        return self.row_count * self.row_bytes

    @property
    def scale_bytes(self) -> int:
        return self.row_count * self.scale_row_bytes

    @property
    def payload_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    @property
    def slot_bytes(self) -> int:
        """Arena bytes of a page: header and payload, rounded up to 4 KiB."""
        return slot_bytes(self.payload_bytes)


@lru_cache(maxsize=65536)
def _shard_payload(spec: KeyspaceSpec, grid: ShardGrid, shard: int) -> ShardPayload:
    return ShardPayload(
        layers=grid.layers_of(shard),
        heads=grid.heads_of(shard),
        planes=spec.planes,
        positions=spec.positions,
        unit_positions=1 if spec.opaque else PAYLOAD_UNIT_TOKENS,
        row_bytes=spec.data_row_bytes,
        scale_row_bytes=spec.scale_row_bytes,
    )


def payload_bytes(spec: KeyspaceSpec, grid: ShardGrid, shard: int) -> int:
    """Bytes of a payload, scales included."""
    return ShardPayload.of(spec, grid, shard).payload_bytes


def chunk_bytes(spec: KeyspaceSpec, grid: ShardGrid, bitmap: int) -> int:
    """Payload bytes of one chunk over the shards in a bitmap."""
    return sum(payload_bytes(spec, grid, shard) for shard in range(grid.shard_count) if bitmap >> shard & 1)
