"""An engine's paged KV cache, as the pool shares it: whose KV it holds, its memory, and where rows lie in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from kvpool.client.engine_registration import GpuRegion
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.core.cache_axes import LAYOUTS
from kvpool.core.errors import InvalidRequest
from kvpool.core.ipc import EngineEvent
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from kvpool.core.model import Model

if TYPE_CHECKING:
    from kvpool.client.engine_events import EventSlots
    from kvpool.client.gpu import GpuEvents, Stream


class CacheTensor(Protocol):
    """What is used of a torch.Tensor."""

    @property
    def device(self) -> Any: ...
    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Any: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def numel(self) -> int: ...
    def storage_offset(self) -> Any: ...
    def untyped_storage(self) -> Any: ...


class PagedCache:
    """A rank's KV cache in blocks of `block_size` tokens.

    Memory on a GPU is exported by CUDA IPC; tensors in host memory move into shared memory, in place. It belongs to the
    engine: keep it until the pool is closed.
    """

    def __init__(
        self,
        tensors: Sequence[CacheTensor],
        model: Model,
        *,
        layout: str | EngineLayout,
        block_size: int,
        layers: range | None = None,
        heads: range | None = None,
    ) -> None:
        """tensors: of torch, in the order that the layout says.

        layout: a name of kvpool.core.cache_axes.LAYOUTS, for example "vllm": one tensor [2, blocks, tokens, heads,
        head_dim] for each layer; "contiguous": one tensor [layers, 2, blocks, tokens, heads, head_dim]. Or an
        EngineLayout over the tensors, for any other.
        layers, heads: of the model that this rank has; by default all.
        raises: InvalidRequest naming what does not fit; StartupFailed if there is not enough shared memory.
        """
        if not tensors:
            raise InvalidRequest("tensors must name at least one tensor")
        self.model = model
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        preset = _layout(model, layout, block_size, layers, heads, sum(sizes))
        if isinstance(layout, str):
            _check_shapes(tensors, model, layout, preset)
        self._events: GpuEvents | None = None
        self.regions: tuple[SharedMemoryRegion, ...] | tuple[GpuRegion, ...]
        if tensors[0].device.type == "cuda":
            from kvpool.client.gpu import GpuEvents, export_tensors

            exported = export_tensors(tensors)
            self.layout, self.regions = exported.layout(preset), exported.regions
            self._events = GpuEvents(exported.device_index)
        else:
            self.regions, places = _share(tensors)
            self.layout = _moved(preset, sizes, places, self.regions)
        self.layout.validate(model.spec)

    @classmethod
    def in_shared_memory(
        cls,
        model: Model,
        *,
        layout: str,
        block_size: int,
        block_count: int,
        layers: range | None = None,
        heads: range | None = None,
    ) -> PagedCache:
        """A cache in new host memory, for engines without torch: `buffers` are its tensors."""
        cache = cls.__new__(cls)
        rank = layers or range(model.spec.group.layers), heads or range(model.spec.group.kv_heads)
        cache.model, cache._events = model, None  # noqa: SLF001  # one of its own, made without tensors
        cache.layout = _axes(layout).layout(model.spec, *rank, block_size, block_count)
        cache.layout.validate(model.spec)
        cache.regions = tuple(SharedMemoryRegion(size) for size in cache.layout.handle_sizes)
        return cache

    @property
    def buffers(self) -> tuple[memoryview, ...]:
        """All bytes of a cache in shared memory, writable, by region."""
        return tuple(region.buffer for region in self.regions if isinstance(region, SharedMemoryRegion))

    @property
    def on_gpu(self) -> bool:
        """Whether it is on a GPU."""
        return self._events is not None

    @property
    def events(self) -> EventSlots | None:
        """For EngineRegistration."""
        return self._events.slots if self._events is not None else None

    def record_event(self, stream: Stream | None = None) -> EngineEvent | None:
        """The work that was given to a stream so far (None: the calling thread's current one), for the `wait_event` of
        one load or store. None for a cache on a CPU, and if no event was free: then that work has ended."""
        return self._events.record_or_wait(stream) if self._events is not None else None

    def close(self) -> None:
        """Let go of events and of the shared mapping, after the pool was closed. Idempotent."""
        if self._events is not None:
            self._events.close()
        for region in self.regions:
            if isinstance(region, SharedMemoryRegion):
                region.close()


def _axes(layout: str) -> Any:
    if layout not in LAYOUTS:
        raise InvalidRequest(f"layout must be an EngineLayout or one of {', '.join(LAYOUTS)}, got {layout!r}")
    return LAYOUTS[layout]


def _layout(
    model: Model,
    layout: str | EngineLayout,
    block_size: int,
    layers: range | None,
    heads: range | None,
    size_bytes: int,
) -> EngineLayout:
    """The layout over the tensors: its handle n is tensor n."""
    if isinstance(layout, EngineLayout):
        return layout
    rank = layers or range(model.spec.group.layers), heads or range(model.spec.group.kv_heads)
    axes = _axes(layout)
    block_bytes = sum(axes.layout(model.spec, *rank, block_size, 1).handle_sizes)
    if size_bytes % block_bytes:
        raise InvalidRequest(
            f"tensors have {size_bytes} bytes, which are not whole blocks of {block_size} tokens ({block_bytes} bytes, "
            f"all layers and heads of the rank)"
        )
    found: EngineLayout = axes.layout(model.spec, *rank, block_size, size_bytes // block_bytes)
    return found


def _check_shapes(tensors: Sequence[CacheTensor], model: Model, layout: str, preset: EngineLayout) -> None:
    """Axes in another order would have as many bytes. Neighbouring axes may be one."""
    spec = model.spec
    counts = {
        "layer": len(preset.layers),
        "plane": spec.planes,
        "block": preset.block_count,
        "token": preset.block_tokens,
        "head": preset.head_count,
    }
    axes = LAYOUTS[layout]
    expected = [*(counts[axis] for axis in axes.axes), spec.group.row_elements]
    if len(tensors) != len(preset.handle_sizes):
        raise InvalidRequest(f"layout {layout!r} has {len(preset.handle_sizes)} tensors, got {len(tensors)}")
    for number, tensor in enumerate(tensors):
        dims = sorted(zip(tensor.stride(), tensor.shape, strict=True), key=lambda dim: -dim[0])
        if not set(_borders([extent for _, extent in dims])) <= set(_borders(expected)):
            raise InvalidRequest(
                f"tensors[{number}] is {tuple(tensor.shape)}; layout {layout!r} has {' x '.join(map(str, expected))} "
                f"({', '.join(axes.axes)}, row) in memory"
            )


def _borders(extents: Sequence[int]) -> Iterator[int]:
    """Elements outside of each border between two axes."""
    for at in range(len(extents) + 1):
        yield math.prod(extents[:at])


def _share(tensors: Sequence[CacheTensor]) -> tuple[tuple[SharedMemoryRegion, ...], list[tuple[int, int]]]:
    """Regions, and of each tensor its region and place there."""
    regions: dict[int, tuple[int, SharedMemoryRegion]] = {}
    places = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in regions:
            fd, size_bytes = storage._share_fd_cpu_()  # the descriptor stays torch's; all tensors on it follow
            regions[storage.data_ptr()] = len(regions), SharedMemoryRegion.adopt(fd, size_bytes)
        places.append((regions[storage.data_ptr()][0], tensor.storage_offset() * tensor.element_size()))
    return tuple(region for _, region in regions.values()), places


def _moved(
    preset: EngineLayout,
    sizes: Sequence[int],
    places: Sequence[tuple[int, int]],
    regions: Sequence[SharedMemoryRegion],
) -> EngineLayout:
    """A layout over tensors as one over the memory that they lie in."""
    if tuple(sizes) != preset.handle_sizes:
        raise InvalidRequest(f"tensors have {tuple(sizes)} bytes, the layout's handles {preset.handle_sizes}")

    def moved(planes: Sequence[RowPlane]) -> tuple[RowPlane, ...]:
        return tuple(
            replace(plane, handle=places[plane.handle][0], offset_bytes=plane.offset_bytes + places[plane.handle][1])
            for plane in planes
        )

    return replace(
        preset,
        layers=tuple(LayerLayout(moved(layer.planes), moved(layer.scales)) for layer in preset.layers),
        handle_sizes=tuple(region.size_bytes for region in regions),
    )
