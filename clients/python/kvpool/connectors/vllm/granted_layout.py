"""Which KV cache layout vLLM granted, read off the registered tensors: a layout that was asked for may be dropped."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.partition import RankPart

_COPY_ENGINE_BYTES = 32 << 10  # runs of 32 KiB reach 53 of 55 GB/s on an H200, of 16 KiB 34


@dataclass(frozen=True, slots=True)
class GrantedLayout:
    """name: as vLLM calls it, its dimensions from the outermost. run_bytes: of a page of all of a rank's heads, in one
    piece both in a block and in the page."""

    name: str
    run_bytes: int

    @property
    def way(self) -> str:
        """What copies pages of an equal TP degree."""
        return "the copy engine" if self.run_bytes >= _COPY_ENGINE_BYTES else "kernels"


def granted_layout(layout: EngineLayout, spec: KeyspaceSpec, part: RankPart) -> GrantedLayout:
    """Of a rank's tensors that are taken apart into rows."""
    planes = [layer.planes[0] for layer in layout.layers]
    first = planes[0]
    apart = len({plane.handle for plane in planes}) > 1
    layer_stride = planes[1].offset_bytes - first.offset_bytes if len(planes) > 1 and not apart else inf
    strides = {
        "L": abs(layer_stride),
        "B": first.block_stride_bytes,
        "H": first.head_stride_bytes,
        "N": first.token_stride_bytes,
    }
    name = "".join(sorted(strides, key=lambda dimension: -strides[dimension])) + "C"
    # A page has, from the innermost: K and V of a token, tokens, heads, layers. A run ends where the block differs.
    grid, run_bytes = ShardGrid.of(spec), spec.planes * first.row_bytes
    layers = min(len(grid.layers_of_group(0)), len(part.layers))
    for dimension, extent in (("N", layout.block_tokens), ("H", layout.head_count), ("L", layers)):
        if extent > 1 and strides[dimension] != run_bytes:
            break
        run_bytes *= extent
    return GrantedLayout(name, run_bytes)
