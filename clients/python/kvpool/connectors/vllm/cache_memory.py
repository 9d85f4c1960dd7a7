"""The engine's KV tensors as an agent maps them: memory regions and the layout of rows in them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvpool.client.engine_registration import GpuRegion
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.connectors.vllm.step_events import StepEvents
from kvpool.core.errors import GeometryUnsupported, StartupFailed
from kvpool.core.geometry import AttentionKind
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from kvpool.core.partition import RankPart

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_SHARED_MEMORY = "/dev/shm"  # where torch makes shared memory
_SPARE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMemory:
    """Memory and layout for EngineRegistration.

    step_events: record points in the engine's work. split: number of blocks of the tensors in one of vLLM's.
    """

    split: int
    layout: EngineLayout
    regions: tuple[SharedMemoryRegion, ...] | tuple[GpuRegion, ...]
    step_events: StepEvents

    def close(self) -> None:
        """Release what was created for the agent; the engine's tensors stay."""
        for region in self.regions:
            if isinstance(region, SharedMemoryRegion):
                region.close()


def cache_memory(
    tensors: Sequence[torch.Tensor], spec: KeyspaceSpec, part: RankPart, block_tokens: int, block_count: int
) -> CacheMemory:
    """Prepare a rank's KV tensors for mapping by an agent, on the CPU or a GPU.

    tensors: one for each layer, [blocks, heads, tokens, row], or [blocks, 1, 1, state] for recurrent layers. CPU
    tensors are moved into shared memory, in place. block_tokens: tokens of vLLM's blocks. block_count: number of vLLM's
    blocks; the tensors may split each into several. raises: GeometryUnsupported for other tensors; StartupFailed if
    there is too little shared memory.
    """
    heads, split = len(part.heads), tensors[0].shape[0] // block_count
    recurrent = spec.group.attention is AttentionKind.STATE_SPACE
    if split > 1 and not spec.opaque:
        block_tokens, block_count = block_tokens // split, block_count * split
    shape = (block_count, heads, 1 if recurrent else block_tokens)
    for number, tensor in enumerate(tensors):
        if tensor.dim() != 4 or tuple(tensor.shape[:3]) != shape:
            raise GeometryUnsupported(f"KV tensor {number} is {tuple(tensor.shape)}, expected {(*shape, '...')}")
    make = _on_gpu if tensors[0].device.type == "cuda" else _on_cpu
    return replace(make(tensors, spec, part, block_tokens, block_count), split=split)


def _on_cpu(
    tensors: Sequence[torch.Tensor], spec: KeyspaceSpec, part: RankPart, block_tokens: int, block_count: int
) -> CacheMemory:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    numbers = {address: number for number, address in enumerate(storages)}
    handles = [numbers[tensor.untyped_storage().data_ptr()] for tensor in tensors]
    # Groups of layers lie over each other: after the first of them the storage is in shared memory.
    _check_room(sum(storage.nbytes() for storage in storages.values() if not storage.is_shared()))
    layers = tuple(LayerLayout(_planes(tensor, handle, spec)) for tensor, handle in zip(tensors, handles, strict=True))
    regions = tuple(_shared(storage) for storage in storages.values())
    layout = EngineLayout(
        block_tokens=block_tokens,
        block_count=block_count,
        layers=layers,
        first_layer=part.layers.start,
        first_head=part.heads.start,
        head_count=len(part.heads),
        handle_sizes=tuple(region.size_bytes for region in regions),
    )
    return CacheMemory(split=1, layout=layout, regions=regions, step_events=StepEvents(None))


def _on_gpu(
    tensors: Sequence[torch.Tensor], spec: KeyspaceSpec, part: RankPart, block_tokens: int, block_count: int
) -> CacheMemory:
    import torch

    from kvpool.client.gpu import GpuEvents, export_tensors

    # All layers may be slices of one allocation with gaps between a layer's blocks: what is exported is all of it.
    bases: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        bases.setdefault(storage.data_ptr(), torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
    exported = export_tensors(list(bases.values()))
    places = dict(zip(bases, exported.places, strict=True))
    layers = []
    for tensor in tensors:
        place = places[tensor.untyped_storage().data_ptr()]
        layers.append(LayerLayout(_planes(tensor, place.region, spec, place.offset_bytes)))
    layout = EngineLayout(
        block_tokens=block_tokens,
        block_count=block_count,
        layers=tuple(layers),
        first_layer=part.layers.start,
        first_head=part.heads.start,
        head_count=len(part.heads),
        handle_sizes=tuple(region.size_bytes for region in exported.regions),
    )
    step_events = StepEvents(GpuEvents(tensors[0].device.index or 0))
    return CacheMemory(split=1, layout=layout, regions=exported.regions, step_events=step_events)


def _planes(tensor: torch.Tensor, handle: int, spec: KeyspaceSpec, base_offset_bytes: int = 0) -> tuple[RowPlane, ...]:
    if spec.opaque:
        return (_cell_plane(tensor, handle, spec, base_offset_bytes),)
    return _row_planes(tensor, handle, spec, base_offset_bytes)


def _cell_plane(tensor: torch.Tensor, handle: int, spec: KeyspaceSpec, base_offset_bytes: int) -> RowPlane:
    """One row is a whole (block, head): K and V of its tokens, or a state, in the kernels' own arrangement."""
    element_bytes, (block_stride, head_stride, token_stride, _) = tensor.element_size(), tensor.stride()
    row_elements = tensor.shape[2] * tensor.shape[3]
    if tensor.stride(3) != 1 or token_stride != tensor.shape[3]:
        raise GeometryUnsupported(f"the KV of a block and head is not in one piece (strides {tensor.stride()})")
    if row_elements * element_bytes != spec.engine_row_bytes:
        raise GeometryUnsupported(
            f"the KV of a block and head has {row_elements * element_bytes} bytes, expected {spec.engine_row_bytes}"
        )
    return RowPlane(
        handle=handle,
        offset_bytes=base_offset_bytes + int(tensor.storage_offset()) * element_bytes,
        block_stride_bytes=block_stride * element_bytes,
        token_stride_bytes=0,
        head_stride_bytes=head_stride * element_bytes,
        row_bytes=row_elements * element_bytes,
    )


def _row_planes(tensor: torch.Tensor, handle: int, spec: KeyspaceSpec, base_offset_bytes: int) -> tuple[RowPlane, ...]:
    """One row for each token and head: K's, and V's right behind it; a single one for MLA."""
    element_bytes, strides = tensor.element_size(), tensor.stride()
    row_bytes = spec.engine_row_bytes
    if strides[3] != 1 or tensor.shape[3] * element_bytes != spec.planes * row_bytes:
        raise GeometryUnsupported(
            f"the KV of a token and head has {tensor.shape[3]} elements of {element_bytes} bytes (stride "
            f"{strides[3]}), expected {spec.planes} rows of {row_bytes} bytes"
        )
    return tuple(
        RowPlane(
            handle=handle,
            offset_bytes=base_offset_bytes + int(tensor.storage_offset()) * element_bytes + plane * row_bytes,
            block_stride_bytes=strides[0] * element_bytes,
            token_stride_bytes=strides[2] * element_bytes,
            head_stride_bytes=strides[1] * element_bytes,
            row_bytes=row_bytes,
        )
        for plane in range(spec.planes)
    )


def _check_room(size_bytes: int) -> None:
    """torch allocates shared memory lazily, and a process that runs out of it is killed. raises: StartupFailed."""
    filesystem = os.statvfs(_SHARED_MEMORY)
    free_bytes = filesystem.f_bavail * filesystem.f_frsize
    if free_bytes < size_bytes + _SPARE_BYTES:
        raise StartupFailed(
            f"the KV cache has {size_bytes} bytes, {_SHARED_MEMORY} has {free_bytes} free; make it larger "
            f"(docker: --shm-size) or the KV cache smaller (VLLM_CPU_KVCACHE_SPACE)"
        )


def _shared(storage: Any) -> SharedMemoryRegion:
    """Move a storage into shared memory; all tensors on it follow."""
    fd, size_bytes = storage._share_fd_cpu_()  # the descriptor stays torch's
    return SharedMemoryRegion.adopt(fd, size_bytes)
