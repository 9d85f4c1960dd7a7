"""This host's memory: how much there is, how much of it this process may take, and filling in what is mapped of it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Final

_NO_LIMIT_BYTES = 1 << 60  # what version 1 says instead of "none" is just below 2^63
_ROOT = Path("/")
_MADV_DONTNEED: Final = 4
_MADV_POPULATE_READ: Final = 22  # since Linux 5.14, as is the next
_MADV_POPULATE_WRITE: Final = 23
# A call keeps other threads from mapping memory: 0.3 ms where the memory is in place, 3 ms and more where it is not.
_STEP_BYTES: Final = 4 << 20

# Called directly, because mmap.madvise holds the GIL for as long as the kernel fills pages.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def meminfo(root: Path = _ROOT) -> dict[str, int]:
    """Facts of /proc/meminfo in bytes, by name; empty where it cannot be read."""
    facts = dict[str, int]()
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            facts[name] = int(words[0]) << 10
    return facts


def cgroup_limit_bytes(root: Path = _ROOT) -> int | None:
    """The lowest memory limit of this process's cgroup and those above it, version 1 or 2; None if there is none."""
    limits = list[int]()
    for line in _text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes") if controllers else ("sys/fs/cgroup", "memory.max")
        )
        below = Path(path.strip("/"))  # in a container it may be the host's: then only the top is there
        for each in (below, *below.parents):
            text = _text(root / top / each / name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT_BYTES:
                limits.append(int(text))
    return min(limits, default=None)


def populate(mapping: mmap.mmap) -> None:
    """Put all memory of a shared, writable mapping in place, zeroed where it was never used, and fill in page tables.

    Reserved memory (posix_fallocate) is zeroed when it is first touched: that takes 0.5 s a GiB, and several times as
    long in a virtual machine that has not used it yet. Leaves that to the first touch on an older kernel. raises:
    OSError when there is not so much memory.
    """
    _advise(mapping, _MADV_POPULATE_WRITE)


def fill_page_tables(mapping: mmap.mmap) -> None:
    """The same for memory that is mostly in place: 64 KiB a fault, where `populate` takes one for each 4 KiB."""
    _advise(mapping, _MADV_POPULATE_READ)


def empty_page_tables(mapping: mmap.mmap) -> None:
    """Before a shared mapping is closed, which would do it under the GIL: 0.1 s a GiB. The memory stays as it is."""
    _advise(mapping, _MADV_DONTNEED)


def _advise(mapping: mmap.mmap, advice: int) -> None:
    first = ctypes.c_char.from_buffer(mapping)  # keeps the mapping from being closed meanwhile
    address, size_bytes = ctypes.addressof(first), len(mapping)
    try:
        for start in range(0, size_bytes, _STEP_BYTES):
            if _libc.madvise(address + start, min(_STEP_BYTES, size_bytes - start), advice):
                number = ctypes.get_errno()
                if number == errno.EINVAL:
                    return
                raise OSError(number, os.strerror(number))
    finally:
        del first


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
