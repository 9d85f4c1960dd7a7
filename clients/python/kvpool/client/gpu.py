"""What an engine with its KV cache on a GPU does around the pool: export tensors, record events, wait for layers.

torch is imported only by what needs it, and tensors are asked for no more than their addresses. Everything here speaks
of one device, that of the tensors, and makes it current in the calling thread, as torch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvpool.client.engine_events import EventSlots
from kvpool.client.engine_registration import GpuRegion
from kvpool.core.errors import InvalidRequest
from kvpool.core.ipc import EngineEvent, IpcMemory
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from kvpool.cuda.driver import Driver
from kvpool.cuda.ipc import EngineEvents, export_memory

DEFAULT_EVENTS = 64


class Device(Protocol):
    """torch.device."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


class Tensor(Protocol):
    """What is asked of a torch.Tensor."""

    @property
    def device(self) -> Device: ...
    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def numel(self) -> int: ...


class Stream(Protocol):
    """torch.cuda.Stream."""

    @property
    def cuda_stream(self) -> int: ...
    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's first byte lies: `offset_bytes` into the memory of region `region`."""

    region: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ExportedTensors:
    """Tensors as an agent can map them. regions: one for each allocation, however many tensors lie in it."""

    regions: tuple[GpuRegion, ...]
    places: tuple[TensorPlace, ...]  # of each tensor, in order
    device_index: int  # torch's, of the GPU that all of it is on

    def layout(self, preset: EngineLayout) -> EngineLayout:
        """A layout over the tensors (kvpool.core.cache_axes: its handle n is tensor n) as one over the regions.

        raises: InvalidRequest if the tensors are not those that the layout speaks of.
        """
        sizes = tuple(place.size_bytes for place in self.places)
        if sizes != preset.handle_sizes:
            raise InvalidRequest(f"tensors have {sizes} bytes, the layout's handles {preset.handle_sizes}")
        return replace(
            preset,
            layers=tuple(LayerLayout(self._moved(layer.planes), self._moved(layer.scales)) for layer in preset.layers),
            handle_sizes=tuple(region.size_bytes for region in self.regions),
        )

    def _moved(self, planes: Sequence[RowPlane]) -> tuple[RowPlane, ...]:
        places = [self.places[plane.handle] for plane in planes]
        return tuple(
            replace(plane, handle=place.region, offset_bytes=plane.offset_bytes + place.offset_bytes)
            for plane, place in zip(planes, places, strict=True)
        )


def export_tensors(tensors: Sequence[Tensor], *, driver: Driver | None = None) -> ExportedTensors:
    """Make the memory of KV tensors known to an agent. They must live as long as the agent maps them.

    Any order of dimensions will do (a permuted view, say), but no gaps: of a view that skips bytes export the tensor
    that it is cut from. Raises InvalidRequest naming the tensor: it is not on a GPU, not all are on the same one, it is
    empty or has gaps, or its allocator's memory cannot be shared (expandable segments, cudaMallocAsync); NotServed
    without a driver.
    """
    if not tensors:
        raise InvalidRequest("tensors must name at least one tensor")
    ordinal = _ordinal_of(tensors)
    driver = driver or Driver.load()
    driver.use_device(ordinal)
    device_uuid = driver.device_uuid(ordinal)
    exported: list[tuple[IpcMemory, int]] = []
    for number, tensor in enumerate(tensors):
        size_bytes = _dense_bytes(number, tensor)
        try:
            exported.append((export_memory(driver, device_uuid, tensor.data_ptr(), size_bytes), size_bytes))
        except InvalidRequest as error:
            raise InvalidRequest(f"tensors[{number}]: {error.message}") from error
    return _by_allocation(exported, ordinal)


def _by_allocation(exported: Sequence[tuple[IpcMemory, int]], ordinal: int) -> ExportedTensors:
    spans: dict[bytes, tuple[int, int]] = {}  # by handle: the part of the allocation that tensors lie in
    for memory, size_bytes in exported:
        start, end = spans.get(memory.handle, (memory.allocation_offset, 0))
        spans[memory.handle] = min(start, memory.allocation_offset), max(end, memory.allocation_offset + size_bytes)
    numbers = {handle: number for number, handle in enumerate(spans)}
    first = {memory.handle: memory for memory, _ in reversed(exported)}
    return ExportedTensors(
        tuple(
            GpuRegion(end - start, replace(first[handle], allocation_offset=start))
            for handle, (start, end) in spans.items()
        ),
        tuple(
            TensorPlace(numbers[memory.handle], memory.allocation_offset - spans[memory.handle][0], size_bytes)
            for memory, size_bytes in exported
        ),
        ordinal,
    )


def _ordinal_of(tensors: Sequence[Tensor]) -> int:
    for number, tensor in enumerate(tensors):
        if tensor.device.type != "cuda":
            raise InvalidRequest(
                f"tensors[{number}] is on {tensor.device.type}, not on a GPU; "
                f"for CPU memory register a kvpool.client.shared_memory.SharedMemoryRegion"
            )
        if tensor.device.index != tensors[0].device.index:
            raise InvalidRequest(
                f"tensors[{number}] is on GPU {tensor.device.index}, tensors[0] on {tensors[0].device.index}; "
                f"each rank registers the cache of one GPU"
            )
    return tensors[0].device.index or 0


def _dense_bytes(number: int, tensor: Tensor) -> int:
    """Bytes from the first to the last element, if there are no others between them."""
    if not tensor.numel():
        raise InvalidRequest(f"tensors[{number}] is empty")
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span != tensor.numel():
        raise InvalidRequest(
            f"tensors[{number}] spans {span} elements but has {tensor.numel()}: it is a view with gaps or overlaps; "
            f"export the tensor that it is cut from and describe the view in the layout"
        )
    return span * tensor.element_size()


class GpuEvents:
    """Interprocess events of one GPU, to be made before the engine registers (EngineRegistration.events = `slots`).

    One is in use for each store or load from `record` until its GPU work has ended, and a moment longer.
    """

    def __init__(self, device_index: int, count: int = DEFAULT_EVENTS, *, driver: Driver | None = None) -> None:
        """raises: NotServed without a driver."""
        self._driver = driver or Driver.load()
        self._ordinal = device_index
        self._driver.use_device(device_index)
        self._events = EngineEvents(self._driver, self._driver.device_uuid(device_index), count)
        self.slots = EventSlots(self._events.handles)

    def record(self, stream: Stream | None = None, *, timeout_s: float = 1.0) -> EngineEvent:
        """An event that stands for the work given to the stream so far (None: torch's current one), for the `after` of
        one `store` or `load`, which gives it back.

        raises: DeadlineExceeded if no event becomes free in time: then store without, after the stream is synchronized,
        or not at all.
        """
        return self._recorded(self.slots.take(timeout_s), stream)

    def try_record(self, stream: Stream | None = None) -> EngineEvent | None:
        """The same without waiting: None if no event is free now."""
        event = self.slots.try_take()
        return self._recorded(event, stream) if event is not None else None

    def record_or_wait(self, stream: Stream | None = None) -> EngineEvent | None:
        """An event, or if none is free now wait for the stream's work itself, and return None."""
        event = self.try_record(stream)
        if event is None:
            import torch

            (stream or torch.cuda.current_stream(self._ordinal)).synchronize()
        return event

    def _recorded(self, event: EngineEvent, stream: Stream | None) -> EngineEvent:
        try:
            self._driver.use_device(self._ordinal)
            self._events.record(event.slot, _address_of(stream, self._ordinal))
        except BaseException:
            self.slots.give_back(event)
            raise
        return event

    def close(self) -> None:
        """Free the events; no agent may look at them any more. Idempotent."""
        self._driver.use_device(self._ordinal)
        self._events.close()


def _address_of(stream: Stream | None, ordinal: int) -> int:
    if stream is not None:
        return stream.cuda_stream
    import torch

    return int(torch.cuda.current_stream(ordinal).cuda_stream)
