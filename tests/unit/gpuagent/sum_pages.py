"""Arena segments with pages, and sum workers for tests."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from unittest.mock import patch

import numpy as np
import pytest

from kvpool.core.page import SUM_BLOCK_BYTES, PageKey, seal, slot_bytes
from kvpool.core.segment import MappedSegment
from kvpool_gpuagent.adapters import sum_process
from kvpool_gpuagent.adapters.page_sums import SummedPage, ThreadSums
from kvpool_gpuagent.adapters.sum_workers import SumWorkers
from tests.fixtures.patience import PATIENCE_S

BLOCK = SUM_BLOCK_BYTES
SIZES = (1, 63, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 9 * BLOCK, 2 * BLOCK)
CODEC = 1
WAIT_S = PATIENCE_S


def until(condition: Callable[[], bool]) -> None:
    """Raises TimeoutError."""
    end_s = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError
        pause.wait(0.005)


class Segment:
    """An arena segment with one slot after the other."""

    def __init__(self, sizes: tuple[int, ...] = SIZES, seed: int = 1) -> None:
        slots = [slot_bytes(size) for size in sizes]
        self.descriptor = os.memfd_create("sum-test")
        os.ftruncate(self.descriptor, sum(slots))
        self.memory = mmap.mmap(self.descriptor, sum(slots))
        self.memory[:] = np.random.default_rng(seed).bytes(len(self.memory))
        starts = [sum(slots[:number]) for number in range(len(slots))]
        view = memoryview(self.memory)
        self.pages = [
            summed(view[start : start + slot], size, number, seed)
            for number, (start, slot, size) in enumerate(zip(starts, slots, sizes, strict=True))
        ]

    def mapped(self) -> MappedSegment:
        return MappedSegment(memoryview(self.memory), self.descriptor)

    def close(self) -> None:
        """At once, for tests that count descriptors. Raises BufferError if anything kept a view."""
        os.close(self.descriptor)
        for page in self.pages:
            page.page.release()
        try:
            self.memory.close()
        except BufferError:
            gc.collect()  # views in tracebacks of errors that tests expected
            self.memory.close()


def summed(page: memoryview, payload_bytes: int, number: int, seed: int = 1) -> SummedPage:
    key = PageKey(seed.to_bytes(16, "big"), number.to_bytes(16, "big"), number)
    return SummedPage(page, key, CODEC, payload_bytes)


@contextmanager
def workers(count: int = 2, *, restart_s: float = 0.01) -> Iterator[SumWorkers]:
    with (
        patch.object(sum_process, "ANSWER_TIMEOUT_S", PATIENCE_S),
        closing(SumWorkers(count, ThreadSums(1), restart_s=restart_s)) as sums,
    ):
        until(lambda: len(sums.pids) == count)
        yield sums


def sealed_here(page: SummedPage) -> bytes:
    """The page as kvpool.core.page seals it."""
    copy = bytearray(page.page)
    seal(copy, page.key, page.codec, page.payload_bytes)
    return bytes(copy)


def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sums nothing from now on."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("summed in this process")

    monkeypatch.setattr("kvpool.core.page._sums", refuse)
