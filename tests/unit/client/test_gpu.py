"""Exporting tensors and recording events, on a driver that only remembers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpool.client.engine_registration import GpuRegion
from kvpool.client.gpu import GpuEvents, export_tensors
from kvpool.core.errors import DeadlineExceeded, InvalidRequest
from kvpool.cuda.driver import CudaError, Driver
from tests.fixtures.layout_presets import sglang_layout, vllm_nhd_layout
from tests.unit.client.servers import SPEC

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
SEGMENT_BYTES = 2 << 20


class Recorder:
    """The part of a Driver that is used: allocations are segments of 2 MiB, like those of torch's allocator."""

    def __init__(self, exportable: bool = True) -> None:
        self.exportable = exportable
        self.current: int | None = None
        self.events: list[int] = []
        self.recorded: list[tuple[int, int]] = []

    def use_device(self, ordinal: int) -> None:
        self.current = ordinal

    def device_uuid(self, ordinal: int) -> str:
        return UUID

    def address_range(self, address: int) -> tuple[int, int]:
        return address - address % SEGMENT_BYTES, SEGMENT_BYTES

    def ipc_memory_handle(self, address: int) -> bytes:
        assert self.current == 1
        if not self.exportable:
            raise CudaError("cuIpcGetMemHandle: invalid argument", 1)
        return address.to_bytes(64, "little")

    def event_create(self, flags: int) -> int:
        assert self.current == 1
        self.events.append(len(self.events) + 100)
        return self.events[-1]

    def ipc_event_handle(self, event: int) -> bytes:
        return event.to_bytes(64, "little")

    def event_record(self, event: int, stream: int) -> None:
        if stream == 13:
            raise CudaError("cuEventRecord: stream is capturing", 900)
        self.recorded.append((event, stream))

    def event_destroy(self, event: int) -> None:
        self.events.remove(event)

    @property
    def driver(self) -> Driver:
        return cast(Driver, self)


def tensor(address: int, *shape: int, strides: tuple[int, ...] = (), device: str = "cuda", index: int = 1) -> Any:
    """bf16."""
    packed: list[int] = []
    step = 1
    for extent in reversed(shape):
        packed.insert(0, step)
        step *= extent
    return SimpleNamespace(
        device=SimpleNamespace(type=device, index=index),
        shape=shape,
        stride=lambda: strides or tuple(packed),
        data_ptr=lambda: address,
        element_size=lambda: 2,
        numel=lambda: step,
    )


def test_tensors_of_one_allocation_are_one_region() -> None:
    base = 16 * SEGMENT_BYTES
    tensors = [tensor(base + 4096, 8, 64), tensor(3 * SEGMENT_BYTES, 8, 64), tensor(base + 512, 8, 64)]
    exported = export_tensors(tensors, driver=Recorder().driver)
    first, second = exported.regions
    assert (first.memory.device_uuid, first.memory.allocation_offset, first.size_bytes) == (
        UUID,
        512,
        4096 - 512 + 1024,
    )
    assert (second.memory.allocation_offset, second.memory.allocation_bytes) == (0, SEGMENT_BYTES)
    assert second.size_bytes == 1024
    assert [(place.region, place.offset_bytes) for place in exported.places] == [(0, 3584), (1, 0), (0, 0)]
    assert exported.device_index == 1
    for region in exported.regions:
        region.memory.check("region", region.size_bytes)


def test_a_preset_over_tensors_becomes_a_layout_over_regions() -> None:
    layers, heads = range(SPEC.group.layers), range(SPEC.group.kv_heads)
    preset = sglang_layout(SPEC, layers, heads, 8, 4)
    size = preset.handle_sizes[0]
    base = 16 * SEGMENT_BYTES
    count = len(preset.handle_sizes)
    tensors = [tensor(base + number * size, size // 2) for number in range(count)]
    exported = export_tensors(tensors, driver=Recorder().driver)
    layout = exported.layout(preset)
    assert layout.handle_sizes == (count * size,)
    layout.validate(SPEC)
    for before, after in zip(preset.layers, layout.layers, strict=True):
        for old, new in zip(before.planes, after.planes, strict=True):
            assert (new.handle, new.offset_bytes) == (0, old.handle * size + old.offset_bytes)
            assert new.block_stride_bytes == old.block_stride_bytes
    with pytest.raises(InvalidRequest, match="tensors have"):
        exported.layout(vllm_nhd_layout(SPEC, layers, heads, 8, 4))


def test_a_permuted_tensor_is_exported_and_one_with_gaps_is_not() -> None:
    permuted = tensor(0, 2, 8, 4, strides=(32, 1, 8))
    assert export_tensors([permuted], driver=Recorder().driver).regions[0].size_bytes == 128
    with pytest.raises(InvalidRequest, match=r"tensors\[1\] spans 60 elements but has 32.*cut from"):
        export_tensors([permuted, tensor(0, 8, 4, strides=(8, 1))], driver=Recorder().driver)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ([], "at least one"),
        ([tensor(0, 4), tensor(0, 4, device="cpu")], r"tensors\[1\] is on cpu, not on a GPU; .*SharedMemoryRegion"),
        ([tensor(0, 4), tensor(0, 4, index=0)], r"tensors\[1\] is on GPU 0, tensors\[0\] on 1"),
        ([tensor(0, 0, 4)], r"tensors\[0\] is empty"),
        ([tensor(SEGMENT_BYTES - 8, 8)], r"tensors\[0\]: 16 bytes at 0x1ffff8 reach beyond"),
    ],
)
def test_what_cannot_be_exported(tensors: list[Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        export_tensors(tensors, driver=Recorder().driver)


def test_memory_that_torch_did_not_malloc_says_what_to_set() -> None:
    with pytest.raises(InvalidRequest, match=r"tensors\[0\].*expandable_segments:False"):
        export_tensors([tensor(0, 4)], driver=Recorder(exportable=False).driver)


def test_events_are_recorded_on_the_stream_and_reused_only_when_free() -> None:
    recorder = Recorder()
    events = GpuEvents(1, 1, driver=recorder.driver)
    assert events.slots.handles[0].handle == (100).to_bytes(64, "little")
    event = events.record(SimpleNamespace(cuda_stream=7))
    assert recorder.recorded == [(100, 7)]
    with pytest.raises(DeadlineExceeded, match="none of 1 events"):
        events.record(SimpleNamespace(cuda_stream=7), timeout_s=0.01)
    events.slots.give_back(event)
    with pytest.raises(CudaError, match="capturing"):
        events.record(SimpleNamespace(cuda_stream=13))
    assert events.slots.free_count == 1
    events.close()
    events.close()
    assert recorder.events == []


def test_regions_are_checked_before_they_are_sent() -> None:
    region = export_tensors([tensor(0, 64)], driver=Recorder().driver).regions[0]
    with pytest.raises(InvalidRequest, match="ends at byte"):
        GpuRegion(SEGMENT_BYTES + 1, region.memory).memory.check("region", SEGMENT_BYTES + 1)
