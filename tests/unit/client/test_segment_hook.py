"""What a hook on new mappings is given: their bytes, for as long as it runs."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.client.fds import FetchedFd
from kvpool.client.segments import SegmentMap
from kvpool.core.errors import InvalidRequest, ServiceUnavailable
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.store_peer import Memory


async def test_a_hook_gets_the_mapping_and_is_undone(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    fetched: list[FetchedFd] = []
    seen: list[memoryview] = []
    undone: list[int] = []

    def on_map(segment: memoryview) -> Callable[[], None]:
        seen.append(segment)
        segment[:4] = b"view"
        assert os.pread(memory.segment_fd, 4, 0) == b"view"
        return lambda: undone.append(1)

    def fetch(path: str, token: bytes, number: int, *, timeout_s: float) -> FetchedFd:
        fetched.append(memory.fetch(path, token, number, timeout_s=timeout_s))
        return fetched[-1]

    segments = SegmentMap("/descriptors", b"t" * 32, timeout_s=1.0, fetch=fetch, on_map=on_map)
    await segments.open()
    await segments.map([3, 3])
    assert len(seen) == 1
    with pytest.raises(ValueError, match="released"):
        len(seen[0])
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fetched[-1].fd)
    assert bytes(segments.view(3, 0, 4)) == b"view"
    assert not undone
    assert segments.close()
    assert undone == [1]


async def test_callers_that_need_overlapping_segments_map_each_once(tmp_path: Path) -> None:
    """A second mapping in place of the first would unmap memory that a GPU goes on writing to: it stays pinned."""
    memory, undone = Memory(tmp_path), list[int]()
    segments = SegmentMap(
        "/descriptors", b"t" * 32, timeout_s=1.0, fetch=memory.fetch, on_map=lambda segment: lambda: undone.append(1)
    )
    await segments.open()
    await asyncio.gather(segments.map(range(3, 9)), segments.map(range(8, 2, -1)), segments.map([8, 3, 6]))
    assert sorted(memory.fetched[1:]) == list(range(3, 9))
    assert segments.close()
    assert len(undone) == 6


async def test_nothing_is_taken_for_unmapped_while_a_hook_still_has_it(tmp_path: Path) -> None:
    begun, go_on, undone = threading.Event(), threading.Event(), list[int]()

    def on_map(segment: memoryview) -> Callable[[], None]:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return lambda: undone.append(1)

    segments = SegmentMap("/descriptors", b"t" * 32, timeout_s=1.0, fetch=Memory(tmp_path).fetch, on_map=on_map)
    await segments.open()
    mapping = asyncio.ensure_future(segments.map([3]))
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    stopping = asyncio.ensure_future(segments.stop())
    await asyncio.wait((stopping,), timeout=0.01)
    assert not stopping.done()
    go_on.set()
    await stopping
    assert undone == [1]
    with pytest.raises(ServiceUnavailable):
        await mapping
    assert segments.close()


async def test_a_segment_that_others_can_truncate_is_not_mapped(tmp_path: Path) -> None:
    """Its memory could go away behind the mapping, which ends the process that touches it."""
    memory = Memory(tmp_path)
    memory.is_sealed = False
    segments = SegmentMap("/descriptors", b"t" * 32, timeout_s=1.0, fetch=memory.fetch)
    await segments.open()
    with pytest.raises(InvalidRequest, match="truncated"):
        await segments.map([3])
    assert not segments.is_mapped(3) and segments.close()
