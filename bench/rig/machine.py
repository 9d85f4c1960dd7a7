"""What this machine does without kvpool: memory copies and plain files; and how to measure it alike."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def tune_process() -> None:
    """Keep 1 to 2 MiB buffers in the heap, as the services do: a baseline must not lose to malloc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 128 << 20)


def rate(size_bytes: int, run: Callable[[], Any]) -> float:
    """GB/s of moving size_bytes by `run`."""
    started_s = time.perf_counter()
    run()
    return size_bytes / (time.perf_counter() - started_s) / 1e9


def shared_bytes(size_bytes: int) -> Bytes:
    """Shared memory that is there: every page of it was touched."""
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)
    memory[:] = 1
    return memory


def random_bytes(size_bytes: int, seed: int) -> Bytes:
    """Bytes that no memory or disk can make smaller."""
    words = np.random.default_rng(seed).integers(0, 1 << 63, -(-size_bytes // 8), dtype=np.uint64)
    return words.view(np.uint8)[:size_bytes]


def _memcpy(source: Bytes, destination: Bytes) -> None:
    destination[:] = source


def _on_threads(threads: int, count: int, work: Callable[[range], None]) -> None:
    """Do `count` things, an equal part of them on each thread."""
    share = -(-count // threads)
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, range(at, min(at + share, count))) for at in range(0, count, share)]:
            done.result()


class CopyBaseline:
    """Copies of whole pages, one after another, from slots into a contiguous buffer: nothing is verified or found."""

    def __init__(self, page_bytes: int, page_count: int, copy: Callable[[Bytes, Bytes], object] = _memcpy) -> None:
        """copy: of a source to a destination."""
        self._copy_page = copy
        stride = -(-(page_bytes + 4096) // 4096) * 4096  # as slots lie in an arena
        self.size_bytes = page_bytes * page_count
        source = shared_bytes(stride * page_count)
        self._pages = [source[at * stride : at * stride + page_bytes] for at in range(page_count)]
        target = shared_bytes(self.size_bytes)
        self._targets = [target[at * page_bytes : (at + 1) * page_bytes] for at in range(page_count)]

    def rate(self, threads: int = 1) -> float:
        """GB/s on so many threads, each of which copies a part of the pages."""
        count = len(self._pages)
        if threads == 1:
            return rate(self.size_bytes, lambda: self._copy(range(count)))
        return rate(self.size_bytes, lambda: _on_threads(threads, count, self._copy))

    def _copy(self, pages: range) -> None:
        for number in pages:
            self._copy_page(self._pages[number], self._targets[number])


class FileBaseline:
    """Plain files of the same size, cut into one part for each thread, in pieces of a page."""

    def __init__(self, directory: Path, size_bytes: int, piece_bytes: int) -> None:
        self._directory, self._piece_bytes = directory, piece_bytes
        self._content = random_bytes(piece_bytes, 3)
        self._pieces = size_bytes // piece_bytes
        self.size_bytes = self._pieces * piece_bytes
        self._target = shared_bytes(self.size_bytes)
        self._written = 0

    def write_rate(self, threads: int) -> float:
        """GB/s of writing a new file and having it on disk; an older one is removed."""
        self.remove()
        self._written += 1
        self._path().touch()
        return rate(self.size_bytes, lambda: _on_threads(threads, self._pieces, self._write))

    def read_rate(self, threads: int) -> float:
        """GB/s of reading it from disk, its pages having been dropped from the page cache."""
        drop_from_page_cache([self._path()])
        return rate(self.size_bytes, lambda: _on_threads(threads, self._pieces, self._read))

    def remove(self) -> None:
        """Remove the file."""
        self._path().unlink(missing_ok=True)

    def _path(self) -> Path:
        return self._directory / f"plain-{self._written}"

    def _write(self, pieces: range) -> None:
        fd = os.open(self._path(), os.O_WRONLY)
        try:
            for piece in pieces:
                os.pwrite(fd, self._content.data, piece * self._piece_bytes)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def _read(self, pieces: range) -> None:
        fd = os.open(self._path(), os.O_RDONLY)
        try:
            for piece in pieces:
                start = piece * self._piece_bytes
                os.preadv(fd, [self._target[start : start + self._piece_bytes].data], start)
        finally:
            os.close(fd)


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Have files read from disk next time. Needs no privilege, but drops only what was written back."""
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # compacted away meanwhile
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
