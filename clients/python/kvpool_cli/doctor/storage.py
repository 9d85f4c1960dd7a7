"""Directories of disk tiers: room, and transfers past the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvpool_cli.doctor.finding import Finding, failure, ok, warning
from kvpool_cli.quantities import size

_BLOCK_BYTES = 4096


def examine_directory(path: Path, wanted_bytes: int) -> Iterator[Finding]:
    """wanted_bytes: the budget of the disk tier; 0: not known."""
    try:
        found = os.statvfs(path)
        used = _used_bytes(path)
    except OSError as error:
        yield failure(
            "data_dir", f"{path} cannot be used: {error.strerror}", "make it, for the user that the pagestore runs as"
        )
        return
    free = found.f_bavail * found.f_frsize
    if wanted_bytes and free + used < wanted_bytes:
        yield failure(
            "disk_space",
            f"{path} has {size(free)} free beside {size(used)} in use, --disk-bytes is {size(wanted_bytes)}",
            "a smaller --disk-bytes or a larger disk: a full disk makes the tier read-only",
        )
    else:
        yield ok("disk_space", f"{path} has {size(free)} free, {size(used)} in use")
    if found.f_files and found.f_favail * 100 < found.f_files:
        yield warning(
            "inodes", f"{path} has {found.f_favail} inodes left of {found.f_files}", "remove small files there"
        )
    yield _direct(path)


def _used_bytes(path: Path) -> int:
    """Of the files there; a pagestore at work makes and removes them meanwhile. Raises OSError."""
    total = 0
    for directory, _, names in os.walk(path, onerror=None):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def _direct(path: Path) -> Finding:
    try:
        descriptor, name = tempfile.mkstemp(prefix=".kvpool-doctor-", dir=path)
    except OSError as error:
        return failure(
            "data_dir", f"{path} cannot be written: {error.strerror}", "give it to the user that the pagestore runs as"
        )
    try:
        os.close(descriptor)
        descriptor = os.open(name, os.O_WRONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, _BLOCK_BYTES) as block:
                os.pwrite(descriptor, block, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            return failure("data_dir", f"{path} cannot be written: {error.strerror}", "see the kernel's log (dmesg)")
        return warning(
            "direct_io",
            f"the file system of {path} cannot write past the page cache: pages take memory twice",
            "put the data directory on ext4 or xfs on a local disk, not on overlayfs or tmpfs",
        )
    finally:
        os.unlink(name)
    return ok("direct_io", f"{path} can be written past the page cache")
