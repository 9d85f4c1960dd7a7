"""Engine memory: it is lent for exactly as long as some process can still touch it."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.core.errors import InvalidRequest
from kvpool.testing import eventually_sync


def test_memory_is_zeroed_writable_and_shared() -> None:
    with SharedMemoryRegion(8192) as region:
        fd = region.lent_descriptor()
        other = mmap.mmap(fd, 8192)
        os.close(fd)
        assert region.buffer == bytes(8192)
        region.buffer[5] = 7
        assert other[5] == 7
        other.close()


def test_memory_is_in_place_before_it_is_lent() -> None:
    """Else the agent zeroes it, while the engine waits for the end of its registration: seconds a GiB."""
    with SharedMemoryRegion(1 << 20) as region:
        fd = region.lent_descriptor()
        other = mmap.mmap(fd, region.size_bytes)
        os.close(fd)
        assert in_place(other) == region.size_bytes // mmap.PAGESIZE
        other.close()


def in_place(mapping: mmap.mmap) -> int:
    """Pages that need no more than a page table entry, of a mapping that was not touched."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    pages = ctypes.create_string_buffer(len(mapping) // mmap.PAGESIZE)
    first = ctypes.c_char.from_buffer(mapping)
    assert libc.mincore(ctypes.addressof(first), len(mapping), pages) == 0, os.strerror(ctypes.get_errno())
    return sum(state & 1 for state in pages.raw)


def test_a_mapping_alone_keeps_it_lent() -> None:
    with SharedMemoryRegion(4096) as region:
        assert not region.is_lent()
        fd = region.lent_descriptor()
        assert region.is_lent()
        mapping = mmap.mmap(fd, 4096)
        os.close(fd)
        assert region.is_lent()
        mapping.close()
        assert not region.is_lent()


def test_a_killed_process_has_let_go() -> None:
    code = """
import mmap, sys
mapping = mmap.mmap(int(sys.argv[1]), 4096)
print("mapped", flush=True)
sys.stdin.read()
"""
    with SharedMemoryRegion(4096) as region:
        fd = region.lent_descriptor()
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        os.close(fd)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"mapped\n"
            assert region.is_lent()
            process.kill()
            process.wait()
        eventually_sync(lambda: not region.is_lent())


def test_the_memory_cannot_shrink_under_a_mapping() -> None:
    with SharedMemoryRegion(8192) as region:
        fd = region.lent_descriptor()
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
        os.close(fd)


def test_close_does_not_wait_and_returns_whether_views_live() -> None:
    region = SharedMemoryRegion(4096)
    array = np.frombuffer(region.buffer, dtype=np.uint8)
    assert not region.close()
    assert array[0] == 0
    del array
    assert region.close()
    assert not region.is_lent()


def test_an_empty_region_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        SharedMemoryRegion(0)
