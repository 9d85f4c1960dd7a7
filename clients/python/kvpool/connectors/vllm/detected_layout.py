"""Detects the KV cache layout that vLLM granted from the registered tensors: a requested layout may be dropped."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from kvpool.core.partition import RankPart

_COPY_ENGINE_BYTES = 32 << 10  # runs of 32 KiB reach 53 of 55 GB/s on an H200, of 16 KiB 34


@dataclass(frozen=True, slots=True)
class DetectedLayout:
    """name: vLLM's name, dimensions from the outermost. run_bytes: contiguous bytes, in a block as in the page, of a
    page with all heads of a rank."""

    name: str
    run_bytes: int

    @property
    def copy_path(self) -> str:
        """What copies pages of engines with the same TP degree."""
        return "the copy engine" if self.run_bytes >= _COPY_ENGINE_BYTES else "kernels"


def detect_layout(layout: EngineLayout, spec: KeyspaceSpec, part: RankPart) -> DetectedLayout:
    """Detect the layout of a rank's tensors, if they are split into rows."""
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
    return DetectedLayout(name, run_bytes)
