"""Which memory is pinned, also while segments come and go in other threads."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvpool_gpuagent.adapters.gpu.cuda_runtime import PinnedExtents


def at(*addresses: int) -> npt.NDArray[np.int64]:
    return np.array(addresses, dtype=np.int64)


def test_addresses_are_pinned_if_each_lies_in_some_range() -> None:
    pinned = PinnedExtents()
    assert not pinned.has_all(at(0))
    pinned.add(300, 50)
    pinned.add(100, 100)
    assert pinned.has_all(at(100, 199))
    assert pinned.has_all(at(349, 100, 300))
    for beside in (99, 200, 299, 350):
        assert not pinned.has_all(at(beside))
        assert not pinned.has_all(at(150, beside))
    pinned.remove(100)
    pinned.remove(77)
    assert not pinned.has_all(at(100))
    assert pinned.has_all(at(300))


def test_neighbours_are_one_range_or_two() -> None:
    pinned = PinnedExtents()
    pinned.add(0, 10)
    pinned.add(10, 10)
    assert pinned.has_all(at(0, 19))
    assert not pinned.has_all(at(0, 20))


def test_a_range_that_stays_is_pinned_whatever_else_changes() -> None:
    pinned, is_over = PinnedExtents(), threading.Event()
    pinned.add(1000, 10)
    pinned.add(3000, 10)

    def change() -> None:
        while not is_over.is_set():
            pinned.add(2000, 10)
            pinned.remove(2000)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert all(pinned.has_all(at(1000, 3009)) for _ in range(2000))
    finally:
        is_over.set()
        thread.join()
