"""Copies between GPUs by a driver that refuses batches of them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from kvpool.cuda.driver import CudaError
from kvpool_gpuagent.adapters.gpu.cuda_runtime import copy_peer_runs, dealt

RUNS = [(100 * number, 1000 * number, 8 + number) for number in range(1, 301)]


class Driver:
    """Takes batches until one of so many has come, single copies as long as the GPU works."""

    batched_copies = "cuMemcpyBatchAsync_v2"

    def __init__(self, good_batches: int, *, is_broken: bool = False) -> None:
        self.good_batches, self.is_broken = good_batches, is_broken
        self.batches: list[int] = []
        self.copies: list[tuple[int, int, int]] = []

    def call(self, name: str, *arguments: Any) -> None:
        if len(self.batches) == self.good_batches:
            raise CudaError("operation not supported", 801)
        self.batches.append(arguments[3])

    def copy(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        if self.is_broken:
            raise CudaError("an illegal memory access was encountered", 700)
        self.copies.append((destination, source, size_bytes))


def run(driver: Driver) -> bool:
    destinations, sources, sizes = np.array(RUNS, dtype=np.int64).T
    return copy_peer_runs(cast(Any, driver), destinations, sources, sizes, 7)


def test_batches_that_the_driver_takes_are_all() -> None:
    driver = Driver(good_batches=3)
    assert run(driver)
    assert (driver.batches, driver.copies) == ([128, 128, 44], [])


@pytest.mark.parametrize("good_batches", [0, 1])
def test_a_refused_batch_is_enqueued_copy_by_copy_with_all_others(good_batches: int) -> None:
    driver = Driver(good_batches)
    assert not run(driver)
    assert driver.copies == RUNS


def test_a_gpu_that_is_broken_is_no_driver_without_batches() -> None:
    with pytest.raises(CudaError, match="illegal memory access"):
        run(Driver(0, is_broken=True))


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 127, 256, 511, 512, 513, 1024, 7320])
@pytest.mark.parametrize("streams", [1, 4])
def test_copies_are_dealt_out_to_all_streams_alike(count: int, streams: int) -> None:
    parts = list(dealt(count, streams))
    assert [at for _, part in parts for at in range(part.start, part.stop)] == list(range(count))
    sizes = [part.stop - part.start for _, part in parts]
    assert not sizes or (max(sizes) <= 128 and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)
    by_stream = [sum(part.stop - part.start for number, part in parts if number == one) for one in range(streams)]
    assert max(by_stream) - min(by_stream) <= -(-count // (128 * streams))
    assert len(parts) <= -(-count // 128) + streams
