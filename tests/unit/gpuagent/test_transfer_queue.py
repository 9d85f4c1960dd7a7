"""In which order transfers of one direction go over the link."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import Int64s
from kvpool.testing import eventually
from kvpool_gpuagent.adapters.gpu.copy_paths import Issued, QueueStreams
from kvpool_gpuagent.adapters.gpu.scratch import Scratch
from kvpool_gpuagent.adapters.gpu.transfer_queue import MOST_PASSED, Transfer, TransferQueue
from kvpool_gpuagent.core.pages import FIRST_WINDOW_ORDER, CopyBatch
from tests.fixtures.host_gpu import HostRuntime

BLOCKER = -1


class Done:
    turn_s = None

    def finish(self) -> None:
        return None


class RecordingPath:
    """Notes the addresses of the pages that it is given; a burst has one page."""

    needs_scratch = False
    most_pages = 1

    def __init__(self) -> None:
        self.issued: list[int] = []
        self.held = threading.Event()

    def sizes_bytes(self, batch: CopyBatch) -> Int64s:
        return np.ones(batch.count, dtype=np.int64)

    def issue(self, batch: CopyBatch, scratch_address: int) -> Issued:
        self.issued += batch.addresses.tolist()
        self.held.wait()
        return Done()


class Link:
    """A queue that stands still until what waits for it was submitted."""

    def __init__(self) -> None:
        self.path = RecordingPath()
        runtime = HostRuntime()
        streams, scratch = QueueStreams(runtime), Scratch(runtime, 1 << 20)
        self.queue = TransferQueue(runtime, streams, scratch, "load", on_broken=lambda error: None)
        self._moving: list[asyncio.Future[bool]] = []

    async def hold(self) -> None:
        self.submit(BLOCKER, FIRST_WINDOW_ORDER)
        await eventually(lambda: self.path.issued == [BLOCKER])

    def submit(self, name: int, order: int) -> None:
        names = np.array([name], dtype=np.int64)
        batch = CopyBatch(names, np.zeros(1, np.uint8), names[:, np.newaxis], np.zeros(1, np.int64), order)
        moving = asyncio.get_running_loop().create_future()
        self.queue.submit(Transfer(self.path, batch, CancelToken(), moving))
        self._moving.append(moving)

    async def order(self) -> list[int]:
        self.path.held.set()
        await asyncio.gather(*self._moving)
        return self.path.issued[1:]


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    link = Link()
    await link.hold()
    yield link
    link.path.held.set()
    await asyncio.to_thread(link.queue.close)


async def test_first_windows_go_before_later_ones_and_of_those_the_oldest_loads_go_first(link: Link) -> None:
    for name, order in ((20, 2), (21, 2), (10, 1), (30, FIRST_WINDOW_ORDER), (31, FIRST_WINDOW_ORDER)):
        link.submit(name, order)
    assert await link.order() == [30, 31, 10, 20, 21]


async def test_a_window_behind_another_is_passed_as_seldom(link: Link) -> None:
    link.submit(2000, order=2)
    link.submit(100, FIRST_WINDOW_ORDER)
    for name in range(1, MOST_PASSED):
        link.submit(100 + name, FIRST_WINDOW_ORDER)
    link.submit(1000, order=1)  # before the other, which was passed often enough
    small = list(range(3 * MOST_PASSED))
    for name in small:
        link.submit(name, FIRST_WINDOW_ORDER)
    order = await link.order()
    behind = [name for name in order[order.index(1000) :] if name in small]
    assert order.index(2000) < order.index(behind[0])


async def test_a_window_is_passed_by_a_bounded_number_of_first_windows(link: Link) -> None:
    large = [1000, 1001]
    for name in large:
        link.submit(name, order=1)
    small = list(range(3 * MOST_PASSED))
    for name in small:
        link.submit(name, FIRST_WINDOW_ORDER)
    order = await link.order()
    assert order == [
        *small[:MOST_PASSED],
        large[0],
        *small[MOST_PASSED : 2 * MOST_PASSED],
        large[1],
        *small[2 * MOST_PASSED :],
    ]
