"""Where an engine keeps its KV, as data: no code here or in a device knows any engine's layout by name.

A plane is K or V (or the MLA latent, or opaque cells) of one layer. Its row of block b, token t in the block and local
head h begins at `offset + b * block_stride + t * token_stride + h * head_stride` in the memory of one handle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from kvpool.core.errors import InvalidRequest
from kvpool.core.geometry import check_count
from kvpool.core.keyspace import KeyspaceSpec

_MAX_BYTES = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class RowPlane:
    """One plane of one layer. row_bytes are contiguous: one (token, head), or one (block, head) cell if opaque.

    A stride along which there is only one item may be 0: token_stride_bytes for blocks of one token and for opaque
    cells, head_stride_bytes for one head.
    """

    handle: int
    offset_bytes: int
    block_stride_bytes: int
    token_stride_bytes: int
    head_stride_bytes: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """planes: K and V in this order, or one. scales: none, or one plane of scale rows for each of planes."""

    planes: tuple[RowPlane, ...]
    scales: tuple[RowPlane, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """An engine rank's paged KV cache.

    layers:       of this rank; the first is model layer first_layer.
    first_head:   model KV head of local head 0; head_count heads are here.
    handle_sizes: bytes of each handle's memory.
    """

    block_tokens: int
    block_count: int
    layers: tuple[LayerLayout, ...]
    first_layer: int
    first_head: int
    head_count: int
    handle_sizes: tuple[int, ...]

    @property
    def layer_range(self) -> range:
        """Model layers of this rank."""
        return range(self.first_layer, self.first_layer + len(self.layers))

    @property
    def head_range(self) -> range:
        """Model KV heads of this rank."""
        return range(self.first_head, self.first_head + self.head_count)

    def holds_codec_rows(self, spec: KeyspaceSpec) -> bool:
        """Whether the cache itself holds rows and scales as the payload does, so that bytes are only copied."""
        return spec.codec.format.lossless or any(layer.scales for layer in self.layers)

    def rows_of_block(self, spec: KeyspaceSpec) -> int:
        """Rows along a block's token axis: its tokens, or 1 if a cell is a whole block."""
        return 1 if spec.opaque else self.block_tokens

    def row_alignments(self, spec: KeyspaceSpec) -> tuple[int, int]:
        """What places of data rows and of scale rows must be multiples of: the bytes of one element."""
        scale_dtype = spec.scale_dtype
        data = 1 if spec.opaque or self.layers[0].scales else max(1, spec.dtype.bits // 8)
        return data, scale_dtype.bits // 8 if scale_dtype else 1

    def validate(self, spec: KeyspaceSpec) -> None:
        """Refuse a layout that is not exactly such a cache of `spec`.

        Checked: counts, block size, layers and heads within the model, planes and row bytes as the keyspace has them,
        positive strides, rows inside of their handle, aligned to their element, and no byte in two rows. Whether layers
        and heads are a union of shards is the grid's to say (`ShardGrid.bitmap_for`).
        raises: InvalidRequest naming the argument.
        """
        self._check_counts(spec)
        named: list[tuple[str, RowPlane]] = []
        for number, layer in enumerate(self.layers):
            self._check_layer(spec, number, layer)
            named += _named_planes(number, layer)
        extents = (self.block_count, self.rows_of_block(spec), self.head_count)
        for name, plane in named:
            self._check_plane(name, plane, extents)
        overlap = first_overlap(_row_set(name, plane, extents) for name, plane in named)
        if overlap is not None:
            raise InvalidRequest(f"{overlap[0]} and {overlap[1]} overlap: some byte belongs to two rows")

    def _check_counts(self, spec: KeyspaceSpec) -> None:
        check_count("block_tokens", self.block_tokens)
        check_count("block_count", self.block_count)
        check_count("head_count", self.head_count)
        check_count("first_layer", self.first_layer, lowest=0)
        check_count("first_head", self.first_head, lowest=0)
        if spec.chunk_tokens % self.block_tokens:
            raise InvalidRequest(f"block_tokens {self.block_tokens} does not divide chunk_tokens {spec.chunk_tokens}")
        if spec.opaque and self.block_tokens != spec.opaque.block_tokens:
            raise InvalidRequest(
                f"block_tokens {self.block_tokens} is not opaque.block_tokens {spec.opaque.block_tokens}"
            )
        if not self.layers or self.layer_range.stop > spec.group.layers:
            raise InvalidRequest(
                f"layers [{self.first_layer}, {self.layer_range.stop}) are not within the model's {spec.group.layers}"
            )
        if self.head_range.stop > spec.group.kv_heads:
            raise InvalidRequest(
                f"heads [{self.first_head}, {self.head_range.stop}) are not within the model's {spec.group.kv_heads}"
            )
        for number, size_bytes in enumerate(self.handle_sizes):
            check_count(f"handle_sizes[{number}]", size_bytes, highest=_MAX_BYTES)

    def _check_layer(self, spec: KeyspaceSpec, number: int, layer: LayerLayout) -> None:
        if len(layer.planes) != spec.planes:
            raise InvalidRequest(f"layers[{number}].planes must be {spec.planes}, got {len(layer.planes)}")
        scaled = spec.scale_row_bytes > 0 and bool(layer.scales)
        if layer.scales and (not scaled or len(layer.scales) != spec.planes):
            raise InvalidRequest(
                f"layers[{number}].scales must be {spec.planes if spec.scale_row_bytes else 0}, got {len(layer.scales)}"
            )
        if bool(layer.scales) != bool(self.layers[0].scales):
            raise InvalidRequest(f"layers[{number}].scales: either all layers have scales or none")
        row_bytes = spec.data_row_bytes if scaled else spec.engine_row_bytes
        row_alignment, scale_alignment = self.row_alignments(spec)
        for name, plane in _named_planes(number, layer):
            is_scale = ".scales[" in name
            wanted, alignment = (spec.scale_row_bytes, scale_alignment) if is_scale else (row_bytes, row_alignment)
            if plane.row_bytes != wanted:
                raise InvalidRequest(f"{name}.row_bytes must be {wanted}, got {plane.row_bytes}")
            for quantity in ("offset_bytes", "block_stride_bytes", "token_stride_bytes", "head_stride_bytes"):
                if getattr(plane, quantity) % alignment:
                    raise InvalidRequest(
                        f"{name}.{quantity} must be a multiple of {alignment}, got {getattr(plane, quantity)}"
                    )

    def _check_plane(self, name: str, plane: RowPlane, extents: tuple[int, int, int]) -> None:
        for field in fields(plane):
            check_count(f"{name}.{field.name}", getattr(plane, field.name), lowest=0, highest=_MAX_BYTES)
        strides = (plane.block_stride_bytes, plane.token_stride_bytes, plane.head_stride_bytes)
        for axis, extent, stride in zip(("block", "token", "head"), extents, strides, strict=True):
            if extent > 1 and stride == 0:
                raise InvalidRequest(f"{name}.{axis}_stride_bytes must be > 0")
        if plane.handle >= len(self.handle_sizes):
            raise InvalidRequest(f"{name}.handle {plane.handle} does not exist; there are {len(self.handle_sizes)}")
        last = plane.offset_bytes + sum((count - 1) * stride for count, stride in zip(extents, strides, strict=True))
        if last + plane.row_bytes > self.handle_sizes[plane.handle]:
            raise InvalidRequest(
                f"{name} ends at byte {last + plane.row_bytes}, but handle {plane.handle} has "
                f"{self.handle_sizes[plane.handle]}"
            )


def _named_planes(number: int, layer: LayerLayout) -> Iterator[tuple[str, RowPlane]]:
    for kind, planes in (("planes", layer.planes), ("scales", layer.scales)):
        for index, plane in enumerate(planes):
            yield f"layers[{number}].{kind}[{index}]", plane


def _row_set(name: str, plane: RowPlane, extents: Sequence[int]) -> RowSet:
    strides = (plane.block_stride_bytes, plane.token_stride_bytes, plane.head_stride_bytes)
    axes = sorted(((stride, count) for stride, count in zip(strides, extents, strict=True) if count > 1), reverse=True)
    return RowSet(name, plane.handle, plane.offset_bytes, plane.row_bytes, tuple(axes))


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows of row_bytes at offset_bytes plus every sum of steps along the axes.

    axes: (stride in bytes > 0, count > 1) of each axis the set extends along, the largest stride first.
    """

    name: str
    handle: int
    offset_bytes: int
    row_bytes: int
    axes: tuple[tuple[int, int], ...]

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.row_bytes + sum(stride * (count - 1) for stride, count in self.axes)

    @property
    def is_nested(self) -> bool:
        """Whether each stride is at least the extent of the axes inside of it; then the set's own rows are apart."""
        inner_bytes = self.row_bytes
        for stride, count in reversed(self.axes):
            if stride < inner_bytes:
                return False
            inner_bytes += stride * (count - 1)
        return True

    def filled_inside(self, axis_count: int) -> RowSet:
        """The set with all bytes between the rows that the outer axis_count axes do not tell apart."""
        inner_bytes = sum(stride * (count - 1) for stride, count in self.axes[axis_count:])
        return replace(self, row_bytes=self.row_bytes + inner_bytes, axes=self.axes[:axis_count])


def first_overlap(sets: Iterable[RowSet]) -> tuple[str, str] | None:
    """Names of two sets (or twice the same) whose rows share a byte, else None.

    Exact for sets of nested axes that are alike. Of sets that share only outer axes (rows of a block, then its scales),
    everything inside of those counts as one row without gaps. A set whose axes are not nested counts as overlapping
    itself: better refused than corrupted.
    """
    open_sets: list[tuple[int, RowSet]] = []
    handle = -1
    for right in sorted(sets, key=lambda rows: (rows.handle, rows.offset_bytes)):
        if not right.is_nested:
            return right.name, right.name
        if right.handle != handle:
            handle, open_sets = right.handle, []
        open_sets = [(end, left) for end, left in open_sets if end > right.offset_bytes]
        for _, left in open_sets:
            if _interleaved_meet(left, right):
                return left.name, right.name
        open_sets.append((right.end_bytes, right))
    return None


def _interleaved_meet(left: RowSet, right: RowSet) -> bool:
    if left.axes != right.axes:
        shared = 0
        while left.axes[: shared + 1] == right.axes[: shared + 1]:
            shared += 1
        left, right = left.filled_inside(shared), right.filled_inside(shared)
    return _meet(left, right, right.offset_bytes - left.offset_bytes, 0)


def _meet(left: RowSet, right: RowSet, distance: int, axis: int) -> bool:
    """Whether a row of `left` meets one of `right` that is `distance` bytes further on before steps along axes[axis:].

    The difference of two positions on an axis is any whole number of strides in (-count, count). Rows meet if what the
    steps leave of the distance is in (-right.row_bytes, left.row_bytes); with nested axes only the two multiples of a
    stride next to the distance can leave so little.
    """
    if axis == len(left.axes):
        return -right.row_bytes < distance < left.row_bytes
    stride, count = left.axes[axis]
    below = distance // stride
    return any(
        _meet(left, right, distance - steps * stride, axis + 1)
        for steps in (below, below + 1)
        if -count < steps < count
    )
