"""Transfers past the page cache where the file system allows them and through it where memory does not; durable names.

A page fills whole blocks of 4 KiB. Bytes go straight between the arena and the disk, except for the last block of a
page, which is padded in a buffer of its own. None of this needs the interpreter's lock.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from kvpool_pagestore.core.extents import BLOCK_BYTES, Extent
from kvpool_server.data_directory import sync_directory

_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class Descriptors:
    """One file opened past and through the page cache; the latter is for what does not lie at block bounds in memory.

    Both ways see the same bytes: the kernel drops cached blocks that are written past the cache.
    """

    def __init__(self, path: Path, flags: int, *, is_direct: bool) -> None:
        """Raises OSError."""
        self._buffered = os.open(path, flags | os.O_CLOEXEC)
        self._direct: int | None = None
        if is_direct:
            try:
                self._direct = os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT)
            except OSError:
                os.close(self._buffered)
                raise
            # What is read ahead could be of a page that is just being written past the cache.
            os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_RANDOM)
        self._wrote_buffered = False

    def write(self, extent: Extent, piece: memoryview, trailer: bytes) -> None:
        """Fill an extent with bytes, zeros and a trailer."""
        whole = piece[: len(piece) // BLOCK_BYTES * BLOCK_BYTES]
        rest, tail_bytes = piece[len(whole) :], extent.size_bytes - len(whole)
        tail = _bounce(tail_bytes)
        tail[: len(rest)] = rest
        tail[len(rest) : tail_bytes - len(trailer)] = bytes(tail_bytes - len(trailer) - len(rest))
        tail[tail_bytes - len(trailer) :] = trailer
        buffers = [each for each in (whole, tail) if len(each)]
        if self._direct is not None and is_aligned(whole):
            _write_fully(self._direct, buffers, extent.offset_bytes)
        else:
            self._wrote_buffered = True
            _write_fully(self._buffered, buffers, extent.offset_bytes)

    def read_into(self, extent: Extent, piece: memoryview) -> bool:
        """Fill `piece` with the first bytes of an extent. False if the file ends before."""
        if self._direct is None or not is_aligned(piece):
            return not len(piece) or _read_fully(self._buffered, [piece], extent.offset_bytes)
        whole = piece[: len(piece) // BLOCK_BYTES * BLOCK_BYTES]
        rest = piece[len(whole) :]
        tail = _bounce(BLOCK_BYTES if len(rest) else 0)
        buffers = [each for each in (whole, tail) if len(each)]
        if not _read_fully(self._direct, buffers, extent.offset_bytes):
            return False
        rest[:] = tail[: len(rest)]
        return True

    def sync(self) -> None:
        """Raises OSError if anything that was written since the file was opened is lost."""
        if self._direct is not None:
            os.fdatasync(self._direct)
        if self._direct is None or self._wrote_buffered:
            os.fdatasync(self._buffered)

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)


class _Bounce(threading.local):
    """Two blocks of aligned memory for each thread: a page's padded end, with its trailer perhaps in a block more."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, 2 * BLOCK_BYTES))


_bounces = _Bounce()


def _bounce(size_bytes: int) -> memoryview:
    return _bounces.memory[:size_bytes]


def is_aligned(view: memoryview) -> bool:
    """Whether memory begins at a block bound, as transfers past the page cache want it; empty memory does."""
    return not len(view) or int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) % BLOCK_BYTES == 0


def _write_fully(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    while buffers:
        written = os.pwritev(descriptor, buffers, offset)
        offset += written
        buffers = _after(buffers, written)


def _read_fully(descriptor: int, buffers: Sequence[memoryview], offset: int) -> bool:
    while buffers:
        read = os.preadv(descriptor, buffers, offset)
        if not read:
            return False
        offset += read
        buffers = _after(buffers, read)
    return True


def _after(buffers: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """What is left of buffers of which the first `done` bytes are dealt with."""
    if done == sum(map(len, buffers)):
        return ()
    left = []
    for each in buffers:
        if done < len(each):
            left.append(each[done:])
        done = max(0, done - len(each))
    return left


def allows_direct(directory: Path) -> bool:
    """Whether the file system takes transfers past the page cache, blocks of 4 KiB at a time. Raises OSError."""
    path = directory / "direct"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno in _NO_DIRECT:
            return False
        raise
    try:
        _bounce(BLOCK_BYTES)[:] = bytes(BLOCK_BYTES)
        os.pwritev(descriptor, [_bounce(BLOCK_BYTES)], 0)
    except OSError as error:
        if error.errno in _NO_DIRECT:
            return False
        raise
    finally:
        os.close(descriptor)
        with suppress(OSError):
            path.unlink()
    return True


def make_directories(directory: Path) -> None:
    """Make a directory and those above it, durably. Raises OSError."""
    if not directory.is_dir():
        make_directories(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)
