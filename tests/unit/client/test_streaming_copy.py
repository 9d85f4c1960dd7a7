"""Large copies past the caches move the same bytes as memcpy, and nothing else."""

from __future__ import annotations

import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from kvpool.client import streaming_copy
from kvpool.client.streaming_copy import compile_streaming_copy, copy

MIB = 1 << 20
GUARD = 200


@pytest.fixture(params=["compiled", "memcpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled":
        assert compile_streaming_copy()
    else:
        monkeypatch.setattr(streaming_copy, "_kernel", None)
    return str(request.param)


@pytest.mark.parametrize("size_bytes", [1, 63, MIB - 1, MIB, MIB + 1, MIB + 64, 3 * MIB + 77])
@pytest.mark.parametrize(("here_at", "there_at"), [(0, 0), (0, 1), (3, 63), (64, 8)])
def test_exactly_these_bytes_are_copied(way: str, size_bytes: int, here_at: int, there_at: int) -> None:
    here = np.random.default_rng(size_bytes).integers(0, 256, here_at + size_bytes, np.uint8)
    there = np.full(there_at + size_bytes + GUARD, 7, np.uint8)
    copy(here.data[here_at:], there.data[there_at : there_at + size_bytes])
    assert np.array_equal(there[there_at : there_at + size_bytes], here[here_at:])
    assert (there[:there_at] == 7).all() and (there[there_at + size_bytes :] == 7).all()


def test_what_cannot_be_copied_is_refused_before_a_byte_is_written(way: str) -> None:
    there = bytearray(2 * MIB)
    for size_bytes in (1, MIB):
        with pytest.raises(ValueError, match="cannot be copied"):
            copy(memoryview(b"1" * size_bytes), memoryview(there))
    with pytest.raises(ValueError):
        copy(memoryview(b"1" * 2 * MIB), memoryview(bytes(2 * MIB)))
    assert not any(there)


def test_several_threads_copy_at_once(way: str) -> None:
    here = np.random.default_rng(5).integers(0, 256, (8, 2 * MIB), np.uint8)
    there = np.zeros_like(here)
    threads = [threading.Thread(target=copy, args=(here[at].data, there[at].data)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(here, there)


def raising(error: Exception) -> Callable[[], object]:
    def compiled() -> object:
        raise error

    return compiled


@pytest.mark.parametrize("trouble", ["missing", "does not fit numpy", "told to compile nothing"])
def test_without_a_working_numba_copies_are_memcpy(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_copy, "_kernel", None)
    if trouble == "missing":
        monkeypatch.setitem(sys.modules, "numba", None)
    elif trouble == "does not fit numpy":
        monkeypatch.setattr(streaming_copy, "_compiled", raising(SystemError("initialization of _internal failed")))
    else:
        monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    assert not compile_streaming_copy()
    there = bytearray(2 * MIB)
    copy(memoryview(b"1" * 2 * MIB), memoryview(there))
    assert there == b"1" * 2 * MIB


def test_a_large_copy_runs_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_streaming_copy()
    kernel, lines = streaming_copy._kernel, list[int]()
    assert kernel is not None

    def counting(destination: int, source: int, count: int) -> None:
        lines.append(count)
        kernel(destination, source, count)

    monkeypatch.setattr(streaming_copy, "_kernel", counting)
    there = np.zeros(2 * MIB + 64, np.uint8)
    copy(memoryview(bytes(2 * MIB)), there.data[: 2 * MIB])
    copy(memoryview(bytes(MIB // 2)), there.data[: MIB // 2])
    assert len(lines) == 1 and 2 * MIB // 64 - 1 <= lines[0] <= 2 * MIB // 64


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions of other processors have other names")
def test_the_kernel_bypasses_the_caches_and_ends_with_a_fence() -> None:
    assert compile_streaming_copy()
    code = "".join(cast(Any, streaming_copy._kernel).inspect_asm().values())
    assert "movnt" in code and "fence" in code


def test_other_threads_run_while_a_large_copy_does() -> None:
    assert compile_streaming_copy()
    here, there = np.ones(256 * MIB, np.uint8), np.zeros(256 * MIB, np.uint8)
    began, ended, seen = threading.Event(), threading.Event(), list[float]()

    def copying() -> None:
        began.set()
        for _ in range(8):
            copy(here.data, there.data)
        ended.set()

    thread = threading.Thread(target=copying)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody is made to let go of the interpreter
    try:
        thread.start()
        began.wait()
        while not ended.is_set():
            seen.append(time.monotonic())
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval_s)
    thread.join()
    assert len(seen) > 8
