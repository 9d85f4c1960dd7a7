"""Raw addresses of a rank's planes: the table that copy kernels read.

Everything here is arithmetic on a validated layout; nothing reads the memory that the addresses name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvpool.core.errors import InvalidRequest
from kvpool.core.geometry import check_count
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, RowPlane
from kvpool.core.payload import PAYLOAD_UNIT_TOKENS, ShardPayload

Int64s = npt.NDArray[np.int64]

PLANE_COLUMNS = 8
ADDRESS, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE = range(4)
PAYLOAD_OFFSET, SCALE_PAYLOAD_OFFSET, PAYLOAD_UNIT_STRIDE = range(4, 7)
LARGEST_UNIT_BYTES = 16
_MAX_ADDRESS = (1 << 62) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlanes:
    """One shard's rows of the table, and what its pages look like.

    heads:              of the model; those of the shard that the rank has.
    first_plane:        row of the first data plane; plane_count of them, layer by layer.
    first_scale_plane:  the same for planes that hold an engine's own scales; scale_plane_count is 0 without any.
    payload_bytes:      of a page, with the heads that the rank does not have.
    """

    heads: range
    first_plane: int
    plane_count: int
    first_scale_plane: int
    scale_plane_count: int
    payload_bytes: int

    @property
    def data_rows(self) -> slice:
        """Of the table."""
        return slice(self.first_plane, self.first_plane + self.plane_count)

    @property
    def scale_rows(self) -> slice:
        """Of the table."""
        return slice(self.first_scale_plane, self.first_scale_plane + self.scale_plane_count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaneTable:
    """All planes of a rank, once for each shard of any split that has layers and heads of the rank.

    planes:            [P, 8] int64, C-contiguous, not to be written. Columns: address of (block 0, token 0, first head
                       of the shard that the rank has); block, token and head stride; payload offset of the plane's
                       data from that head on; payload offset of the scales that a codec makes of it (0 if none);
                       bytes of data from a unit of the payload to the next; 0. A stride along which there is one
                       item is 0. Shard by shard, data planes before scale planes; a scale plane's payload offset and
                       unit stride are those of its scale rows.
    handles:           [P] int64: of each plane. Memory of two handles may be adjacent and yet be two allocations.
    shards:            by shard number, ascending.
    unit_bytes:        power of two, at most 16, that divides whatever locates or sizes a data row, in the cache and in
                       the payload.
    block_rows:        rows along a block's token axis.
    unit_rows:         positions of a payload's unit. Within a unit rows of a plane and head are spec.planes rows apart,
                       and heads unit_rows times that.
    cache_row_bytes:   one row of data in the cache; row_bytes: the same in the payload, which differs if bytes are not
                       only copied. scale_row_bytes: scales of one row; 0 without.
    """

    spec: KeyspaceSpec
    layout: EngineLayout
    planes: Int64s
    handles: Int64s
    shards: Mapping[int, ShardPlanes]
    unit_bytes: int
    block_rows: int
    unit_rows: int
    cache_row_bytes: int
    row_bytes: int
    scale_row_bytes: int

    @classmethod
    def of(
        cls, spec: KeyspaceSpec, grid: ShardGrid, layout: EngineLayout, handle_addresses: Sequence[int]
    ) -> PlaneTable:
        """handle_addresses: of each handle's byte 0; the layout is valid.

        raises: InvalidRequest naming a bad or misaligned address; PartitionRefused if the rank is no union of shards.
        """
        _check_addresses(spec, layout, handle_addresses)
        rows: list[list[int]] = []
        shards: dict[int, ShardPlanes] = {}
        handles: list[int] = []
        is_data: list[bool] = []
        own_heads = layout.head_range
        for shard in shards_in(grid.touching(grid.bitmap_for(layout.layer_range, own_heads))):
            payload = ShardPayload.of(spec, grid, shard)
            heads = range(max(payload.heads.start, own_heads.start), min(payload.heads.stop, own_heads.stop))
            data, scales = _rows_of(spec, layout, payload, heads, handle_addresses)
            shards[shard] = ShardPlanes(
                heads=heads,
                first_plane=len(rows),
                plane_count=len(data),
                first_scale_plane=len(rows) + len(data),
                scale_plane_count=len(scales),
                payload_bytes=payload.payload_bytes,
            )
            rows += data + scales
            for part in ("planes", "scales"):
                for layer in layout.layers[payload.layers.start - layout.first_layer :][: len(payload.layers)]:
                    handles += [plane.handle for plane in getattr(layer, part)]
            is_data += [True] * len(data) + [False] * len(scales)
        planes = np.array(rows, dtype=np.int64).reshape(-1, PLANE_COLUMNS)
        return cls(
            spec=spec,
            layout=layout,
            planes=planes,
            handles=np.array(handles, dtype=np.int64),
            shards=MappingProxyType(shards),
            unit_bytes=_unit_bytes(spec, layout, planes[np.array(is_data)]),
            block_rows=layout.rows_of_block(spec),
            unit_rows=1 if spec.opaque else PAYLOAD_UNIT_TOKENS,
            cache_row_bytes=layout.layers[0].planes[0].row_bytes,
            row_bytes=spec.data_row_bytes,
            scale_row_bytes=spec.scale_row_bytes,
        )

    def of_shard(self, shard: int) -> ShardPlanes:
        """raises: InvalidRequest for a shard of which the rank has nothing."""
        try:
            return self.shards[shard]
        except KeyError:
            raise InvalidRequest(
                f"shard {shard} has no layer and head of the rank; these have: {list(self.shards)}"
            ) from None


def _check_addresses(spec: KeyspaceSpec, layout: EngineLayout, handle_addresses: Sequence[int]) -> None:
    if len(handle_addresses) != len(layout.handle_sizes):
        raise InvalidRequest(
            f"handle_addresses must be {len(layout.handle_sizes)} for as many handles, got {len(handle_addresses)}"
        )
    for number, address in enumerate(handle_addresses):
        check_count(f"handle_addresses[{number}]", address, lowest=0, highest=_MAX_ADDRESS)
    data_alignment, scale_alignment = layout.row_alignments(spec)
    for layer in layout.layers:
        for planes, alignment in ((layer.planes, data_alignment), (layer.scales, scale_alignment)):
            for plane in planes:
                if handle_addresses[plane.handle] % alignment:
                    raise InvalidRequest(
                        f"handle_addresses[{plane.handle}] must be a multiple of {alignment}, "
                        f"got {handle_addresses[plane.handle]:#x}"
                    )


def _rows_of(
    spec: KeyspaceSpec,
    layout: EngineLayout,
    payload: ShardPayload,
    heads: range,
    handle_addresses: Sequence[int],
) -> tuple[list[list[int]], list[list[int]]]:
    """Table rows of one shard: data planes, scale planes."""
    data: list[list[int]] = []
    scales: list[list[int]] = []
    strides = payload.strides_of_rows(payload.row_bytes)
    scale_strides = payload.strides_of_rows(payload.scale_row_bytes)
    are_scales_made = payload.scale_row_bytes > 0 and not layout.holds_codec_rows(spec)
    head = heads.start - payload.heads.start
    for number, layer in enumerate(payload.layers):
        here = layout.layers[layer - layout.first_layer]
        for index, plane in enumerate(here.planes):
            offset = strides.offset(layer=number, head=head, plane=index)
            scale_offset = payload.data_bytes + scale_strides.offset(layer=number, head=head, plane=index)
            made = scale_offset if are_scales_made else 0
            located = _located(spec, layout, heads, plane, handle_addresses)
            data.append([*located, offset, made, strides.unit, 0])
        for index, plane in enumerate(here.scales):
            offset = payload.data_bytes + scale_strides.offset(layer=number, head=head, plane=index)
            located = _located(spec, layout, heads, plane, handle_addresses)
            scales.append([*located, offset, 0, scale_strides.unit, 0])
    return data, scales


def _located(
    spec: KeyspaceSpec,
    layout: EngineLayout,
    heads: range,
    plane: RowPlane,
    handle_addresses: Sequence[int],
) -> tuple[int, int, int, int]:
    """ADDRESS, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE of a plane, from the first of some heads on."""
    first_head = heads.start - layout.first_head
    return (
        handle_addresses[plane.handle] + plane.offset_bytes + first_head * plane.head_stride_bytes,
        plane.block_stride_bytes if layout.block_count > 1 else 0,
        plane.token_stride_bytes if layout.rows_of_block(spec) > 1 else 0,
        plane.head_stride_bytes if len(heads) > 1 else 0,
    )


def _unit_bytes(spec: KeyspaceSpec, layout: EngineLayout, data: Int64s) -> int:
    """The lowest bit set in any of the numbers is the largest power of two that divides them all."""
    copied = (ADDRESS, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, PAYLOAD_OFFSET, PAYLOAD_UNIT_STRIDE)
    bits = int(np.bitwise_or.reduce(data[:, copied], axis=None)) | LARGEST_UNIT_BYTES
    bits |= layout.layers[0].planes[0].row_bytes | spec.data_row_bytes
    return bits & -bits
