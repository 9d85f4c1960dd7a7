"""Scratch that is smaller than asked for, and transfers that cannot go on: slower, still right, never stuck."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import Int64s
from kvpool.core.errors import KvPoolError
from kvpool_gpuagent.adapters.gpu.copy_paths import QueueStreams
from kvpool_gpuagent.adapters.gpu.scratch import Scratch
from kvpool_gpuagent.adapters.gpu.transfer_queue import RUN_BURST_BYTES, Transfer, TransferQueue
from kvpool_gpuagent.core.pages import CopyBatch
from tests.fixtures.host_gpu import HostRuntime
from tests.fixtures.patience import PATIENCE_S

MIB = 1 << 20


def batch(*shards: int) -> CopyBatch:
    count = len(shards)
    return CopyBatch(
        np.arange(count, dtype=np.int64),
        np.array(shards, dtype=np.uint8),
        np.zeros((count, 1), dtype=np.int64),
        np.zeros(count, dtype=np.int64),
    )


class SlowPath:
    """Moves nothing, and says that the GPU is busy. A page has as many MiB as its shard says."""

    turn_s = 1.0

    def __init__(self, *, needs_scratch: bool = True, most_pages: int = 1024) -> None:
        self.needs_scratch, self.most_pages = needs_scratch, most_pages
        self.bursts: list[CopyBatch] = []

    def sizes_bytes(self, batch: CopyBatch) -> Int64s:
        return batch.shards.astype(np.int64) * MIB

    def issue(self, batch: CopyBatch, scratch_address: int) -> SlowPath:
        assert bool(scratch_address) == self.needs_scratch
        self.bursts.append(batch)
        return self

    def finish(self) -> None:
        return None


class GatedMover(SlowPath):
    """Its first burst is being enqueued until the gate opens."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(needs_scratch=False)
        self._gate = gate

    def issue(self, batch: CopyBatch, scratch_address: int) -> SlowPath:
        self._gate.wait(PATIENCE_S)
        return super().issue(batch, scratch_address)


def transfer(path: SlowPath, pages: CopyBatch) -> Transfer:
    return Transfer(path, pages, CancelToken(), asyncio.get_running_loop().create_future())


def make_queue(runtime: HostRuntime, scratch_bytes: int, broken: list[KvPoolError]) -> TransferQueue:
    return TransferQueue(runtime, QueueStreams(runtime), Scratch(runtime, scratch_bytes), "store", broken.append)


async def moved(transfers: TransferQueue, path: SlowPath, pages: CopyBatch) -> None:
    one = transfer(path, pages)
    transfers.submit(one)
    async with asyncio.timeout(PATIENCE_S):
        assert await one.outcome is True


async def test_a_lane_never_waits_for_more_scratch_than_there_is() -> None:
    """Beside a busy engine bursts want to be large, and the GPU gave a sixteenth of what was asked for."""
    path, broken = SlowPath(), list[KvPoolError]()
    transfers = make_queue(HostRuntime(memory_bytes=5 * MIB), 64 * MIB, broken)
    try:
        for _ in range(3):
            await moved(transfers, path, batch(*[1] * 20))
    finally:
        await asyncio.to_thread(transfers.close)
    assert max(burst.count for burst in path.bursts) <= 4
    assert not broken


async def test_every_page_goes_into_one_burst_in_order_whatever_their_sizes() -> None:
    path = SlowPath()
    transfers = make_queue(HostRuntime(memory_bytes=16 * MIB), 16 * MIB, [])
    shards = [1, 3, 1, 4, 1, 1, 2, 4, 4, 1]
    try:
        await asyncio.gather(moved(transfers, path, batch(*shards)), moved(transfers, path, batch(*shards[::-1])))
    finally:
        await asyncio.to_thread(transfers.close)
    assert np.concatenate([burst.shards for burst in path.bursts]).tolist() == shards + shards[::-1]
    assert np.concatenate([burst.addresses for burst in path.bursts]).tolist() == 2 * list(range(10))
    assert all(burst.shards.sum() <= 4 for burst in path.bursts)  # a quarter of the scratch


async def test_bursts_of_runs_are_bounded_by_bytes_and_pages_and_need_no_scratch() -> None:
    path = SlowPath(needs_scratch=False, most_pages=5)
    transfers = make_queue(HostRuntime(memory_bytes=0), 64 * MIB, [])
    try:
        await moved(transfers, path, batch(*[1] * 12))
        await moved(transfers, path, batch(*[30] * 5, 200, 100))
    finally:
        await asyncio.to_thread(transfers.close)
    assert RUN_BURST_BYTES == 64 * MIB
    assert [burst.count for burst in path.bursts] == [5, 5, 2, 2, 2, 1, 1, 1]


async def test_batches_that_wait_go_by_their_order_and_equal_ones_as_they_came() -> None:
    path, runtime = SlowPath(needs_scratch=False, most_pages=1), HostRuntime(memory_bytes=0)
    transfers = make_queue(runtime, 64 * MIB, [])
    gate = threading.Event()
    monopoly = transfer(GatedMover(gate), batch(1))
    orders = [0, 7, 5, 7, 0, 5]
    waiting = [
        transfer(path, replace(batch(1), addresses=np.array([at]), order=order)) for at, order in enumerate(orders)
    ]
    try:
        transfers.submit(monopoly)  # its thread is busy with it until all others wait
        for one in waiting:
            transfers.submit(one)
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(one.outcome for one in (monopoly, *waiting)))
    finally:
        gate.set()
        await asyncio.to_thread(transfers.close)
    assert [int(burst.addresses[0]) for burst in path.bursts] == [0, 4, 2, 5, 1, 3]


async def test_a_lane_that_cannot_begin_says_so_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, broken = HostRuntime(), list[KvPoolError]()

    def attach() -> None:
        raise RuntimeError("the context is gone")

    monkeypatch.setattr(runtime, "attach", attach)
    transfers = make_queue(runtime, 8 * MIB, broken)
    one = transfer(SlowPath(), batch(1))
    transfers.submit(one)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(KvPoolError, match=r"the context is gone.*restart the agent"):
            await one.outcome
    await asyncio.to_thread(transfers.close)
    assert len(broken) == 1


async def test_a_loop_that_has_ended_does_not_take_the_lane_with_it() -> None:
    """The thread that would tell it also tells the others."""
    path, broken = SlowPath(), list[KvPoolError]()
    transfers = make_queue(HostRuntime(memory_bytes=5 * MIB), 4 * MIB, broken)
    gone = asyncio.new_event_loop()
    forgotten = Transfer(path, batch(1), CancelToken(), gone.create_future())
    gone.close()
    try:
        transfers.submit(forgotten)
        for _ in range(2):
            await moved(transfers, path, batch(*[1] * 20))
    finally:
        await asyncio.to_thread(transfers.close)
    assert not broken
