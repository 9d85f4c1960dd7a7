"""Scratch that is smaller than asked for, and pages of awkward lengths in it: slower, still right, and never stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from kvpool.core.errors import KvPoolError
from kvpool.core.page import PageFault, PageKey
from kvpool_gpuagent.adapters.gpu_lane import Lane
from kvpool_gpuagent.adapters.gpu_movers import scratch_payloads
from kvpool_gpuagent.adapters.gpu_scratch import Scratch
from kvpool_gpuagent.adapters.gpu_streams import LaneStreams
from kvpool_gpuagent.adapters.gpu_transfer import Transfer
from kvpool_gpuagent.ports import PageCopy
from tests.fixtures.host_gpu import HostRuntime
from tests.fixtures.patience import PATIENCE_S

MIB = 1 << 20
KEY, BLOCKS = PageKey(b"k" * 16, b"c" * 16, 0), np.zeros(1, dtype=np.int64)


def page_copy(size_bytes: int) -> PageCopy:
    return PageCopy(key=KEY, page=memoryview(bytearray(size_bytes)), block_ids=BLOCKS)


def test_payloads_in_the_scratch_are_aligned_whatever_the_length_of_a_page() -> None:
    """Kernels load 16 bytes at once, and a page has 8 for each of its sums."""
    sizes = np.array([4168, 4096, 65_608])
    payloads = scratch_payloads([page_copy(size) for size in sizes.tolist()], MIB)
    assert not (payloads % 16).any()
    assert (payloads[:-1] + sizes[:-1] <= payloads[1:]).all()


class SlowMover:
    """Moves nothing, and says that the GPU is busy."""

    needs_scratch = True
    most_pages = 1024
    turn_s = 1.0

    def __init__(self) -> None:
        self.bursts: list[int] = []

    def page_bytes(self, copy: PageCopy) -> int:
        return MIB

    def issue(self, copies: Sequence[PageCopy], scratch_address: int) -> SlowMover:
        self.bursts.append(len(copies))
        return self

    def finish(self) -> Sequence[PageFault | None]:
        return [None] * 20  # as many as any burst has

    def record(self, size_bytes: int, duration_s: float) -> None:
        return None


async def test_a_lane_never_waits_for_more_scratch_than_there_is() -> None:
    """Beside a busy engine bursts want to be large, and the GPU gave a sixteenth of what was asked for."""
    runtime, mover = HostRuntime(memory_bytes=5 * MIB), SlowMover()
    lane = Lane(runtime, LaneStreams(runtime), Scratch(runtime, 64 * MIB), "store", lambda: False, lambda error: None)
    try:
        for _ in range(3):
            copies = [page_copy(64)] * 20
            transfer = Transfer(mover, copies, lambda: False, asyncio.get_running_loop().create_future())
            lane.submit(transfer)
            async with asyncio.timeout(PATIENCE_S):
                assert await transfer.settled == [None] * 20
    finally:
        await asyncio.to_thread(lane.close)
    assert max(mover.bursts) <= 4


async def test_a_lane_that_cannot_begin_says_so_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, broken = HostRuntime(), list[KvPoolError]()

    def attach() -> None:
        raise RuntimeError("the context is gone")

    monkeypatch.setattr(runtime, "attach", attach)
    lane = Lane(runtime, LaneStreams(runtime), Scratch(runtime, 8 * MIB), "store", lambda: False, broken.append)
    transfer = Transfer(SlowMover(), [page_copy(64)], lambda: False, asyncio.get_running_loop().create_future())
    lane.submit(transfer)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(KvPoolError, match=r"the context is gone.*restart the agent"):
            await transfer.settled
    await asyncio.to_thread(lane.close)
    assert len(broken) == 1


async def test_a_loop_that_has_ended_does_not_take_the_lane_with_it() -> None:
    """The thread that would tell it also tells the others."""
    runtime, mover, broken = HostRuntime(memory_bytes=5 * MIB), SlowMover(), list[KvPoolError]()
    lane = Lane(runtime, LaneStreams(runtime), Scratch(runtime, 4 * MIB), "store", lambda: False, broken.append)
    gone = asyncio.new_event_loop()
    forgotten = Transfer(mover, [page_copy(64)], lambda: False, gone.create_future())
    gone.close()
    try:
        lane.submit(forgotten)
        for _ in range(2):
            transfer = Transfer(mover, [page_copy(64)] * 20, lambda: False, asyncio.get_running_loop().create_future())
            lane.submit(transfer)
            async with asyncio.timeout(PATIENCE_S):
                assert await transfer.settled == [None] * 20
    finally:
        await asyncio.to_thread(lane.close)
    assert not broken
