"""What an engine's cache tensors look like, as data, and the layout that follows from it for any rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAxes:
    """Tensors without gaps whose innermost axis is a row (one token and head; an opaque cell).

    Axes are "layer", "plane" (K before V), "block", "token" (of the block) and "head"; [slots] is block, then token.

    tensors_per:   axes with a tensor for each item, in the order in which the tensors are registered.
    axes:          of one tensor, outermost first. All that tensors_per does not name; opaque cells have no tokens.
    scales_behind: the engine quantizes its cache itself: along this axis each item has all its data before all its
                   scales. The innermost axis means that each row is followed by its scales.
    """

    axes: tuple[str, ...]
    tensors_per: tuple[str, ...] = ()
    scales_behind: str = ""

    def layout(
        self, spec: KeyspaceSpec, layers: range, heads: range, block_tokens: int, block_count: int
    ) -> EngineLayout:
        """The layout of a rank with these layers and heads of the model.

        A cache that the engine quantizes holds what the codec of `spec` has; without scales in that (RAW), its rows
        are whatever one row of the model's dtype is. Any other cache holds rows of the model's dtype.
        """
        native = bool(spec.scale_row_bytes and self.scales_behind)
        counts = {
            "layer": len(layers),
            "plane": spec.planes,
            "block": block_count,
            "token": block_tokens,
            "head": len(heads),
        }
        tensors = _Tensors.of(
            self,
            counts,
            spec.data_row_bytes if native else spec.engine_row_bytes,
            spec.scale_row_bytes if native else 0,
        )
        layouts = tuple(
            LayerLayout(
                tuple(tensors.plane(tensors.data, layer, plane) for plane in range(spec.planes)),
                tuple(tensors.plane(tensors.scales, layer, plane) for plane in range(spec.planes if native else 0)),
            )
            for layer in range(len(layers))
        )
        return EngineLayout(
            block_tokens=block_tokens,
            block_count=block_count,
            layers=layouts,
            first_layer=layers.start,
            first_head=heads.start,
            head_count=len(heads),
            handle_sizes=tensors.sizes_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nest:
    """Strides by axis (0 for those of tensors_per and for no tokens), and where rows begin."""

    strides: dict[str, int]
    row_bytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensors:
    data: _Nest
    scales: _Nest
    numbers: dict[str, int]  # of tensors_per: how many tensors further on the next item's is
    sizes_bytes: tuple[int, ...]

    @classmethod
    def of(cls, axes: CacheAxes, counts: dict[str, int], row_bytes: int, scale_row_bytes: int) -> _Tensors:
        data_strides, scale_strides = dict.fromkeys(counts, 0), dict.fromkeys(counts, 0)
        data_bytes, scale_bytes, scale_offset = row_bytes, scale_row_bytes, 0
        for axis in reversed(axes.axes):
            if axis == axes.scales_behind:  # from here on outwards both are one
                scale_offset = data_bytes
                data_bytes = scale_bytes = data_bytes + scale_bytes
            data_strides[axis], scale_strides[axis] = data_bytes, scale_bytes
            data_bytes, scale_bytes = data_bytes * counts[axis], scale_bytes * counts[axis]
        per = axes.tensors_per
        return cls(
            data=_Nest(strides=data_strides, row_bytes=row_bytes, offset_bytes=0),
            scales=_Nest(strides=scale_strides, row_bytes=scale_row_bytes, offset_bytes=scale_offset),
            numbers={axis: math.prod(counts[inner] for inner in per[at + 1 :]) for at, axis in enumerate(per)},
            sizes_bytes=(data_bytes,) * math.prod(counts[axis] for axis in per),
        )

    def plane(self, nest: _Nest, layer: int, plane: int) -> RowPlane:
        strides = nest.strides
        return RowPlane(
            handle=layer * self.numbers.get("layer", 0) + plane * self.numbers.get("plane", 0),
            offset_bytes=nest.offset_bytes + layer * strides["layer"] + plane * strides["plane"],
            block_stride_bytes=strides["block"],
            token_stride_bytes=strides["token"],
            head_stride_bytes=strides["head"],
            row_bytes=nest.row_bytes,
        )


_CONTIGUOUS = CacheAxes(axes=("layer", "plane", "block", "token", "head"))
_PER_LAYER = CacheAxes(tensors_per=("layer",), axes=("plane", "block", "token", "head"))
_VLLM_HND = CacheAxes(tensors_per=("layer",), axes=("plane", "block", "head", "token"))
_VLLM_BLOCKS_NHD = CacheAxes(tensors_per=("layer",), axes=("block", "plane", "token", "head"))
_VLLM_BLOCKS_HND = CacheAxes(tensors_per=("layer",), axes=("block", "plane", "head", "token"))
_VLLM_LBNHC = CacheAxes(tensors_per=("layer",), axes=("block", "token", "head", "plane"))
_VLLM_LBHNC = CacheAxes(tensors_per=("layer",), axes=("block", "head", "token", "plane"))
_VLLM_BLHNC = CacheAxes(axes=("block", "layer", "head", "token", "plane"))
_VLLM_BHLNC = CacheAxes(axes=("block", "head", "layer", "token", "plane"))
_SGLANG = CacheAxes(tensors_per=("plane", "layer"), axes=("block", "token", "head"))

LAYOUTS: Mapping[str, CacheAxes] = MappingProxyType(
    {
        "contiguous": _CONTIGUOUS,
        "vllm": _PER_LAYER,
        "vllm_hnd": _VLLM_HND,
        "vllm_blocks_nhd": _VLLM_BLOCKS_NHD,
        "vllm_blocks_hnd": _VLLM_BLOCKS_HND,
        "vllm_lbnhc": _VLLM_LBNHC,
        "vllm_lbhnc": _VLLM_LBHNC,
        "vllm_blhnc": _VLLM_BLHNC,
        "vllm_bhlnc": _VLLM_BHLNC,
        "sglang": _SGLANG,
        "mla": _PER_LAYER,
    }
)
"""By the names that PagedCache takes."""
