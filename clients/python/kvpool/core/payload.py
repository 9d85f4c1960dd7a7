"""Where each row of a chunk lies in a page's payload. The same for every engine, TP, PP and block size.

Canonical: data [layer][k, v][token][head][element], then scales [layer][k, v][token][head][scale group] if the codec
has them. MLA: one plane and one head. Opaque: [layer][block][head][cell], one plane, no scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvpool.core.errors import InvalidRequest
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import slot_bytes


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [offset, offset + size) of a payload."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPayload:
    """The payload of one shard's pages.

    layers, heads:   of the model, in payload order.
    planes:          2 (K, V) or 1 (MLA, opaque).
    positions:       rows of one layer, plane and head: tokens of a chunk (opaque: blocks).
    row_bytes:       one row in the data part.
    scale_row_bytes: one row in the scale part; 0 without scales.
    """

    layers: range
    heads: range
    planes: int
    positions: int
    row_bytes: int
    scale_row_bytes: int

    @classmethod
    def of(cls, spec: KeyspaceSpec, grid: ShardGrid, shard: int) -> ShardPayload:
        """raises: InvalidRequest for a shard outside of the grid."""
        return _shard_payload(spec, grid, shard)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[layers, planes, positions, heads, row_bytes] of the data part as bytes."""
        return len(self.layers), self.planes, self.positions, len(self.heads), self.row_bytes

    @property
    def scale_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, planes, positions, heads, scale_row_bytes] of the scale part as bytes."""
        return len(self.layers), self.planes, self.positions, len(self.heads), self.scale_row_bytes

    @property
    def layer_data_bytes(self) -> int:
        return self.planes * self.positions * len(self.heads) * self.row_bytes

    @property
    def layer_scale_bytes(self) -> int:
        return self.planes * self.positions * len(self.heads) * self.scale_row_bytes

    @property
    def data_bytes(self) -> int:
        return len(self.layers) * self.layer_data_bytes

    @property
    def scale_bytes(self) -> int:
        return len(self.layers) * self.layer_scale_bytes

    @property
    def payload_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    @property
    def slot_bytes(self) -> int:
        """Arena bytes of a page: header, payload and sum table, rounded up to 4 KiB."""
        return slot_bytes(self.payload_bytes)

    def layer_offset(self, layer: int) -> int:
        """Offset in the payload of a model layer's data."""
        return self._layer_index(layer) * self.layer_data_bytes

    def layer_scale_offset(self, layer: int) -> int:
        """Offset in the payload of a model layer's scales (meaningful if there are any)."""
        return self.data_bytes + self._layer_index(layer) * self.layer_scale_bytes

    def layer_ranges(self, layers: range) -> tuple[ByteRange, ...]:
        """What a load of consecutive model layers needs: one range of data and, with scales, one of those."""
        if not len(layers):
            return ()
        data = ByteRange(self.layer_offset(layers[0]), len(layers) * self.layer_data_bytes)
        self._layer_index(layers[-1])
        if not self.scale_row_bytes:
            return (data,)
        return data, ByteRange(self.layer_scale_offset(layers[0]), len(layers) * self.layer_scale_bytes)

    def _layer_index(self, layer: int) -> int:
        if layer not in self.layers:
            raise InvalidRequest(f"layer {layer} is not in the shard's [{self.layers.start}, {self.layers.stop})")
        return layer - self.layers.start


@lru_cache(maxsize=65536)
def _shard_payload(spec: KeyspaceSpec, grid: ShardGrid, shard: int) -> ShardPayload:
    return ShardPayload(
        layers=grid.layers_of(shard),
        heads=grid.heads_of(shard),
        planes=spec.planes,
        positions=spec.positions,
        row_bytes=spec.data_row_bytes,
        scale_row_bytes=spec.scale_row_bytes,
    )


def payload_bytes(spec: KeyspaceSpec, grid: ShardGrid, shard: int) -> int:
    """Bytes of a payload, scales included."""
    return ShardPayload.of(spec, grid, shard).payload_bytes


def payload_shape(spec: KeyspaceSpec, grid: ShardGrid, shard: int) -> tuple[int, int, int, int, int]:
    """[layers, planes, positions, heads, row_bytes] of the data part as bytes."""
    return ShardPayload.of(spec, grid, shard).shape


def chunk_bytes(spec: KeyspaceSpec, grid: ShardGrid, bitmap: int) -> int:
    """Payload bytes of one chunk over the shards in a bitmap."""
    return sum(payload_bytes(spec, grid, shard) for shard in range(grid.shard_count) if bitmap >> shard & 1)
