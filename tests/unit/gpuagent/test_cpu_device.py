"""Memory that the CPU device maps: what is refused, and that nothing is left behind."""

import errno
import mmap
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import InvalidRequest
from kvpool.core.grid import ShardGrid
from kvpool.core.page import page_bytes
from kvpool.core.payload import payload_bytes
from kvpool_gpuagent.adapters.cpu import device as cpu_device
from kvpool_gpuagent.adapters.cpu.device import CpuDevice
from kvpool_gpuagent.ports import MappedHandle
from tests.fixtures import layout_presets
from tests.unit.gpuagent.cpu_caches import DIM, HEADS, LAYERS, Page, batch_of, make_spec, offer


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"size_bytes": 1 << 40}, "its file has"),
        ({"size_bytes": 0}, "size_bytes"),
    ],
)
async def test_memory_that_is_not_there_is_refused_before_it_can_kill_the_agent(
    change: dict[str, int], named: str
) -> None:
    spec = make_spec("gqa")
    layout = layout_presets.contiguous_layout(spec, range(LAYERS), range(HEADS), 8, 4)
    handles, _ = offer(layout.handle_sizes)
    descriptor = handles[0].descriptor
    assert descriptor is not None
    bad = replace(handles[0], **change)  # type: ignore[arg-type]
    device = CpuDevice()
    with pytest.raises(InvalidRequest, match=named):
        await device.map_cache(spec, ShardGrid.of(spec), layout, [bad], [])
    with pytest.raises(OSError):
        os.fstat(descriptor)  # closed all the same
    await device.close()


async def test_a_file_longer_than_its_memory_is_refused() -> None:
    """What ftruncate promises and tmpfs cannot give ends in SIGBUS when it is touched."""
    spec = make_spec("gqa")
    shm = os.statvfs("/dev/shm")
    blocks = 1 + (shm.f_blocks * shm.f_frsize) // (LAYERS * 2 * HEADS * DIM * 2 * 8)
    layout = layout_presets.contiguous_layout(spec, range(LAYERS), range(HEADS), 8, blocks)
    descriptor = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE, 0o600)
    os.ftruncate(descriptor, layout.handle_sizes[0])
    # The kernel's own word for it is simulated where the file system is large: filling it would take minutes.
    device = CpuDevice()
    full = OSError(errno.EFAULT, "Bad address")
    with (
        patch.object(cpu_device, "fill_page_tables", side_effect=full),
        pytest.raises(InvalidRequest, match="posix_fallocate"),
    ):
        handle = MappedHandle(size_bytes=layout.handle_sizes[0], descriptor=descriptor)
        await device.map_cache(spec, ShardGrid.of(spec), layout, [handle], [])
    await device.close()


async def test_a_read_only_descriptor_is_refused() -> None:
    spec = make_spec("gqa")
    layout = layout_presets.contiguous_layout(spec, range(LAYERS), range(HEADS), 8, 4)
    (handle,), _ = offer(layout.handle_sizes)
    assert handle.descriptor is not None
    read_only = os.open(f"/proc/self/fd/{handle.descriptor}", os.O_RDONLY)
    os.close(handle.descriptor)
    device = CpuDevice()
    with pytest.raises(InvalidRequest, match="cannot be mapped for writing"):
        bad = MappedHandle(size_bytes=handle.size_bytes, descriptor=read_only)
        await device.map_cache(spec, ShardGrid.of(spec), layout, [bad], [])
    await device.close()


async def test_a_session_leaves_no_descriptor_and_no_mapping() -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        open_files = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
        return sum("memfd:leaktest" in str(path) for path in open_files), maps.count("memfd:leaktest")

    spec = make_spec("gqa")
    layout = layout_presets.sglang_layout(spec, range(LAYERS), range(HEADS), 8, 23)
    device = CpuDevice()
    handles = []
    for size_bytes in layout.handle_sizes:
        descriptor = os.memfd_create("leaktest")
        os.posix_fallocate(descriptor, 0, size_bytes)
        handles.append(MappedHandle(size_bytes=size_bytes, descriptor=descriptor))
    cache = await device.map_cache(spec, ShardGrid.of(spec), layout, handles, [])
    assert held()[1] == len(handles)
    payload = payload_bytes(spec, ShardGrid.of(spec), 0)
    page = Page(0, np.zeros(page_bytes(payload), dtype=np.uint8), payload)
    batch = batch_of([page], np.arange(4))
    assert await cache.gather(batch, CancelToken())
    await cache.scatter(batch)
    await cache.close()
    await cache.close()
    assert held() == (0, 0)
    await device.close()


async def test_segments_are_populated_and_let_go() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    device = CpuDevice()
    with memoryview(memory) as view:
        undo = device.register_segment(view)
    undo()
    memory.close()  # would raise if the device kept a view
    await device.close()
